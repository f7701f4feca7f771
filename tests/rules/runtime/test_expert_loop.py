import pytest
from torch import nn

from flatout.agent.describe import describe
from flatout.records.profile import ModelFacts
from flatout.rules.runtime.expert_loop import check
from tests.techniques.facts import machine, model, profile


class Mixture(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.gate = nn.Linear(8, count)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))


def mixing(experts, expert_parameters):
    facts = model(parameters=1000, experts=experts, expert_parameters=expert_parameters)
    return profile(models=(facts,))


def test_experts_are_counted_by_the_name_of_their_list():
    facts = describe(Mixture(6))

    assert (facts["experts"], facts["expert_parameters"]) == (6, 6 * 72)
    assert describe(nn.Sequential(nn.Linear(8, 8)))["experts"] == 0


def test_frozen_experts_are_no_more_than_the_whole_model():
    mixture = Mixture(6)
    mixture.experts.requires_grad_(requires_grad=False)
    facts = {k: v for k, v in describe(mixture).items() if k in ModelFacts.__dataclass_fields__}

    finding = check(profile(models=(ModelFacts(**facts),)), machine())

    # 6 experts of 8 x 8 + 8 alongside a gate of 8 x 6 + 6.
    assert "which hold 89 % of its parameters" in finding.because
    assert finding.share == pytest.approx(432 / 486)
    assert finding.is_bound


def test_many_experts_are_reported_with_what_they_hold():
    finding = check(mixing(8, 800), machine())

    assert finding.share == 0.8
    assert finding.because.startswith("Net keeps 8 experts as separate modules, which hold 80 %")
    assert "grouped_mm" in finding.next


def test_it_is_silent_for_few_experts_and_for_small_ones():
    assert check(mixing(2, 800), machine()) is None
    assert check(mixing(8, 10), machine()) is None
    assert check(profile(), machine()) is None
