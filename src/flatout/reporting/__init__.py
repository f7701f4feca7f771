"""Nouns in, text out. No torch, no numpy."""
