import pytest

from tests.rules.source.scenario import codes_in, fixed

SAME_LOSSES = ("8, shuffle=True", "8, shuffle=True, num_workers=os.cpu_count()")
HEAD = "import os\nimport multiprocessing as mp\nfrom torch.utils.data import DataLoader\n"


@pytest.mark.parametrize("count", ["os.cpu_count()", "mp.cpu_count()"])
def test_the_machine_s_cores_are_found_and_the_process_s_written(count):
    text = f"{HEAD}loader = DataLoader(data, num_workers={count})\n"

    assert codes_in(text) == {"DL04": [4]}
    assert "num_workers=len(os.sched_getaffinity(0)))" in fixed(text, "DL04")


@pytest.mark.parametrize(
    "count", ["4", "args.workers", "min(8, os.cpu_count())", "os.cpu_count() // 2"]
)
def test_bounded_and_given_numbers_are_left_alone(count):
    assert codes_in(f"{HEAD}loader = DataLoader(data, num_workers={count})\n") == {}
