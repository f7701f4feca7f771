"""flatout: your training script, flat out, with proof."""

__version__ = "0.1.0"
