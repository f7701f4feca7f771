"""Every tip of the articles has a row, and every row's script does what the page says."""

import re
import shlex
import sys

import pytest

from benchmarks.articles import FOLDER, PAGES, page, read
from flatout.cli.commands import SUMMARIES, flatout
from flatout.records import catalogue
from tests.support.programs import ran

TIPS = {
    1: "gpu_util attempts journey workers preprocess_on_device tokenize_ahead data_format "
    "batch_size free_memory shuffling staged_table larger_is_faster cpu_or_gpu_first",
    2: "four_workers_a_gpu pin_memory avoid_transfers construct_on_gpu ddp_not_dp precision_16 "
    "profile lightning_flags workers_train_on_cpu",
    3: "memory_model amp checkpointing loader_options torch_profiler peak_memory "
    "precision_and_checkpointing accumulation empty_cache warm_up",
    4: "throughput_and_quality ten_methods precision_costs_memory containers experts "
    "native_attention accumulated_updates tiling gemm",
    5: "one_gpu_of_four data_parallel distributed_data_parallel model_parallel synchronisation "
    "out_of_memory slower_with_more",
}
"""The articles' headings, tips, snippets and questions, in their order."""
KNOWN = read()["tip"]
RESULTS = {tip["script"]: tip["result"] for tip in KNOWN if "script" in tip}
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
QUICK = {"accumulation.py", "on_device.py", "checkpointing.py"}
"""Run by `make test`, too; the others are slow."""


@pytest.mark.parametrize("article", TIPS)
def test_every_tip_of_an_article_has_a_row(article):
    assert [tip["id"] for tip in KNOWN if tip["article"] == article] == TIPS[article].split()


@pytest.mark.parametrize("tip", KNOWN, ids=lambda tip: tip["id"])
def test_a_row_says_the_same_in_both_languages(tip):
    assert ("wrong_en" in tip) == ("wrong_ko" in tip)
    assert ("script" in tip) == ("result" in tip)


@pytest.mark.parametrize("command", sorted({tip["command"] for tip in KNOWN}))
def test_a_command_of_the_page_exists_with_its_options(command):
    program, *words = shlex.split(command)
    if program == "python":
        assert (FOLDER.parent.parent / words[0]).is_file()
        return

    assert program == "flatout"
    assert words[0] in SUMMARIES
    flatout.get_command(None, words[0]).make_context(words[0], words[1:])  # or it raises
    for names in re.findall(r"--only (\S+)", command):
        assert all(catalogue.technique_class(name) for name in names.split(","))


@pytest.mark.parametrize("language", PAGES)
def test_the_page_is_that_of_the_rows(language):
    written = PAGES[language].read_text(encoding="utf-8")

    assert written == page(language), "run python -m benchmarks.articles"


def test_every_script_is_in_the_page():
    assert sorted(RESULTS) == SCRIPTS


@pytest.mark.parametrize(
    "script",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS],
)
def test_a_script_shows_what_the_page_says(script):
    if script == "data_format.py":
        pytest.importorskip("PIL")
    if script == "lightning_flags.py":
        pytest.importorskip("lightning")
    command = [sys.executable, str(FOLDER / script)]

    done = ran(command, timeout=120)

    assert done.returncode == 0, done.stderr
    assert f"result: {RESULTS[script]}" in done.stdout
