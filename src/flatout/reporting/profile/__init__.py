"""The report of `measure`."""
