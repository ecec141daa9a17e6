"""Faults on purpose, in a running local network: what `spark-dfl chaos` does, and how peers play along."""
