"""What every test run needs to know."""

import signal

collect_ignore_glob = ["*/scripts/*"]
"""Training scripts that tests start as processes of their own: importing one would train."""


def pytest_configure():
    """Let Ctrl-C work in what tests start: a shell ignores it for the jobs in its background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
