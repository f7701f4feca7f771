"""Scripts that do not look like the plain loop."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.agent.guard.record import GuardRecord, read_record
from flatout.agent.guard.recorder import GuardRecorder
from flatout.guard.judge import judge
from flatout.guard.obstacles import Trials
from flatout.records.ablation import LossCheck
from flatout.records.technique import Numerics
from tests.guard import loop
from tests.guard.loop import FakeSession

Script = Callable[[FakeSession], None]
STEPS = 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def record_of(tmp_path: Path) -> Callable[..., GuardRecord]:
    """Run a script under the recorder; the first run is the reference of the others."""
    baseline = tmp_path / "baseline.npz"

    def run(script: Script, *, autocast: bool = False) -> GuardRecord:
        torch.manual_seed(0)
        session = FakeSession()
        is_first = not baseline.exists()
        path = baseline if is_first else tmp_path / "other.npz"
        GuardRecorder(session, {} if is_first else {"reference": str(baseline)}, path)
        with session.hooked(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            script(session)
        session.fire("stop")
        record = read_record(path)
        return replace(record, low_precision=False)  # this autocast is no script's

    return run


def check_of(
    record_of: Callable[..., GuardRecord], script: Script, candidate: Script, promise: Numerics
) -> LossCheck:
    baseline = record_of(script)
    return judge(
        Trials(
            baseline=baseline,
            candidate=record_of(candidate),
            calibration=record_of(script, autocast=True),
            repeat=record_of(script),
            promise=promise,
        )
    )


def batches() -> Iterator[loop.Batch]:
    return (loop.vectors(step) for step in range(STEPS))


def closure_script(scale: float = 1.0, clip: float = 0.05, lr: float = 1e-3) -> Script:
    """Train as Lightning does: backward and clipping inside the closure of one step."""

    def script(session: FakeSession) -> None:
        model = loop.mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        session.optimizers.append(optimizer)
        for batch in batches():
            session.fire("batch", batch, "loader")

            def closure(batch: loop.Batch = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(session.forward(model, batch[0]).float(), batch[1])
                session.backward(loss * scale)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                return loss

            optimizer.step(closure)

    return script


def test_a_closure_that_runs_backward_once_is_compared_in_full(record_of: Any) -> None:
    check = check_of(record_of, closure_script(), closure_script(), Numerics.EXACT)

    assert check.status == "same", check
    assert {"gradient", "clipped_gradient", "update"} <= check.worst.keys()
    assert "not compared" not in check.why


@pytest.mark.parametrize(
    ("candidate", "check_name"),
    [
        (closure_script(scale=1.5), "gradient"),
        (closure_script(clip=1e9), "clipped_gradient"),
        (closure_script(lr=2e-3), "settings"),
    ],
)
def test_faults_inside_a_closure_are_rejected(
    record_of: Any, candidate: Script, check_name: str
) -> None:
    check = check_of(record_of, closure_script(), candidate, Numerics.PRECISION)

    assert check.status == "rejected", check
    assert check.worst[check_name] > 1


def lbfgs_script(scale: float = 1.0) -> Script:
    def script(session: FakeSession) -> None:
        model = nn.Linear(32, 10)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        session.optimizers.append(optimizer)
        for batch in batches():
            session.fire("batch", batch, "loader")

            def closure(batch: loop.Batch = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(session.forward(model, batch[0]).float(), batch[1])
                session.backward(loss * scale)
                return loss

            optimizer.step(closure)

    return script


def test_a_closure_that_runs_backward_often_leaves_a_visible_gap(record_of: Any) -> None:
    check = check_of(record_of, lbfgs_script(), lbfgs_script(), Numerics.EXACT)

    assert check.status == "same", check
    assert "optimizer updates not compared" in check.why
    assert "closure runs backward more than once" in check.why


def test_a_fault_in_a_closure_that_runs_backward_often_is_rejected(record_of: Any) -> None:
    check = check_of(record_of, lbfgs_script(), lbfgs_script(scale=1.5), Numerics.PRECISION)

    assert check.status == "rejected", check
    assert check.worst["gradient"] > 1


def by_hand_script(lr: float = 0.1, scale: float = 1.0) -> Script:
    """Train without optimizer and without loader."""

    def script(session: FakeSession) -> None:
        model = loop.mlp()
        for x, y in batches():
            loss = F.cross_entropy(session.forward(model, x).float(), y)
            model.zero_grad()
            session.backward(loss * scale)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= lr * parameter.grad

    return script


def test_a_script_without_optimizer_and_loader_is_compared(record_of: Any) -> None:
    check = check_of(record_of, by_hand_script(), by_hand_script(), Numerics.EXACT)

    assert check.status == "same", check
    assert "without an optimizer" in check.why


@pytest.mark.parametrize("candidate", [by_hand_script(lr=0.2), by_hand_script(scale=1.5)])
def test_faults_without_an_optimizer_are_rejected(record_of: Any, candidate: Script) -> None:
    check = check_of(record_of, by_hand_script(), candidate, Numerics.PRECISION)

    assert check.status == "rejected", check


def test_other_arguments_without_a_loader_are_rejected(record_of: Any) -> None:
    def candidate(session: FakeSession) -> None:
        forward = session.forward
        session.forward = lambda model, x: forward(model, x.flip(0))  # type: ignore[method-assign]
        by_hand_script()(session)

    check = check_of(record_of, by_hand_script(), candidate, Numerics.PRECISION)

    assert check.status == "rejected", check
    assert check.why.startswith("samples: call 1 of root0")


def gan_script(lr: float = 1e-3, *, freeze: bool = False) -> Script:
    """Train two roots with two optimizers; one is called with what the other makes."""

    def script(session: FakeSession) -> None:
        maker, critic = nn.Linear(8, 32), loop.mlp()
        if freeze:
            maker.bias.requires_grad_(requires_grad=False)
        second = torch.optim.Adam(critic.parameters(), lr=1e-3)
        first = torch.optim.Adam([p for p in maker.parameters() if p.requires_grad], lr=lr)
        session.optimizers += [second, first]
        for step, (x, _) in enumerate(batches()):
            session.fire("batch", x, "loader")
            noise = torch.randn(32, 8, generator=loop.generator(step))
            fake = session.forward(maker, noise)
            second.zero_grad()
            real_loss = F.softplus(-session.forward(critic, x).float()).mean()
            fake_loss = F.softplus(session.forward(critic, fake.detach()).float()).mean()
            session.backward(real_loss)
            session.backward(fake_loss)
            second.step()
            first.zero_grad()
            session.backward(F.softplus(-session.forward(critic, fake).float()).mean())
            first.step()

    return script


def test_two_optimizers_are_compared_each(record_of: Any) -> None:
    check = check_of(record_of, gan_script(), gan_script(), Numerics.EXACT)

    assert check.status == "same", check


def test_images_that_the_training_computes_are_no_samples(record_of: Any) -> None:
    baseline = record_of(gan_script())
    rounded = record_of(gan_script(), autocast=True)

    check = judge(
        Trials(
            baseline=baseline, candidate=rounded, calibration=rounded, promise=Numerics.PRECISION
        )
    )

    assert check.status == "within", check


@pytest.mark.parametrize("candidate", [gan_script(lr=2e-3), gan_script(freeze=True)])
def test_a_fault_of_the_second_optimizer_is_rejected(record_of: Any, candidate: Script) -> None:
    check = check_of(record_of, gan_script(), candidate, Numerics.PRECISION)

    assert check.status == "rejected", check


def scheduled_script(gamma: float) -> Script:
    def script(session: FakeSession) -> None:
        model = loop.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
        session.optimizers.append(optimizer)
        for batch in batches():
            session.fire("batch", batch, "loader")
            optimizer.zero_grad()
            session.backward(F.cross_entropy(session.forward(model, batch[0]).float(), batch[1]))
            optimizer.step()
            scheduler.step()

    return script


def test_a_scheduled_rate_is_followed(record_of: Any) -> None:
    check = check_of(record_of, scheduled_script(0.5), scheduled_script(0.5), Numerics.EXACT)

    assert check.status == "same", check


def test_another_schedule_is_rejected(record_of: Any) -> None:
    check = check_of(record_of, scheduled_script(0.5), scheduled_script(0.6), Numerics.PRECISION)

    assert check.status == "rejected", check
    assert "lr is 0.06, was 0.05" in check.why


class Noisy(torch.optim.SGD):
    """An optimizer whose step depends on chance."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter += 0.01 * torch.randn_like(parameter)


def noisy_script(session: FakeSession) -> None:
    model = loop.mlp()
    optimizer = Noisy(model.parameters(), lr=0.1)
    session.optimizers.append(optimizer)
    for batch in batches():
        session.fire("batch", batch, "loader")
        optimizer.zero_grad()
        session.backward(F.cross_entropy(session.forward(model, batch[0]).float(), batch[1]))
        optimizer.step()


def test_an_optimizer_of_chance_is_told_not_to_follow_its_shadow(record_of: Any) -> None:
    check = check_of(record_of, noisy_script, noisy_script, Numerics.EXACT)

    assert "does not follow its own shadow" in check.why


def empty_step_script(lr: float = 0.1) -> Script:
    """Make a step without gradients first, as some do to please a scheduler."""

    def script(session: FakeSession) -> None:
        model = loop.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        session.optimizers.append(optimizer)
        optimizer.step()
        for batch in batches():
            session.fire("batch", batch, "loader")
            optimizer.zero_grad()
            session.backward(F.cross_entropy(session.forward(model, batch[0]).float(), batch[1]))
            optimizer.step()

    return script


def test_a_step_without_gradients_is_no_step(record_of: Any) -> None:
    record = record_of(empty_step_script())

    assert [(s.step, s.moved) for s in record.gradients] == [(1, False)] * 2 + [(2, True)] * 2
    assert [update.step for update in record.updates] == [1, 2, 3]
    assert len(record.optimizers[0].settings) == len(record.losses)


def test_the_recorder_changes_nothing_and_its_shadow_is_not_heard(tmp_path: Path) -> None:
    def weights(*, recorded: bool) -> tuple[list[Tensor], int, Tensor]:
        torch.manual_seed(0)
        session = FakeSession()
        if recorded:
            GuardRecorder(session, {}, tmp_path / "guard.npz")
        kept: list[nn.Module] = []
        session.on("root", kept.append)
        with session.hooked():
            noisy_script(session)
        return list(kept[0].parameters()), session.steps_heard, torch.get_rng_state()

    ours, our_steps, our_stream = weights(recorded=True)
    theirs, their_steps, their_stream = weights(recorded=False)

    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert our_steps == their_steps == STEPS
    assert torch.equal(our_stream, their_stream)


def test_a_fused_optimizer_with_a_scaler_is_seen_unscaled(tmp_path: Path) -> None:
    setting = loop.Setting(scaled=True, clip=0.0, unscale=False, optimizer=(("fused", True),))

    fused = loop.train(loop.CASES["mlp"], tmp_path / "fused.npz", setting)
    plain = loop.train(loop.CASES["mlp"], tmp_path / "plain.npz", loop.Setting(clip=0.0))

    for ours, theirs in zip(fused.gradients, plain.gradients, strict=True):
        if ours.step == 1:
            assert all((ours.sketches[n] == theirs.sketches[n]).all() for n in theirs.sketches)


def test_a_step_that_the_scaler_skips_is_no_step(tmp_path: Path) -> None:
    def spoil(step: int, batch: loop.Batch) -> loop.Batch:
        x, y = batch
        return (x * torch.inf if step == 0 else x), y

    records = [
        loop.train(
            loop.CASES["mlp"],
            tmp_path / f"{fused}.npz",
            loop.Setting(scaled=True, load=spoil, clip=0.0, optimizer=(("fused", fused),)),
        )
        for fused in (False, True)
    ]

    for record in records:
        assert len(record.losses) == 19
        assert [s.step for s in record.gradients] == [1, 1, 2, 2]
        first = record.gradients[0].sketches
        assert all(bool(np.isfinite(value).all()) for value in first.values())


def drawing_script(draw: Callable[[Tensor], Tensor]) -> Script:
    """Train with something between the model and its loss."""

    def script(session: FakeSession) -> None:
        model = loop.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.optimizers.append(optimizer)
        for batch in batches():
            torch.rand(3)  # what a loader draws
            session.fire("batch", batch, "loader")
            optimizer.zero_grad()
            out = draw(session.forward(model, batch[0]))
            session.backward(F.cross_entropy(out, batch[1]))
            optimizer.step()

    return script


@pytest.mark.parametrize(
    ("draw", "draws"), [(torch.tanh, False), (functools.partial(F.dropout, p=0.1), True)]
)
def test_it_notes_whether_random_numbers_are_drawn_in_the_training(
    record_of: Any, draw: Callable[[Tensor], Tensor], *, draws: bool
) -> None:
    assert record_of(drawing_script(draw)).draws is draws
