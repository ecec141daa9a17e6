"""Many peers on one host."""
