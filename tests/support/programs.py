"""Run a program to its end, and have what it wrote as text."""

import subprocess
import sys


def ran(words, *, check=False, **options):
    return subprocess.run(words, capture_output=True, text=True, check=check, **options)


def python(words, **options):
    return ran([sys.executable, *words], **options)
