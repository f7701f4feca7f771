"""The techniques: one file or folder each, found by name; see `flatout.records.catalogue`."""
