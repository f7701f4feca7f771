"""Memory before the run: trace, simulated GPU, simulated allocator, what fits."""
