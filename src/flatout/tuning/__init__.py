"""Try techniques, keep what helps, prove it: the experiments of `tune` and `measure`."""
