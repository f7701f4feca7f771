"""Loaders of other projects at the same job; see `benchmarks.suites.loader_peers`."""
