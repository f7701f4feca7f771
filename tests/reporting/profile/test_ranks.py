from dataclasses import replace

from flatout.records.profile import PHASES
from flatout.records.readings import RankFacts
from flatout.reporting.profile.limits import ranks_lines


def rank(number, exposed, **more):
    return RankFacts(
        rank=number,
        step_ms=100.0,
        phases_ms=dict.fromkeys(PHASES, 16.0),
        samples_per_s=80.0,
        exposed_communication_ms=exposed,
        **more,
    )


def text_of(profile, *ranks):
    return "\n".join(ranks_lines(replace(profile, ranks=ranks), 80))


def test_nothing_is_said_of_a_single_process(busy):
    assert ranks_lines(busy, 80) == []


def test_the_straggler_is_named_with_its_cause(busy, snapshot):
    behind = rank(1, 1.0, is_straggler=True, because="forward takes it 60.0 ms a step")

    assert text_of(busy, rank(0, 50.0), behind) == snapshot


def test_a_device_s_communication_is_not_seen(busy):
    text = text_of(busy, rank(0, None), rank(1, None))

    assert "not seen" in text
    assert "a trace shows it" in text


def test_of_many_ranks_those_with_most_work_of_their_own_are_shown(busy):
    text = text_of(busy, *(rank(number, 90.0 - number) for number in range(20)))

    shown = [line.split()[0] for line in text.splitlines()[4:12]]
    assert shown == [str(number) for number in range(12, 20)]
    assert "20 processes, the 8 with most work of their own shown" in text


def test_lines_fit_the_terminal(busy):
    lines = ranks_lines(replace(busy, ranks=(rank(0, 50.0), rank(1, 1.0))), 80)

    assert max(map(len, lines)) <= 80
