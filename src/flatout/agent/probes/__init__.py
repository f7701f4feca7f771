"""Probes: what a pass listens to beyond the phases. One probe a module, found by its name.

A probe's module has `start(session, options)`, called in the training process once the hook
points are in place, and returns an object whose `result()` gives plain values when the run ends.
Cheap probes share the timed pass; those that slow the step down, or change what is computed, get
a pass of their own.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from flatout.agent.session import Session


class Probe(Protocol):
    """Something that listens until the run ends."""

    def result(self) -> Mapping[str, Any]:
        """Return what was seen, as plain values that JSON has."""
        ...


def start(name: str, session: Session, options: Mapping[str, Any]) -> Probe:
    """Start the probe of that name in this process."""
    module = importlib.import_module(f"{__name__}.{name}")
    probe: Probe = module.start(session, options)
    return probe


def results(session: Session, probes: Mapping[str, Probe]) -> dict[str, Mapping[str, Any]]:
    """Return what every probe saw; one that fails is recorded as such and left out."""
    found: dict[str, Mapping[str, Any]] = {}

    def note(name: str, probe: Probe) -> None:
        found[name] = probe.result()

    for name, probe in probes.items():
        session.quietly(note)(name, probe)
    return found
