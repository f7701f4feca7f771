"""Techniques that spread one training over several ranks."""
