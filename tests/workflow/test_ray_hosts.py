"""`flatout run --ray` on a real cluster: two nodes of Ray on this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flatout.records.errors import UserError
from flatout.workflow import ray_hosts
from tests.support.programs import python, ran
from tests.workflow.test_hosts import SCRIPT

ray = pytest.importorskip("ray", reason="no Ray here")
FLATOUT = str(Path(sys.executable).parent / "flatout")
LONG = SCRIPT.replace("range(2)", "range(10**6)").replace(
    "    for x, y", "    print('at', epoch, flush=True)\n    for x, y"
)
pytestmark = pytest.mark.slow


def trainings_in(folder):
    """Return the processes that the command of a test in this folder has started."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder) in words and "--ray" not in words:
            found.append(process.info["pid"])
    return found


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.add_node(num_cpus=1)
    yield found
    found.shutdown()


@pytest.fixture
def on_ray(cluster, tmp_path):
    """Start `flatout run --ray` in a folder with a script."""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}

    def start(script, *options):
        (tmp_path / "train.py").write_text(script)
        return subprocess.Popen(
            [FLATOUT, "run", "--ray", *options, "train.py", str(tmp_path)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_two_hosts_train_like_one_process(on_ray, tmp_path):
    process = on_ray(SCRIPT, "--ranks", "1", "--hosts", "2")
    together, told = process.communicate(timeout=240)
    alone = python(["train.py"], cwd=tmp_path, check=True).stdout

    assert process.returncode == 0, told
    assert re.findall(r"loss \S+", together) == [alone.strip()]  # rank 0 alone prints


def test_a_script_that_fails_ends_the_training_with_its_exit_code(on_ray):
    process = on_ray(SCRIPT + "raise SystemExit(7)\n", "--ranks", "1")
    said, _ = process.communicate(timeout=240)

    assert process.returncode == 7
    assert "loss" in said


def test_more_hosts_than_the_cluster_has_are_refused_in_one_line(on_ray):
    process = on_ray(SCRIPT, "--gpus", "1", "--hosts", "2")
    _, told = process.communicate(timeout=240)

    assert process.returncode == 2
    assert "the cluster has 0 of 2 hosts with 1 GPU and 1 CPU each" in told
    assert "Traceback" not in told


def test_an_interrupt_ends_the_ranks_on_all_hosts(on_ray, tmp_path):
    process = on_ray(LONG, "--ranks", "1", "--hosts", "2")
    for line in process.stdout:
        if line.startswith("at "):
            break
    assert len(trainings_in(tmp_path)) > 2

    process.send_signal(signal.SIGINT)
    said, told = process.communicate(timeout=120)

    assert process.returncode == 130, (said[-2000:], told)
    give_up = time.monotonic() + 60
    while trainings_in(tmp_path) and time.monotonic() < give_up:
        time.sleep(0.2)
    assert not trainings_in(tmp_path)


def test_without_a_cluster_it_says_so_in_one_line(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1", "RAY_TMPDIR": str(tmp_path)}

    done = ran([FLATOUT, "run", "--ray", "--ranks", "1", "train.py"], cwd=tmp_path, env=environment)

    assert done.returncode == 2
    assert "found no cluster" in done.stderr
    assert "Traceback" not in done.stderr


def test_ray_client_is_refused_in_one_line():
    with pytest.raises(UserError, match="cannot use Ray Client"):
        ray_hosts._reach("ray://cluster:10001")


def test_a_bar_that_redraws_its_line_is_shown_as_it_goes(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, time\n"
        "for share in ('50', '100'):\n"
        "    print(f'{share} %', end='\\r', flush=True)\n"
        "    time.sleep(1)\n"
    )

    *shown, code = ray_hosts._train(
        ["run", "--ranks", "1", "train.py"], str(tmp_path), is_first=True
    )

    assert code == 0
    assert shown == [b"50 %\r", b"100 %\r"]
