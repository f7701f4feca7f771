"""Data that are packed for a tuning: what a sample says of all, and when all are packed."""

import os

import numpy as np
import pytest
from PIL import Image

from flatout.data.format import RAISE, TIMED_SAMPLE, read_header
from flatout.data.sources import open_source
from flatout.records.errors import UserError
from flatout.reporting.tuning.text import render_ablation
from flatout.techniques.data.packed_data import STORES, PackedData
from flatout.workflow.pack_for_tuning import (
    SAMPLE_STORE,
    STORE,
    PackCost,
    cost_of,
    pack_for_tuning,
)
from tests.techniques.facts import loader, machine, profile
from tests.workflow.test_tune import World, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A folder of pictures, and no store that anything else named."""
    monkeypatch.setenv(STORES, "")
    monkeypatch.setenv(TIMED_SAMPLE, "")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pictures" / "one"
    folder.mkdir(parents=True)
    dice = np.random.default_rng(0)
    for number in range(100):
        pixels = dice.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return folder.parent


def offered():
    waiting = profile(phases_ms={"data_wait": 100.0}, loaders=(loader(),))
    return [option.path for option in PackedData.candidates(waiting, machine())]


def test_a_sample_says_what_all_would_take(pictures, tmp_path):
    source = open_source(str(pictures), work=tmp_path / "work", on_bad=RAISE)

    cost = cost_of(source, str(pictures), tmp_path)

    assert (cost.encoding, cost.samples, cost.seen) == ("raw", 100, 64)
    assert 100 * 16 * 16 * 3 < cost.bytes < 2 * 100 * 16 * 16 * 3
    assert cost.seconds > 0


def test_what_takes_a_small_part_of_the_budget_is_packed_and_offered(pictures, tmp_path):
    out = tmp_path / "out"
    out.mkdir()

    cost = pack_for_tuning(str(pictures), out, 1e6, lambda _: None)

    assert cost.is_packed
    assert cost.sentence.startswith(f"packing the 100 samples of {pictures} took")
    assert offered() == [str((out / STORE).resolve())]


def test_of_what_takes_more_a_sample_is_packed_and_cost_and_command_are_named(pictures, tmp_path):
    cost = pack_for_tuning(str(pictures), tmp_path, 1e-6, lambda _: None)

    assert not cost.is_packed
    assert "100 samples" in cost.sentence
    assert f"`flatout pack {pictures} data.packed --encode raw`" in cost.sentence
    assert not (tmp_path / STORE).exists()
    assert offered() == []
    header = read_header(tmp_path / SAMPLE_STORE)
    assert (header.samples, header.sample_of) == (64, 100)
    assert cost.sample.samples == 64
    assert cost.sample.choice.settings["path"] == os.environ[TIMED_SAMPLE]
    assert 16 * 16 * 3 <= cost.sample.mean_bytes < 2 * 16 * 16 * 3


@pytest.mark.parametrize("budget_s", [1e6, 1e-6])
def test_of_parquet_nothing_that_was_written_out_is_left(pictures, tmp_path, budget_s):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"label": list(range(100))}), tmp_path / "a.parquet")

    cost = pack_for_tuning(str(tmp_path / "a.parquet"), tmp_path, budget_s, lambda _: None)

    assert cost.samples == 100
    assert list(tmp_path.rglob("*.arrow")) == []


def test_the_sample_grows_with_the_budget_and_is_kept_for_a_tuning_that_goes_on(
    pictures, tmp_path, monkeypatch
):
    monkeypatch.setattr("flatout.workflow.pack_for_tuning.TIME_SHARE", 0.0)

    more = pack_for_tuning(str(pictures), tmp_path, 1e6, lambda _: None)
    again = pack_for_tuning(str(pictures), tmp_path, 1e-6, lambda _: None)

    assert more.sample.samples == 100
    assert again.sample == more.sample


def test_of_data_that_changed_another_sample_is_packed(pictures, tmp_path):
    before = pack_for_tuning(str(pictures), tmp_path, 1e-6, lambda _: None)
    stored = read_header(tmp_path / SAMPLE_STORE).source["fingerprint"]
    for number in range(50):
        (pictures / "one" / f"{number:03}.png").unlink()

    after = pack_for_tuning(str(pictures), tmp_path, 1e-6, lambda _: None)

    assert (before.sample.samples, after.sample.samples) == (64, 50)
    assert read_header(tmp_path / SAMPLE_STORE).source["fingerprint"] != stored


def test_a_sample_that_was_interrupted_is_packed_again_in_the_size_of_now(
    pictures, tmp_path, monkeypatch
):
    monkeypatch.setattr("flatout.workflow.pack_for_tuning.TIME_SHARE", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("flatout.data.writer._assemble", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack_for_tuning(str(pictures), tmp_path, 1e6, lambda _: None)

    cost = pack_for_tuning(str(pictures), tmp_path, 1e-6, lambda _: None)

    assert cost.sample.samples == 64


def interrupted(*_):
    raise KeyboardInterrupt


def test_of_texts_the_command_keeps_them_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv(TIMED_SAMPLE, "")
    lines = tmp_path / "lines.txt"
    lines.write_text("one line of text\n" * 200)
    out = tmp_path / "out"
    out.mkdir()

    cost = pack_for_tuning(str(lines), out, 1e-6, lambda _: None)

    assert f"`flatout pack {lines} data.packed --encode original`" in cost.sentence
    assert cost.sample.samples == 64


def test_a_sample_of_damaged_files_ends_no_tuning(pictures, tmp_path):
    (pictures / "one" / "000.png").write_bytes(b"no image")

    cost = pack_for_tuning(str(pictures), tmp_path, 1e-6, lambda _: None)

    assert cost.sample.samples == 63


def test_a_store_that_would_fill_the_disk_does_not_fit():
    cost = PackCost(target="x", samples=1, seconds=1.0, bytes=6, free_bytes=10)

    assert not cost.fits(600.0)


def test_data_that_are_not_there_end_the_tuning_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world = World({})

    with pytest.raises(UserError):
        run(world, tmp_path / "out", pack=str(tmp_path / "nothing"))

    assert world.asked == []


def test_the_report_says_what_the_packing_took(pictures, tmp_path):
    world = World({"packed_data": 0.5})

    ablation = run(world, tmp_path / "out", only=("bf16_autocast",), pack=str(pictures))

    assert ablation.notes[0].startswith("packing the 100 samples")
    assert (tmp_path / "out" / STORE).is_dir()
    assert any("packed_data" in label for label in world.asked)


@pytest.fixture
def too_slow(monkeypatch):
    """Packing all takes too long for any budget."""
    monkeypatch.setattr("flatout.workflow.pack_for_tuning.TIME_SHARE", 0.0)


@pytest.mark.usefixtures("too_slow")
def test_the_report_says_what_packing_all_would_bring_and_the_recipe_has_none_of_it(
    pictures, tmp_path
):
    world = World({"packed_data": 0.5, "bf16_autocast": 0.6})

    ablation = run(world, tmp_path / "out", only=("bf16_autocast",), pack=str(pictures))

    (note,) = [x for x in ablation.notes if "in the place of all data" in x]
    assert "packed samples in the place of all data, training is 2.0" in note
    assert "on top of this recipe" in note
    assert ablation.recipe.names == ("bf16_autocast",)
    assert ablation.confirmation.ratio == pytest.approx(1 / 0.6, rel=0.05)
    assert any("packed_data" in label and "bf16" in label for label in world.asked)
    assert os.environ[TIMED_SAMPLE] == ""
    report = " ".join(render_ablation(ablation).split())
    assert "packed samples in the place" in report
    assert report.index("packed samples in the place") < report.index("packing all 100 samples")


@pytest.mark.usefixtures("too_slow")
def test_where_packing_does_not_reach_the_data_the_report_says_why(pictures, tmp_path):
    world = World({}, refused={"packed_data": "not_applicable"})

    ablation = run(world, tmp_path / "out", only=("bf16_autocast",), pack=str(pictures))

    assert "what packing would bring could not be measured: no such" in ablation.notes


@pytest.mark.usefixtures("too_slow")
def test_a_resumed_tuning_does_not_time_the_sample_again(pictures, tmp_path):
    given = {"only": ("bf16_autocast",), "pack": str(pictures)}
    before = run(World({"packed_data": 0.5}), tmp_path / "out", **given)
    world = World({})

    after = run(world, tmp_path / "out", resume=True, **given)

    assert world.asked == []
    said = [[x for x in one.notes if "in the place of" in x] for one in (before, after)]
    assert said[0] == said[1]
    assert said[0]


def test_the_next_tuning_of_the_same_process_is_not_offered_what_this_one_packed(
    pictures, tmp_path
):
    run(World({}), tmp_path / "out", only=("bf16_autocast",), pack=str(pictures))

    assert offered() == []
