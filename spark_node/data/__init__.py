"""Datasets and partitions: what is known, where it lies, how it is read, fetched and dealt out to peers."""
