"""Each section of the detailed report says what was measured, in every language."""

from dataclasses import replace

import pytest
from rich.cells import cell_len

from flatout.analysis.journey import techniques_of
from flatout.records.journey import TRAINING, Journey
from flatout.records.memory import MemoryStory, TensorAtPeak
from flatout.records.messages import LANGUAGES, messages
from flatout.records.profile import PHASES
from flatout.records.readings import (
    GpuReadings,
    IdleSplit,
    Limits,
    RankFacts,
    SyncPoint,
    TraceEntry,
    TraceSummary,
)
from flatout.records.units import GIB, KIB, MIB
from flatout.reporting.blocks import terminal_lines
from flatout.reporting.profile.sentences import left_out
from flatout.reporting.profile.tables import details, find_least_copy_ms
from tests.analysis.test_pipeline import found
from tests.reporting.full_profile import filled
from tests.rules.journey_facts import MIB as MIB_A_STEP
from tests.rules.journey_facts import journey, leg
from tests.rules.pipeline_facts import pipeline
from tests.rules.rank_facts import rank as fed_rank

ENGLISH = messages("en")
LIMITS = Limits(
    flops_per_step=3.1e9,
    gemm_flops_per_s=250e9,
    gemm_dtype="bfloat16",
    copy_bytes_per_s=1e9,
    loader_samples_per_s=377.5,
    least_step_ms=12.4,
)


def shown(profile, name, width=1000, say=ENGLISH):
    """Return a section as the terminal shows it; empty where there is none."""
    blocks = [block for part in details(profile) if part.name == name for block in part.blocks]
    return "\n".join(terminal_lines(blocks, say, width))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_of_a_section_is_wider_than_the_terminal(starved, width, language):
    facts = filled(starved)
    for part in details(facts):
        lines = shown(facts, part.name, width, messages(language)).splitlines()

        assert max(map(cell_len, lines)) <= width, part.name


def test_what_was_not_measured_has_no_section(starved):
    assert [part.name for part in details(starved)] == ["ceilings"]


def test_the_loader_alone_is_held_against_what_the_training_takes(starved):
    text = shown(replace(starved, samples_per_s=151.0, limits=LIMITS), "limits")

    assert "at most, 2.50x what the training takes now (151)" in text


def test_one_rank_s_loader_is_held_against_one_rank_s_training(starved):
    ranks = (fed_rank(0), fed_rank(1))

    text = shown(replace(starved, samples_per_s=302.0, limits=LIMITS, ranks=ranks), "limits")

    assert "2.50x what one of the ranks takes now (151)" in text


def test_a_loader_that_is_slower_alone_is_not_called_a_limit(starved):
    text = shown(replace(starved, samples_per_s=400.0, limits=LIMITS), "limits")

    assert "makes 378 samples/s, no more than the training takes now (400)" in text


def test_the_least_step_names_its_peak(starved):
    text = shown(replace(starved, limits=LIMITS), "limits")

    assert (
        "3.10 GFLOP a step at 250 GFLOP/s, the measured matmul peak in bfloat16, take 12.4 ms: "
        "at most 17.1x."
    ) in text


@pytest.mark.parametrize(
    ("least_ms", "words"),
    [(0.01, "not what this step is about"), (424.8, "not all counted operations are really done")],
)
def test_a_least_step_that_promises_nothing_says_why(starved, least_ms, words):
    text = shown(replace(starved, limits=replace(LIMITS, least_step_ms=least_ms)), "limits")

    assert words in text
    assert "at most 0.50x" not in text


def test_copies_have_a_least_time_on_a_gpu_only(starved):
    loader = replace(starved.training_loaders[0], batch_bytes=2_000_000)
    fed = replace(starved, loaders=(loader,), batches_per_step=4.0, limits=LIMITS)

    assert find_least_copy_ms(fed, LIMITS) is None
    assert find_least_copy_ms(replace(fed, device_kind="cuda"), LIMITS) == pytest.approx(8.0)
    twice = replace(fed, device_kind="cuda", loaders=(loader, loader))
    assert find_least_copy_ms(twice, LIMITS) == pytest.approx(8.0)  # the batches are of both


def test_what_is_missing_says_why(starved):
    missing = {"flops_per_step": "the counter failed in this script"}
    facts = replace(starved, limits=Limits(missing=missing))

    told = list(map(ENGLISH.text, left_out(facts)))

    assert "flops_per_step: not available: the counter failed in this script" in told


def test_copies_are_held_against_what_the_machine_can_do(starved):
    speed = {"bytes_per_step": 20.0 * MIB_A_STEP, "bytes_per_s": 2000.0 * MIB_A_STEP}
    facts = replace(
        starved,
        journey=Journey(legs=(leg("h2d", 10.0, where=TRAINING, **speed),)),
        limits=Limits(copy_bytes_per_s=8000.0 * MIB_A_STEP),
    )

    row = shown(facts, "journey").splitlines()[-1]

    assert "20.0 MiB  1.95 GiB/s       7.81 GiB/s" in row


def test_workers_show_what_they_read_and_how_they_grow(starved):
    text = shown(replace(starved, journey=journey(growth=2.0 * MIB_A_STEP)), "workers")

    assert [line.split()[:2] for line in text.splitlines()[-2:]] == [
        ["worker", "0"],
        ["worker", "1"],
    ]
    assert "growth per step" in text
    assert "2.0 MiB" in text


def started(starved, **facts):
    first, *others = starved.loaders
    loaders = (replace(first, is_training=True, **facts), *others)
    return shown(replace(starved, journey=journey(), loaders=loaders), "workers")


def test_how_workers_start_is_explained_with_who_chose_it(starved):
    forked = started(starved, start_method="fork", start_reason="flatout forks them: no main guard")

    assert "by fork: copies of the training process" in forked
    assert "Why so: flatout forks them: no main guard." in forked
    assert "by spawn: fresh processes" in started(starved, start_method="spawn")
    assert "start by" not in started(starved)


def test_what_a_fork_takes_over_is_named_with_its_risk(starved):
    alive = {"cuda_at_start": True, "threads_at_start": "tqdm_monitor"}

    forked = started(starved, start_method="fork", **alive)
    spawned = started(starved, start_method="spawn", **alive)

    assert "CUDA was initialised before the fork" in forked
    assert "alive at the fork (tqdm_monitor)" in forked
    assert "CUDA" not in spawned
    assert "tqdm_monitor" not in spawned


def test_legs_cores_and_techniques_of_a_sample_are_shown(starved):
    text = shown(replace(starved, pipeline=found()), "pipeline")

    assert "8.2 cores feed one device with this pipeline, at the 2000 samples/s" in text
    assert "There are 4 cores: too few" in text
    assert "fast_decode leaves 5.3 cores at least (decode)." in text
    assert "ram_cache leaves 1.5 cores at least (read, decode, tokenise, transform" in text
    (decode,) = [line for line in text.splitlines() if line.startswith("decode ")]
    assert decode.split()[1:4] == ["1.440", "35", "%"]
    assert "75.2 KiB" in decode


def test_the_cores_after_packing_are_said_in_every_language(starved):
    packable = replace(starved, pipeline=pipeline(techniques=("packed_data",)))

    # Decoding is 3 of the 4 ms for which 8 cores are needed.
    assert "2.0 cores at least after packing" in shown(packable, "pipeline")
    assert "2.0" in shown(packable, "pipeline", say=messages("ko"))


def test_techniques_that_need_consent_are_not_offered(starved):
    whole = found()
    known = ("packed_data", "scaled_decode")
    stages = tuple(
        replace(stage, techniques=techniques_of(stage.name, known, is_repeated=None))
        for stage in whole.stages
    )

    text = shown(replace(starved, pipeline=replace(whole, stages=stages)), "pipeline")

    # 8.2 cores for 4.1 ms, of which reading and decoding are 1.68.
    assert "4.8 cores at least after packing" in text
    assert "scaled_decode leaves" not in text


def test_enough_cores_need_no_techniques(starved):
    text = shown(replace(starved, pipeline=found(cores=16)), "pipeline")

    assert "There are 16 cores: enough." in text
    assert "leaves" not in text


def test_less_than_a_core_for_each_rank_is_not_called_none(starved):
    text = shown(replace(starved, pipeline=found(cores=0.5)), "pipeline")

    assert "There are 0.5 cores: too few" in text


TENSOR = TensorAtPeak(
    bytes=512 * MIB,
    shape=(8, 1024, 50257),
    dtype="torch.float32",
    line="train.py:31",
    phase="forward",
    module="head",
)
PARAMETER = TensorAtPeak(
    bytes=2 * KIB,
    shape=(16, 32),
    dtype="torch.float32",
    line="",
    phase="earlier",
    module="encoder.linear_1",
    kind="parameter",
)
STORY = MemoryStory(
    peak_bytes=3 * GIB,
    peak_phase="backward",
    by_phase={"data_wait": 1 * GIB, "backward": 3 * GIB, "forward": 2 * GIB},
    by_module={"": 2 * GIB, "head": 512 * MIB},
    largest=(TENSOR, PARAMETER, TENSOR),
    steps=8,
)


def test_the_peak_its_phase_and_the_tensors_behind_it_are_shown(busy):
    facts = replace(busy, memory=STORY)

    assert "Peak 3.00 GiB in backward." in shown(facts, "by_phase")
    assert shown(facts, "largest").splitlines()[2:] == [
        "2 x 512.0 MiB  8 x 1024 x 50257 float32  train.py:31  forward  head",
        "      2.0 KiB  16 x 32 float32           -            earlier  "
        "parameter, encoder.linear_1",
    ]


def test_a_leak_is_shown_with_its_line(busy):
    leaking = replace(STORY, leak_bytes_per_step=400_000.0, leak_by_line={"train.py:9": 400_000.0})

    text = shown(replace(busy, memory=leaking), "by_phase")

    assert "390.6 KiB more stay allocated after each step." in text
    assert "390.6 KiB of it is allocated at train.py:9." in text


def test_the_pool_of_a_device_is_shown(busy):
    held = replace(STORY, reserved_bytes=4 * GIB, fragmentation_share=0.25, allocation_retries=2)

    text = shown(replace(busy, memory=held), "by_phase")

    assert "25 % of the 4.00 GiB reserved is used by no tensor at the peak." in text
    assert "flush 2 times" in text


GPU = GpuReadings(
    util_share=0.98,
    sm_active_share=0.43,
    power_w=310.2,
    power_limit_w=700.0,
    throttle=("power cap",),
    throttle_shares={"power cap": 0.25},
    samples=40,
)


def test_the_shares_that_are_taken_for_one_another_are_side_by_side(busy):
    text = shown(replace(busy, gpu=GPU, device_busy_share=0.61), "gpu")

    assert "Clocks were lowered: power cap (25 %)." in text
    assert [line.split("  ")[0] for line in text.splitlines()[-4:]] == [
        *("GPU-Util (nvidia-smi)", "device busy", "SM active", "power"),
    ]


ITEM = SyncPoint(line="train.py:31", what="item", per_step=2.0, ms_per_step=3.25)
PRINT = SyncPoint(line="train.py:40", what="print", per_step=0.1)


def test_the_lines_that_wait_are_shown_with_how_often_and_how_long(busy):
    text = shown(replace(busy, syncs=(ITEM, PRINT), device_kind="cuda"), "syncs")

    assert [line.split() for line in text.splitlines()[-2:]] == [
        ["train.py:31", "item", "2", "3.25", "ms"],
        ["train.py:40", "print", "0.1", "-"],
    ]


def test_on_the_cpu_it_says_that_nothing_waits(busy):
    text = shown(replace(busy, syncs=(PRINT,), device_kind="cpu"), "syncs")

    assert text.startswith("On the CPU there is nothing to wait for")


def test_more_rows_than_a_reader_wants_are_left_to_the_files(busy):
    text = shown(replace(busy, syncs=(ITEM,) * 13, device_kind="cuda"), "syncs")

    assert text.endswith("\n3 more rows are in the JSON and the HTML report.")


def rank(number, exposed, **more):
    return RankFacts(
        rank=number,
        step_ms=100.0,
        phases_ms=dict.fromkeys(PHASES, 16.0),
        samples_per_s=80.0,
        exposed_communication_ms=exposed,
        **more,
    )


def test_the_straggler_is_named_with_its_cause(busy):
    behind = rank(1, 1.0, is_straggler=True, because="forward takes it 60.0 ms a step")

    text = shown(replace(busy, ranks=(rank(0, 50.0), behind)), "ranks")

    assert "own work takes 50.0 ms to 99.0 ms a step" in text
    assert "Rank 1 is the straggler: forward takes it 60.0 ms a step." in text


def test_a_device_s_communication_is_not_seen(busy):
    text = shown(replace(busy, ranks=(rank(0, None), rank(1, None))), "ranks")

    assert "a trace shows it" in text
    assert "exposed" not in text


def test_of_many_ranks_those_with_most_work_of_their_own_come_first(busy):
    ranks = tuple(rank(number, 90.0 - number) for number in range(20))

    rows = shown(replace(busy, ranks=ranks), "ranks").splitlines()[-11:]

    assert [row.split()[0] for row in rows[:-1]] == [str(n) for n in range(19, 9, -1)]
    assert rows[-1].startswith("10 more rows")


ENTRY = TraceEntry(name="gemm", calls_per_step=2, ms_per_step=1.5, share=0.3)
ON_DEVICE = TraceSummary(
    steps=3,
    step_ms=5.0,
    kernels=(replace(ENTRY, name="x" * 200), ENTRY),
    idle=IdleSplit(host_wait_share=0.3, kernel_wait_share=0.02, other_share=0.08),
    exposed_communication_ms=0.5,
    layout_conversion_share=0.1,
    tensor_core_share=0.6,
    path="trace.json.gz",
    file_bytes=3 * 1024**2,
)


def test_the_trace_of_a_device_says_what_ran_and_what_did_not(busy):
    text = shown(replace(busy, trace=ON_DEVICE), "trace", width=80)

    assert "The device was idle for 40 % of the traced time: 30 % the host was late" in text
    assert "500 us a step of communication while nothing is computed." in text
    assert "10 % of the kernels' time converts memory layouts." in text
    assert "60 % of the kernels' time is in tensor-core kernels" in text
    assert "x" * 10 + "..." in text
    assert text.splitlines()[-1].split() == ["gemm", "2", "1.500", "30", "%"]


def test_without_a_device_the_operators_are_shown(busy):
    on_cpu = TraceSummary(steps=5, step_ms=5.0, operators=(ENTRY,))

    assert "operator, self time on the host" in shown(replace(busy, trace=on_cpu), "trace")
