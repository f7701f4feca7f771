from dataclasses import replace

from flatout.records.profile import Ceilings
from flatout.rules.device.pageable_copies import check
from tests.techniques.facts import loader, machine, profile


def copying(h2d_ms=10.0, kind="cuda", **changes):
    drawn = loader(line="train.py:7", **changes)
    return profile(kind=kind, phases_ms={"h2d": h2d_ms}, loaders=(drawn,))


def test_copies_from_pageable_memory_are_reported_at_the_loader():
    finding = check(copying(), machine())

    assert finding.share == 10 / 110
    assert finding.lines == ("train.py:7",)


def test_it_is_silent_about_short_pinned_hidden_copies_and_the_cpu():
    hidden = replace(copying(), ceilings=Ceilings(free_copies=1.01, is_measured=True))

    assert check(copying(h2d_ms=1.0), machine()) is None
    assert check(copying(pin_memory=True), machine()) is None
    assert check(hidden, machine()) is None
    assert check(copying(kind="cpu"), machine()) is None
