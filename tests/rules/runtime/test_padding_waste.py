from flatout.rules.runtime.padding_waste import check
from tests.techniques.facts import loader, machine, profile


def padded(share, **changes):
    return profile(loaders=(loader(pad_share=share),), **changes)


def test_padding_is_reported_as_a_bound():
    finding = check(padded(0.4), machine())

    assert finding.is_bound
    assert finding.share == 0.4
    assert finding.because.startswith("40 % of the tokens in the first batches are padding")


def test_it_is_silent_below_a_tenth_of_the_step():
    assert check(padded(0.09), machine()) is None
    assert check(padded(0.4, phases_ms={"data_wait": 900.0}), machine()) is None


def test_padding_of_an_evaluation_or_unknown_padding_is_none():
    assert check(profile(loaders=(loader(pad_share=0.9, is_training=False),)), machine()) is None
    assert check(padded(None), machine()) is None
