"""What every test run needs to know."""

import gc
import os
import signal
import sys
import tempfile
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

collect_ignore_glob = ["scripts/*", "parallel/*_cases.py"]
"""Training scripts that tests start as processes of their own: importing one would train."""
MEASURES = (
    "benchmarks/test_input_pipeline.py",
    "benchmarks/test_run.py",
    "benchmarks/test_stage_process.py",
    "benchmarks/test_stages.py",
    "hardware/test_counter_samples.py",
    "hardware/test_counters.py",
    "hardware/test_host.py",
    "hardware/test_load.py",
    "hardware/test_peaks.py",
    "agent/probes/test_loader_alone.py",
    "agent/probes/test_pipeline.py",
    "agent/probes/test_worker_scan.py",
    "agent/test_journey_truth.py",
    "launch/test_supervisor.py",
    "techniques/compute/test_scheduled_gc.py",
    "tuning/passes/test_ceilings.py",
    "workflow/test_demo.py",
    "agent/test_epochs.py",
    "analysis/test_loader_faults.py",
    "workflow/test_skipped_steps.py",
    "workflow/test_ranks.py",
    "workflow/test_tuned_patch.py",
    "tuning/test_rescue.py",
    "workflow/test_more_ordinary_scripts.py",
)
"""Modules whose tests look at what was measured, or at all processes of the machine: no other test
may run beside them."""


def pytest_configure():
    """Let Ctrl-C work in what tests start: a shell ignores it for the jobs in its background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Two queues of tests: neither may find the trials of the other in the cache folder.
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="flatout-test-cache-")
    # What tests read is English, whatever language the machine speaks.
    os.environ["LC_ALL"] = "C.UTF-8"
    # Started late it would be a process that some test left behind.
    resource_tracker.ensure_running()


def pytest_runtest_logreport(report):
    """Name what failed at once: a long run that is cut short prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-2_000:]}", file=sys.__stderr__)


def pytest_collection_modifyitems(items):
    """Mark the tests that are not to have others beside them."""
    here = Path(__file__).parent
    alone = {here / name for name in MEASURES}
    for item in items:
        if item.path in alone:
            item.add_marker("measures")


SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGPROF")
    if hasattr(signal, name)
)
VARIABLES = ("FLATOUT", "OMP_", "MKL_", "PYTHON", "CUDA", "RANK", "WORLD_SIZE", "MASTER_", "HOME")
VARIABLES += ("XDG_", "TMPDIR", "PATH")
"""Beginnings of the variables that flatout, a test or a launcher sets; libraries set others."""


def settings_of_process():
    """Return what one test could leave behind for the next one in the same process."""
    now = {
        "automatic collection": gc.isenabled(),
        "frozen objects": gc.get_freeze_count() > 0,
        "working folder": Path.cwd(),
        "environment": {n: v for n, v in os.environ.items() if n.startswith(VARIABLES)},
        "signal handlers": tuple(signal.getsignal(number) for number in SIGNALS),
    }
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        now |= {
            "gradients": torch.is_grad_enabled(),
            "default dtype": torch.get_default_dtype(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "matmul precision": torch.get_float32_matmul_precision(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "anomaly detection": torch.is_anomaly_enabled(),
        }
    return now


@pytest.fixture(autouse=True)
def _process_as_it_was():
    """Fail the test that leaves a setting of the process changed, not the one that meets it.

    Importing a user's file may add its folder to the search path, and a script may set torch's
    threads: these are put back.
    """
    before, path = settings_of_process(), list(sys.path)
    threads = torch.get_num_threads() if (torch := sys.modules.get("torch")) else None
    yield
    sys.path[:] = path
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    after = settings_of_process()
    changed = {name: (was, after[name]) for name, was in before.items() if after[name] != was}
    if "environment" in changed:
        was, now = changed["environment"]
        changed["environment"] = {
            name: (was.get(name), now.get(name))
            for name in was.keys() | now.keys()
            if was.get(name) != now.get(name)
        }
    assert not changed, f"left changed in this process: {changed}"


@pytest.fixture
def nothing_swapped():
    """Find no swap under Pillow that another test left on, and leave none."""
    from flatout.data.images import substitution

    def undo_all():
        for swap in [*substitution._SWAPS.values()]:
            swap.undo()

    undo_all()
    yield
    undo_all()


# The same examples in every run, and no time limit for one of them: no test is decided by luck.
settings.register_profile(
    "flatout",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("flatout")
