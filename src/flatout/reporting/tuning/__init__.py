"""The report of `tune`."""
