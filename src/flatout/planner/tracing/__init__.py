"""Trace what a training step allocates, on a GPU you do not have."""
