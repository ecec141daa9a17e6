"""One SPARK peer, and what runs many of them on one host."""

__version__ = "0.1.0"
