"""One claim, one file: each has `run(bench)`, which measures and returns a Record."""
