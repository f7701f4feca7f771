import pytest

from flatout.records.readings import CompileFacts
from flatout.rules.runtime.recompiles import check
from tests.techniques.facts import machine, profile


def known(most):
    made = CompileFacts(
        seconds=9.0,
        recompiles=most,
        recompile_s=6.0,
        most=most,
        place="model.py:12",
        reason="k == 0.5",
    )
    return profile(compiling=made)


def test_the_function_is_named_with_the_reason():
    finding = check(known(3), machine())

    assert finding.because == (
        "the function at model.py:12 was compiled 4 times; compiling again took 6 s; "
        "last because k == 0.5"
    )
    assert finding.share == pytest.approx(0.75)


def test_one_compilation_more_is_on_purpose():
    assert check(known(1), machine()) is None
    assert check(profile(), machine()) is None
