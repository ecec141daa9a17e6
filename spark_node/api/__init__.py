"""For a user's own model and data, from Python: `simulate` and `Peer`. A thin layer over spark_node.launch."""
