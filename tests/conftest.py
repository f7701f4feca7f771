"""What every test run needs to know."""

collect_ignore_glob = ["*/scripts/*"]
"""Training scripts that tests start as processes of their own: importing one would train."""
