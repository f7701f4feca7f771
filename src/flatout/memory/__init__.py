"""The memory model: what a training step allocates, and what an allocator makes of it."""
