"""The input pipeline: where samples lie, in which order they come, and how they reach the loop."""
