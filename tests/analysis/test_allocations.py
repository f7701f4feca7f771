from flatout.analysis import allocations
from flatout.analysis.allocations import (
    EARLIER,
    OWN,
    AllocationEvent,
    AllocationLook,
    AllocationSite,
    LiveBlock,
    StepEnd,
    replay,
)

OTHER = AllocationSite("other")
FORWARD = AllocationSite("forward", "head", "train.py:5")
END = AllocationEvent(9.0, ends_step=True)
WEIGHT = LiveBlock(
    1_000, AllocationSite(EARLIER), 0, AllocationLook((250,), "torch.float32", "parameter", "head")
)


def end(*, counts=True, found=None, total=None):
    return StepEnd(OTHER, {1: WEIGHT} if found is None else found, total, counts)


def step(*events):
    return [AllocationEvent(0.0, place=OTHER), *events, END]


def test_the_peak_holds_what_was_alive_then_and_what_was_there_before():
    events = [
        *step(),
        *step(
            AllocationEvent(1.0, 8, 50),
            AllocationEvent(2.0, 8, -50),
            AllocationEvent(3.0, place=FORWARD),
            AllocationEvent(4.0, 8, 300),
            AllocationEvent(5.0, 8, look=AllocationLook((75,), "torch.float32")),
            AllocationEvent(6.0, place=OTHER),
            AllocationEvent(7.0, 8, -300),
        ),
    ]

    seen = allocations.summary(replay(events, [end(counts=False), end()]))

    assert (seen["peak_bytes"], seen["peak_phase"]) == (1_300, "forward")
    assert seen["by_phase"] == {"other": 1_300, "forward": 1_300}
    assert [(item["bytes"], item["line"]) for item in seen["largest"]] == [
        (1_000, ""),
        (300, "train.py:5"),
    ]
    assert seen["by_module"] == {"head": 1_300}
    assert seen["ends"] == [1_000]


def test_what_a_step_leaves_behind_is_counted_by_line_but_for_the_last_step():
    made = [AllocationEvent(1.0, place=FORWARD)]
    events = [
        *step(),
        *step(*made, AllocationEvent(2.0, 8, 40)),
        *step(*made, AllocationEvent(2.0, 16, 40)),
        *step(*made, AllocationEvent(2.0, 24, 40)),
    ]

    seen = allocations.summary(replay(events, [end(counts=False), *[end()] * 3]))

    assert seen["ends"] == [1_040, 1_080, 1_120]
    assert seen["grown_by_line"] == {"train.py:5": 80}


def test_what_flatout_keeps_itself_is_no_leak():
    own = {8: LiveBlock(4, AllocationSite(EARLIER), 0, AllocationLook((), "torch.float32", OWN))}
    events = [*step(), *step(AllocationEvent(1.0, 8, 4)), *step()]

    seen = allocations.summary(replay(events, [end(counts=False), *[end(found=own)] * 2]))

    assert seen["ends"] == [0, 0]
    assert seen["grown_by_line"] == {}


def test_the_allocators_own_total_corrects_what_python_cannot_reach():
    events = [*step(), *step()]

    seen = allocations.summary(replay(events, [end(counts=False, total=5_000), end(total=5_000)]))

    assert seen["peak_bytes"] == 5_000


def test_a_step_that_has_not_ended_is_left_out():
    books = replay([*step(), AllocationEvent(1.0, 8, 9_999)], [end()])

    assert books.ends == [1_000]
    assert books.peak_bytes == 0


def test_a_plot_keeps_the_highest_points():
    points = [(float(i), i % 7) for i in range(4_000)]

    thin = allocations.thinned(points)

    assert len(thin) == allocations.MAX_POINTS
    assert max(count for _, count in thin) == 6
