"""What a guard trial records, for `flatout.guard` to compare."""
