"""Saves, for a second, when it gets the signal that is named, and ends with code 3."""

import signal
import sys
import time
from pathlib import Path


def save(*_):
    time.sleep(1.0)
    Path("saved.txt").write_text("a checkpoint")
    sys.exit(3)


signal.signal(getattr(signal, sys.argv[1]), save)
Path("ready.txt").write_text("now")
while True:
    time.sleep(60)
