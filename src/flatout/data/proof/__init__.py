"""Prove that another way to make batches gives the same ones."""
