from dataclasses import replace

from flatout.analysis.journey import techniques_of
from flatout.reporting.messages import messages
from flatout.reporting.profile.journey import pipeline_lines
from flatout.reporting.profile.tables import pipeline_sheets
from tests.analysis.test_pipeline import found
from tests.rules.pipeline_facts import pipeline


def test_is_silent_where_nobody_looked(starved):
    assert pipeline_lines(starved, 80) == []
    assert list(pipeline_sheets(starved, messages("en"))) == []


def test_legs_cores_and_techniques_are_told(starved):
    text = "\n".join(pipeline_lines(replace(starved, pipeline=found()), 1000))

    assert "a sample     4.10 ms of one core (n=10): read 240 us (6 %) + 1.00 ms blocked" in text
    assert "decode 1.44 ms (35 %)" in text
    assert "8.2 cores feed one device with this pipeline, at the 2000 samples/s" in text
    assert "4 are there: too few" in text
    assert "fast_decode leaves 5.3 at least (decode)" in text
    assert "ram_cache leaves 1.5 at least (read, decode, tokenise, transform, normalise" in text


def test_bytes_are_told_by_leg_where_they_are_known(starved):
    text = "\n".join(pipeline_lines(replace(starved, pipeline=found()), 1000))

    # 77 kB of file and 600 kB of batch; what a transform handles nobody measured.
    assert "its bytes    read, decode 75.2 KiB; normalise, collate, sending to the loop 5" in text
    assert "585.9 KiB" in text


def test_bytes_of_a_leg_that_takes_no_time_are_left_out(starved):
    unread = {"functions": {"/home/me/train.py:__getitem__": 1.0}, "wall_s": 0.036}

    text = "\n".join(pipeline_lines(replace(starved, pipeline=found(**unread)), 1000))

    assert "its bytes    sending to the loop 585.9 KiB" in text


def test_a_diagnosis_without_bytes_has_no_line_for_them(starved):
    text = "\n".join(pipeline_lines(replace(starved, pipeline=pipeline()), 1000))

    assert "its bytes" not in text


def test_the_cores_after_packing_are_told_with_what_it_takes_away(starved):
    whole = found()
    known = ("packed_data", "scaled_decode")
    packable = replace(
        whole,
        stages=tuple(
            replace(stage, levers=techniques_of(stage.name, known, is_repeated=None))
            for stage in whole.stages
        ),
    )

    text = "\n".join(pipeline_lines(replace(starved, pipeline=packable), 1000))

    # 8.2 cores for 4.1 ms, of which reading and decoding are 1.68.
    assert "packing      4.8 cores at least after packing: packed_data takes read, decode" in text
    assert "scaled_decode" not in text


def test_enough_cores_need_no_techniques(starved):
    text = "\n".join(pipeline_lines(replace(starved, pipeline=found(cores=16)), 1000))

    assert "16 are there: enough" in text
    assert "techniques" not in text
    assert "packing" not in text


def test_the_table_speaks_every_language(starved):
    for language in ("en", "ko"):
        (sheet,) = pipeline_sheets(replace(starved, pipeline=found()), messages(language))

        assert len(sheet.rows) == 8
        assert "8.2" in sheet.sentences[0]


def test_the_table_tells_the_cores_after_packing_in_every_language(starved):
    packable = pipeline(levers=("packed_data",))

    for language in ("en", "ko"):
        (sheet,) = pipeline_sheets(replace(starved, pipeline=packable), messages(language))

        # Decoding is 3 of the 4 ms for which 8 cores are needed.
        assert "2.0" in sheet.sentences[-1]
