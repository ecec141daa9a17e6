"""The mathematics: tensors in, tensors out. No I/O, no clock, no global state."""
