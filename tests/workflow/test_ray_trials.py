"""`flatout tune --ray` on a real cluster: two nodes of Ray on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.hardware.machine import read_machine
from flatout.launch.trial_process import is_overlaid
from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome
from flatout.tuning.pair_hosts import HostTask
from flatout.workflow import ray_trials
from tests.support.programs import ran, workload_of
from tests.workflow.test_hosts import SCRIPT
from tests.workflow.test_ray_hosts import LONG, trainings_in

FLATOUT = str(Path(sys.executable).parent / "flatout")
TRAINING = SCRIPT.replace("range(2)", "range(10**4)")
OURS = {
    "kernel": "one",
    "flatout": "1.0",
    "folder": "/job",
    "is_shared": True,
    "is_overlaid": True,
    "torch": "2.13.0",
    "device": "H100, H100",
    "cpu": "a CPU",
    "cores": 8,
    "files": {"train.py": "1", "/shared/more.py": "2"},
}
THEIRS = OURS | {"kernel": "another"}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"kernel": "one"}, "it is this machine"),
        ({"folder": ""}, "it has no folder /job: share it"),
        ({"device": "A100, A100"}, "another device: A100, A100 there, H100, H100 here"),
        ({"cpu": "a fast one"}, "another CPU: a fast one there, a CPU here"),
        ({"cores": 4}, "4 usable cores there, 8 here"),
        ({"torch": "2.9.0"}, "torch 2.9.0 there, 2.13.0 here"),
        ({"flatout": "0.9"}, "flatout 0.9 there, 1.0 here"),
        ({"files": {"train.py": "3"}}, "other files than here: train.py"),
        ({"files": {}}, "other files than here: train.py"),
        ({"is_overlaid": False}, "trials there and here would write to the same files: /job"),
    ],
)
def test_hosts_of_another_kind_are_told_from_this_one(facts, said):
    assert ray_trials.find_difference(THEIRS | facts, OURS).startswith(said)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"is_shared": False, "is_overlaid": False},
        {"files": {"train.py": "1"}},  # where else modules are found, a process decides
    ],
)
def test_a_host_of_this_kind_is_taken(facts):
    assert ray_trials.find_difference(THEIRS | facts, OURS) == ""


def test_a_folder_that_nothing_can_be_written_to_is_not_marked(tmp_path):
    with ray_trials._marker(tmp_path / "none") as none, ray_trials._marker(tmp_path) as marker:
        assert none is None
        assert marker.exists()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "2"], "--hosts needs --ray"),
        (["--ray", "--accept-load"], "leave --accept-load out"),
    ],
)
def test_what_ray_does_not_go_with_is_refused_in_one_line(tmp_path, words, said):
    (tmp_path / "train.py").write_text(SCRIPT)

    code, told = tuned(tmp_path, *words)

    assert code == 2
    assert said in told
    assert len(told.splitlines()) == 1


def tuned(folder, *words, environment=None):
    done = ran([FLATOUT, "tune", *words, "train.py"], cwd=folder, env=environment)
    return done.returncode, done.stderr


OTHER_WORK = """
import ray, time

class Work:
    def begin(self):
        return True

ray.init("auto")
work = [ray.remote(num_cpus=1)(Work).remote() for _ in range(2)]
ray.get([each.begin.remote() for each in work])
print("held", flush=True)
time.sleep(600)
"""
on_ray = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def slow(test):
    for mark in on_ray:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="no Ray here")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.add_node(num_cpus=1)
    yield found
    found.shutdown()


@pytest.fixture
def workload(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    return workload_of(tmp_path, "train.py", str(tmp_path))


@pytest.fixture
def elsewhere(cluster, workload, monkeypatch):
    """Make the nodes, which are this machine, look like others; find those that may play pairs."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setattr(ray_trials, "boot_id", lambda: "another machine")
    if not is_overlaid(workload.folder):
        marked = contextlib.nullcontext
        monkeypatch.setattr(ray_trials, "_marker", lambda _folder: marked())  # each has a copy

    def find(**options):
        return ray_trials.pair_hosts_on_ray(workload, 120.0, lambda _text: None, **options)

    return find


@slow
def test_nodes_of_this_machine_are_refused_in_one_line(cluster, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}

    code, told = tuned(tmp_path, "--ray", environment=environment)

    assert code == 2
    assert "0 of 1 other hosts that can play pairs" in told
    assert "it is this machine" in told
    assert "Traceback" not in told
    assert not (tmp_path / "flatout-out").exists()


@slow
def test_without_a_cluster_it_says_so_in_one_line(tmp_path):
    pytest.importorskip("ray", reason="no Ray here")
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1", "RAY_TMPDIR": str(tmp_path)}

    code, told = tuned(tmp_path, "--ray", environment=environment)

    assert code == 2
    assert "found no cluster" in told
    assert "Traceback" not in told


@slow
@pytest.mark.measures  # where other work disturbs a trial it is played again
def test_a_host_plays_the_script_with_the_environment_of_the_command(elsewhere, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # Ray gives its processes one

    with elsewhere() as hosts:
        (host,) = hosts.hosts
        host.begin(HostTask(base=Recipe()))
        (trial,) = host.result()

    assert trial.outcome is Outcome.OK
    assert trial.profile.cpu_threads == 2
    assert trial.profile.step_ms.n > 3


@slow
def test_a_host_plays_a_pair_unless_other_work_disturbs_it(elsewhere):
    candidate = Recipe(choices=(Choice(technique="fused_optimizer"),))

    with elsewhere() as hosts:
        (host,) = hosts.hosts
        host.begin(HostTask(base=Recipe(), candidate=candidate))
        played = host.result()

    if isinstance(played, str):
        assert "busy" in played
    else:
        assert [trial.recipe for trial in played] == [Recipe(), candidate]


@slow
def test_hosts_are_kept_free_as_long_as_the_tuning_lasts(elsewhere):
    with elsewhere() as hosts:
        import ray

        assert len(hosts.hosts) == 1
        _wait_for(lambda: ray.available_resources().get("CPU") == 1.0)


@slow
def test_a_host_that_other_work_holds_is_not_waited_for(cluster, elsewhere, monkeypatch):
    monkeypatch.setattr(ray_trials, "FREE_S", 3.0)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OTHER_WORK],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as other:
        try:
            while b"held" not in other.stdout.readline():
                assert other.poll() is None
            with pytest.raises(UserError, match="other work of the cluster holds it"), elsewhere():
                pass
        finally:
            other.kill()


@slow
def test_another_kind_and_too_few_are_refused(elsewhere, monkeypatch):
    with pytest.raises(UserError, match="1 of 2 other hosts"), elsewhere(most=3):
        pass
    ours = replace(read_machine(torch=False), usable_cores=64)
    monkeypatch.setattr(ray_trials, "read_machine", lambda **_: ours)
    with pytest.raises(UserError, match="usable cores there, 64 here"), elsewhere():
        pass


@slow
@pytest.mark.chaos
def test_a_pair_that_is_cancelled_leaves_no_process(elsewhere, workload):
    (workload.folder / "train.py").write_text(LONG)
    with elsewhere() as hosts:
        (host,) = hosts.hosts
        host.begin(HostTask(base=Recipe()))
        _wait_for(lambda: trainings_in(workload.folder))

        host.cancel()

        _wait_for(host.is_done)
        assert not trainings_in(workload.folder)


@slow
@pytest.mark.chaos
def test_a_host_that_dies_while_it_plays_is_told(cluster, elsewhere, workload):
    (workload.folder / "train.py").write_text(LONG)
    handler = signal.getsignal(signal.SIGTERM)
    node = cluster.add_node(num_cpus=1)  # which takes the signal
    try:
        with elsewhere(most=3) as hosts:
            for host in hosts.hosts:
                host.begin(HostTask(base=Recipe()))
            _wait_for(lambda: len(trainings_in(workload.folder)) >= 2)

            cluster.remove_node(node)

            _wait_for(lambda: any(map(_is_lost, hosts.hosts)))
            assert sum(map(_is_lost, hosts.hosts)) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)
    _wait_for(lambda: not trainings_in(workload.folder))


def _is_lost(host):
    return host.is_done() and "no answer from there" in str(host.result())


def _wait_for(holds, most_s=120.0):
    give_up = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.2)
