"""A training on several ranks: how batches, random numbers and gradients are shared out."""
