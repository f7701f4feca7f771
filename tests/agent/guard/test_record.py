from pathlib import Path

import numpy as np
import pytest

from flatout.agent.guard import record
from flatout.agent.guard.record import (
    GradientSet,
    GuardRecord,
    OptimizerRecord,
    Update,
    find_record,
    read_record,
    write_record,
)


def sketches(count: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layer{n}.weight": random.standard_normal(64 if n % 3 else 5) for n in range(count)}


def large_record(count: int = 2000) -> GuardRecord:
    return GuardRecord(
        torch="2.13.0",
        device="cpu",
        threads=2,
        low_precision=True,
        samples={"train.py": {"[0]": ((4, "ab"), (8, "cd"))}},
        arguments={"root0": {"args[0]": ((4, "ef"),)}},
        structure={"(root)": "Net training"},
        optimizers=(
            OptimizerRecord(
                number=0,
                kind="torch.optim.adamw:AdamW",
                groups=(("layer0.weight",),),
                settings=(({"lr": 1e-3, "betas": [0.9, 0.999], "fused": None},),),
            ),
        ),
        start=sketches(count, 0),
        gradients=tuple(
            GradientSet(
                optimizer=0, step=step, point=point, moved=step > 1, sketches=sketches(count, step)
            )
            for step in (1, 2)
            for point in ("before_clip", "at_step")
        ),
        updates=(Update(optimizer=0, step=1, tensors={"layer0.weight": (0.0, 1e-3, 1.0, 2**-24)}),),
        update_gaps=("none",),
        buffers=sketches(3, 9),
        losses=(1.0, float("nan")),
        errors=("a probe",),
    )


def test_two_thousand_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    record = large_record()

    write_record(record, tmp_path / "guard.npz")
    found = read_record(tmp_path / "guard.npz")

    for name in ("torch", "samples", "arguments", "structure", "optimizers", "updates", "errors"):
        assert getattr(found, name) == getattr(record, name)
    assert np.array_equal(found.losses, record.losses, equal_nan=True)
    pairs = [(found.start, record.start), (found.buffers, record.buffers)]
    pairs += [
        (a.sketches, b.sketches) for a, b in zip(found.gradients, record.gradients, strict=True)
    ]
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert [path.name for path in tmp_path.iterdir()] == ["guard.npz"]


def test_an_empty_record_comes_back(tmp_path: Path) -> None:
    record = GuardRecord(torch="2", device="cpu", threads=1)

    write_record(record, tmp_path / "guard.npz")

    assert find_record(tmp_path / "guard.npz") is not None


@pytest.mark.chaos
def test_a_damaged_or_missing_record_is_no_record(tmp_path: Path) -> None:
    write_record(large_record(3), tmp_path / "guard.npz")
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes((tmp_path / "guard.npz").read_bytes()[:-200])

    assert find_record(damaged) is None
    assert find_record(tmp_path / "missing.npz") is None
    assert find_record(None) is None
    with pytest.raises(ValueError, match="no readable guard record"):
        read_record(damaged)


def test_a_record_made_in_another_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(large_record(3), tmp_path / "guard.npz")
    monkeypatch.setattr("flatout.agent.guard.record.SKETCH", "16 sums")

    with pytest.raises(ValueError, match="was made as"):
        read_record(tmp_path / "guard.npz")


def test_a_record_that_would_unpack_to_more_than_it_may_is_none(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "guard.json.npz", meta=np.zeros(1 << 20, np.uint8), numbers=0)
    monkeypatch.setattr(record, "MAX_NPZ_BYTES", 1 << 16)

    with pytest.raises(ValueError, match="it unpacks to"):
        read_record(tmp_path / "guard.json.npz")
