"""Decides whether a recipe still trains the same thing, from records of untimed trials."""
