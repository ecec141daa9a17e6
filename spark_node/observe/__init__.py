"""The passive observer: what a run did, shown and written down. It never sits in the path of training."""
