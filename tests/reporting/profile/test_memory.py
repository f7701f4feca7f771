from dataclasses import replace

from flatout.records.memory import MemoryStory, TensorAtPeak
from flatout.records.units import GIB, KIB, MIB
from flatout.reporting.profile.memory import memory_lines

STORY = MemoryStory(
    peak_bytes=3 * GIB,
    peak_phase="backward",
    by_phase={"data_wait": 1 * GIB, "backward": 3 * GIB, "forward": 2 * GIB},
    by_module={"": 2 * GIB, "head": 512 * MIB},
    largest=(
        TensorAtPeak(
            bytes=512 * MIB,
            shape=(8, 1024, 50257),
            dtype="torch.float32",
            line="train.py:31",
            phase="forward",
            module="head",
        ),
        TensorAtPeak(
            bytes=2 * KIB,
            shape=(16, 32),
            dtype="torch.float32",
            line="",
            phase="earlier",
            module="transformer.encoder.layers.11.feed_forward.linear_1",
            kind="parameter",
        ),
        TensorAtPeak(bytes=900, shape=(), dtype="", line="", phase="backward"),
    ),
    steps=8,
)


def test_the_peak_its_phase_and_the_tensors_behind_it_are_shown(busy):
    lines = memory_lines(replace(busy, memory=STORY), 80)

    assert lines == [
        "",
        "tensor peak  3.00 GiB in backward (n=8 steps); by phase: backward 3.00 GiB,",
        "             forward 2.00 GiB, data wait 1.00 GiB",
        "by module    head 512.0 MiB",
        "",
        "at the peak  shape                 made by",
        "-" * 75,
        "  512.0 MiB  8x1024x50257 float32  head, train.py:31",
        "    2.0 KiB  16x32 float32         parameter,...d_forward.linear_1, earlier",
        "  900 bytes  inside an op          backward",
    ]


def test_tensors_that_are_alike_share_a_row(busy):
    twice = replace(STORY, largest=(STORY.largest[0],) * 2)

    lines = memory_lines(replace(busy, memory=twice), 80)

    assert lines[-1] == "2 x 512.0 MiB  8x1024x50257 float32  head, train.py:31"


def test_a_leak_is_told_with_its_line(busy):
    leaking = replace(STORY, leak_bytes_per_step=400_000.0, leak_by_line={"train.py:9": 400_000.0})

    text = "\n".join(memory_lines(replace(busy, memory=leaking), 120))

    assert "leak         each step leaves 390.6 KiB behind: 390.6 KiB made at train.py:9\n" in text


def test_the_pool_of_a_device_is_told(busy):
    held = replace(STORY, reserved_bytes=4 * GIB, fragmentation_share=0.25, allocation_retries=2)

    text = "\n".join(memory_lines(replace(busy, memory=held), 120))

    assert "4.00 GiB, 25 % of it used by no tensor at the peak, 2 times flushed" in text


def test_there_is_no_section_without_a_story(busy):
    assert memory_lines(busy, 80) == []
