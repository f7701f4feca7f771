"""The record of a training process, written by real training in this process."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flatout.agent.session import Session
from flatout.agent.status import COST, EVERY_S, Publisher, _Loss, device_now
from flatout.records.phase_clock import NAMES, Clock
from flatout.records.trial_result import LoaderSeen, Segment
from flatout.records.trial_spec import TrialSpec
from tests.paths import ROOT


class Moments:
    """A clock that a test moves."""

    def __init__(self):
        self.moment = 100.0

    def __call__(self):
        return self.moment


@pytest.fixture
def moments():
    return Moments()


@pytest.fixture
def session(moments):
    session = Session(TrialSpec())
    session.clock = Clock(moments)
    return session


def step(session, moments, seconds=0.1, samples=8, **facts):
    """Let one step pass."""
    moments.moment += seconds
    by_phase = [0.0] * len(NAMES)
    by_phase[NAMES.index("data_wait")] = seconds / 4
    by_phase[NAMES.index("forward")] = seconds * 3 / 4
    session.clock.since = moments.moment
    segment = Segment(seconds=by_phase, samples=samples, **facts)
    session._record(segment)
    return segment


def records(folder):
    return [json.loads(path.read_text()) for path in folder.glob("status-*.json")]


def test_the_record_tells_steps_samples_and_phases(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)

    for _ in range(20):
        publisher.saw_segments([step(session, moments)])

    (record,) = records(tmp_path)
    assert record["over_samples"] / record["over_s"] == pytest.approx(80)
    assert record["over_s"] / record["over_steps"] == pytest.approx(0.1)
    assert record["seconds"]["data_wait"] / sum(record["seconds"].values()) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("whos", "samples"),
    [([0, 1], 8), ([0, 0, 0, 1], 24), ([0] * 4, 32)],
    ids=["an actor and its critic", "a critic before each generator's step", "one"],
)
def test_optimizers_that_take_turns_train_on_the_same_samples(
    tmp_path, session, moments, whos, samples
):
    publisher = Publisher(session, tmp_path)

    for who in whos * 20:
        publisher.saw_segments([step(session, moments, samples=0, who=who, called=8)])
    publisher.publish(moments.moment)

    assert publisher.samples == 20 * samples


def test_an_optimizer_that_is_made_again_has_samples_of_its_own(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)
    session.optimizer_count = 2  # both are gone

    publisher.saw_segments(
        [step(session, moments, samples=0, who=fold, called=8) for fold in (0, 0, 1, 1)]
    )

    assert publisher.samples == 4 * 8


def test_an_optimizer_that_joins_in_makes_no_step_of_negative_length(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)

    for who in [0] * 80 + [1, 0] * 3:
        publisher.saw_segments([step(session, moments, who=who)])
    publisher.publish(moments.moment)

    assert records(tmp_path)[0]["over_steps"] >= 0


def test_a_loader_that_is_evaluated_on_hides_no_samples_of_the_training(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)
    session.loaders["held out"] = LoaderSeen("held out", {})

    publisher.saw_segments([step(session, moments, samples=0, called=8)])

    assert publisher.samples == 8


def test_the_first_step_is_told_at_once(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)

    publisher.saw_segments([step(session, moments)])

    assert records(tmp_path)[0]["step"] == 1


def test_rates_are_those_of_the_last_seconds(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)

    for _ in range(100):
        publisher.saw_segments([step(session, moments, seconds=0.1)])
    for _ in range(100):
        publisher.saw_segments([step(session, moments, seconds=0.2)])

    (record,) = records(tmp_path)
    assert record["over_s"] / record["over_steps"] == pytest.approx(0.2, rel=0.02)


def test_records_are_as_rare_as_their_cost_asks(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)
    slow = publisher._record

    def on_a_slow_disk(moment):
        moments.moment += 0.05
        return slow(moment)

    publisher._record = on_a_slow_disk
    publisher.saw_segments([step(session, moments)])

    # From the step's end: the clock of the step does not hold the writing.
    assert publisher.next_at - session.clock.since == pytest.approx(COST * 0.05)
    assert COST * 0.05 > EVERY_S


def test_the_page_says_what_the_record_costs_at_most():
    page = " ".join((ROOT / "docs/commands/watch.md").read_text().split())

    assert f"every {COST:,} times as long as writing takes: at most {100 / COST:g} %" in page


def test_a_folder_that_is_gone_ends_the_records_and_not_the_training(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path / "gone")

    for _ in range(30):
        publisher.saw_segments([step(session, moments)])

    assert publisher.is_ended
    assert len(publisher.rows) == 0


def test_the_record_is_withdrawn_at_the_end(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)
    publisher.saw_segments([step(session, moments)])

    publisher.withdraw()

    assert list(tmp_path.iterdir()) == []


def test_a_scaled_loss_is_told_as_the_script_computed_it(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)
    loss = torch.tensor(0.5, requires_grad=True)
    scaled = loss * 1024
    session.unscaled = {scaled: loss.detach()}

    session.fire("backward", (scaled,))
    publisher.saw_segments([step(session, moments)])

    assert records(tmp_path)[0]["loss"] == 0.5


def test_one_loss_is_looked_at_for_each_record(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)

    session.fire("backward", torch.tensor(1.0))
    session.fire("backward", torch.tensor(2.0))
    publisher.saw_segments([step(session, moments)])

    assert records(tmp_path)[0]["loss"] == 1.0


def test_the_record_of_several_losses_fails_nowhere_with_torchs_own_dictionary(
    tmp_path, session, moments
):
    session.unscaled = WeakTensorKeyDictionary()
    publisher = Publisher(session, tmp_path)

    session.fire("backward", (torch.ones(3), torch.ones(3)))
    publisher.saw_segments([step(session, moments)])
    session.fire("backward", [torch.tensor(4.0)])
    publisher.saw_segments([step(session, moments, seconds=1.0)])

    assert records(tmp_path)[0]["loss"] == 4.0


def test_a_backward_on_no_single_loss_leaves_the_loss_unknown(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)

    session.fire("backward", (torch.ones(3), torch.ones(3)))
    publisher.saw_segments([step(session, moments)])

    assert records(tmp_path)[0]["loss"] is None


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)


def test_a_loss_travels_to_the_host_whatever_the_script_s_default_device(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **named: empty(*sizes, **named))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    arrived = SimpleNamespace(record=lambda _: None, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: arrived)
    losses, loss = _Loss(), torch.tensor(3.0).as_subclass(OnDevice)

    with torch.device("meta"):
        losses.see(loss, 7)

    assert losses.read() == (3.0, 7)


def test_the_device_is_asked_nothing_while_the_script_captures_a_graph(monkeypatch):
    asked, is_capturing = [], [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    arrived = SimpleNamespace(query=lambda: asked.append("query") or True)
    losses = _Loss()
    losses.waiting = (torch.tensor(3.0), arrived, 7)

    in_capture = losses.read()
    is_capturing[0] = False

    assert (in_capture, len(asked)) == ((None, None), 0)
    assert losses.read() == (3.0, 7)


def test_the_device_is_that_of_the_model_though_another_is_current(session, monkeypatch):
    parameter = SimpleNamespace(device=torch.device("cuda:1"))
    session.add_root(SimpleNamespace(parameters=lambda: iter([parameter])))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 + device.index)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}")
    )

    assert device_now(session) == {
        "kind": "cuda",
        "uuid": "GPU-cuda:1",
        "allocated_bytes": 101,
    }


@pytest.mark.gpu
def test_a_loss_on_the_device_is_read_when_it_has_arrived(tmp_path, session, moments):
    publisher = Publisher(session, tmp_path)

    session.fire("backward", torch.tensor(3.0, device="cuda"))
    torch.cuda.synchronize()
    time.sleep(0.01)
    publisher.saw_segments([step(session, moments)])

    assert records(tmp_path)[0]["loss"] == 3.0
