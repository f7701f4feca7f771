from dataclasses import replace

from flatout.reporting.messages import messages
from flatout.reporting.pipeline_tables import pipeline_sheets
from flatout.reporting.text.pipeline import pipeline_lines
from tests.profiling.test_pipeline import found


def test_is_silent_where_nobody_looked(starved):
    assert pipeline_lines(starved, 80) == []
    assert list(pipeline_sheets(starved, messages("en"))) == []


def test_legs_cores_and_levers_are_told(starved):
    text = "\n".join(pipeline_lines(replace(starved, pipeline=found()), 1000))

    assert "a sample     4.10 ms of one core (n=10): read 240 us (6 %) + 1.00 ms blocked" in text
    assert "decode 1.44 ms (35 %)" in text
    assert "8.2 cores feed one device with this pipeline, at the 2000 samples/s" in text
    assert "4 are there: too few" in text
    assert "fast_decode leaves 5.3 at least" in text


def test_enough_cores_need_no_levers(starved):
    text = "\n".join(pipeline_lines(replace(starved, pipeline=found(cores=16)), 1000))

    assert "16 are there: enough" in text
    assert "levers" not in text


def test_the_table_speaks_every_language(starved):
    for language in ("en", "ko"):
        (sheet,) = pipeline_sheets(replace(starved, pipeline=found()), messages(language))

        assert len(sheet.rows) == 8
        assert "8.2" in sheet.sentences[0]
