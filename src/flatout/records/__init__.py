"""Typed nouns, statistics and units. Standard library only."""
