"""Run a program to its end, and have what it wrote as text."""

import subprocess
import sys

from flatout.records.trial import Workload


def ran(words, *, check=False, **options):
    return subprocess.run(words, capture_output=True, text=True, check=check, **options)


def python(words, **options):
    return ran([sys.executable, *words], **options)


def workload_of(folder, target, *arguments):
    return Workload(target=target, arguments=arguments, folder=folder, python=sys.executable)
