"""`flatout tune --ray`: other hosts of a Ray cluster that is there play pairs of a tuning.

The tuning itself, its journal and all that is no pair stay where it was started. Ray finds hosts of
the same kind and keeps them free; a task there plays what `flatout.tuning.pair_hosts` asks for.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flatout
from flatout.agent.journal_file import boot_id
from flatout.hardware.machine import read_machine
from flatout.launch.trial_process import is_overlaid
from flatout.records.errors import UserError
from flatout.records.messages import words
from flatout.records.trial import Workload
from flatout.tuning.pair_hosts import HostTask, PairHosts, Played, play_task
from flatout.workflow.ray_hosts import last_line, ray_cluster
from flatout.workflow.tune import header_of

ANSWER_S = 120.0
"""What a host has to say what it is: Ray starts a process there first."""
FREE_S = 15.0
"""What a host has to be kept free: one that other work of the cluster holds is not waited for."""
OF_RAY = "RAY_"
"""What a host's own variables begin with."""
MOST_FILES = 3
"""Files that are named: a checkout of another branch changes all."""

Node = Mapping[str, Any]


@contextlib.contextmanager
def pair_hosts_on_ray(
    workload: Workload, limit_s: float, say: Callable[[str], None], *, most: int | None = None
) -> Iterator[PairHosts]:
    """Give the hosts of the Ray cluster that play pairs of this tuning, kept free for it.

    At `most` so many are used, this one among them. `say` gets those that are not used, and why.
    """
    wanted = 1 if most is None else most - 1
    with ray_cluster() as ray:
        alike, unused = _alike(ray, workload)
        found: list[_RayHost] = []
        while alike and (most is None or len(found) < wanted):
            count = len(alike) if most is None else wanted - len(found)
            tried, alike = alike[:count], alike[count:]
            for node, holder in zip(tried, _kept_free(ray, tried), strict=True):
                if holder is None:
                    unused.append(_unused(node, words("hosts.taken")))
                else:
                    found.append(_host(ray, node, holder, (workload, _own_variables(), limit_s)))
        if len(found) < wanted:
            why = "".join(f"; {line}" for line in unused)
            raise UserError(
                f"--ray: the cluster has {len(found)} of {wanted} other hosts that can play pairs"
                f"{why}"
            )
        for line in unused:
            say(line)
        hosts = PairHosts(hosts=[*found], notes=unused, say=say)
        try:
            yield hosts
        finally:
            hosts.end()


def _alike(ray: Any, workload: Workload) -> tuple[list[Node], list[str]]:
    """Return the other hosts on which pairs may be played, and why the rest is not used."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    with _marker(workload.folder) as marker:
        ours = facts_of(workload, marker)
        asked = [
            _on_node(ray, _facts_there, node, max_retries=0).remote(
                workload, _own_variables(), marker
            )
            for node in nodes
        ]
        answers = _answers(ray, asked, ANSWER_S)
    alike, unused = [], []
    for node, theirs in zip(nodes, answers, strict=True):
        why = theirs if isinstance(theirs, str) else find_difference(theirs, ours)
        if why:
            unused.append(_unused(node, why))
        else:
            alike.append(node)
    return alike, unused


def _unused(node: Node, why: str) -> str:
    return words("hosts.unused", host=node["NodeManagerHostname"], why=why)


@contextlib.contextmanager
def _marker(folder: Path) -> Iterator[Path | None]:
    """Give a file by which a host knows that it has this very folder; None where none can be made.

    No trial writes there, then.
    """
    with contextlib.ExitStack() as made:
        path = None
        with contextlib.suppress(OSError):
            file = tempfile.NamedTemporaryFile(prefix=".flatout-", dir=folder)  # noqa: SIM115
            path = Path(made.enter_context(file).name)
        yield path


def facts_of(workload: Workload, marker: Path | None) -> dict[str, Any]:
    """Return what this host is, and what it has of the script."""
    facts: dict[str, Any] = {
        "kernel": boot_id(),
        "flatout": flatout.__version__,
        "folder": str(workload.folder) if workload.folder.is_dir() else "",
    }
    if not facts["folder"]:
        return facts
    facts["is_shared"] = marker is not None and marker.exists()
    facts["is_overlaid"] = is_overlaid(workload.folder)
    return facts | header_of(workload, read_machine(torch=False))


def find_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return why the pairs of a host do not count with those of this one; "" where they do."""
    return next(_differences(theirs, ours), "")


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    if theirs["kernel"] == ours["kernel"]:
        yield words("hosts.same_machine")
    if not theirs["folder"]:
        yield words("hosts.no_folder", folder=ours["folder"])
    for name in ("flatout", "torch", "device", "cpu", "cores"):
        if theirs[name] != ours[name]:
            yield words(f"hosts.{name}", theirs=str(theirs[name]), ours=str(ours[name]))
    # Which modules are found outside the folder depends on how a process was started.
    changed = [
        name
        for name, digest in ours["files"].items()
        if theirs["files"].get(name, digest if Path(name).is_absolute() else "") != digest
    ]
    if changed:
        yield words("hosts.files", names=", ".join(changed[:MOST_FILES]))
    if theirs["is_shared"] and not (theirs["is_overlaid"] and ours["is_overlaid"]):
        yield words("hosts.shared", folder=ours["folder"])


def _on_node(ray: Any, what: Any, node: Node, **options: Any) -> Any:
    """Return a remote function or class for one node; unless asked for, it holds nothing there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
    options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": where} | options
    return ray.remote(what).options(**options)


def _answers(ray: Any, asked: Sequence[Any], most_s: float) -> list[Any]:
    """Return what each was answered, or a sentence that says why there is no answer."""
    if asked:
        ray.wait([*asked], num_returns=len(asked), timeout=most_s)
    return [_answer(ray, one) for one in asked]


def _answer(ray: Any, asked: Any) -> Any:
    try:
        return ray.get(asked, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return words("hosts.silent")
    except ray.exceptions.RayError as error:
        return words("hosts.lost", why=last_line(error))


class _Holder:
    """Keeps a host's processors and GPUs for one tuning, as long as it lives."""

    def hold(self) -> None:
        """Return once they are kept."""


def _kept_free(ray: Any, nodes: Sequence[Node]) -> list[Any]:
    """Return what keeps each node free; None for one that others hold."""
    holders = []
    for node in nodes:
        has = node["Resources"]
        needs = {"num_cpus": has.get("CPU", 0), "num_gpus": has.get("GPU", 0)}
        holders.append(_on_node(ray, _Holder, node, **needs).remote())
    answers = _answers(ray, [holder.hold.remote() for holder in holders], FREE_S)
    for holder, why in zip(holders, answers, strict=True):
        if why is not None:
            ray.kill(holder)
    return [h if why is None else None for h, why in zip(holders, answers, strict=True)]


def _host(ray: Any, node: Node, holder: Any, about: tuple[Any, ...]) -> "_RayHost":
    play = _on_node(ray, _play_there, node, max_retries=0)
    return _RayHost(
        ray=ray,
        name=node["NodeManagerHostname"],
        play=lambda task: play.remote(*about, task),
        holder=holder,
    )


@dataclass(eq=False, slots=True, kw_only=True)
class _RayHost:
    """One host of the cluster; see `flatout.tuning.pair_hosts.Host`."""

    ray: Any
    name: str
    play: Callable[[HostTask], Any]
    holder: Any
    """While it is referred to, the host is kept free."""
    running: Any = None

    def begin(self, task: HostTask) -> None:
        """Begin to play, and return at once."""
        self.running = self.play(task)

    def is_done(self) -> bool:
        """Return whether what was begun is over."""
        return bool(self.ray.wait([self.running], timeout=0, fetch_local=False)[0])

    def result(self) -> Played:
        """Return what was played, once that is over."""
        try:
            played: Played = self.ray.get(self.running)
        except self.ray.exceptions.RayError as error:
            return words("hosts.lost", why=last_line(error))
        return played

    def cancel(self) -> None:
        """Have what was begun ended, and return at once."""
        self.ray.cancel(self.running)


def _own_variables() -> dict[str, str]:
    """Return the environment of this command, which trials elsewhere have too, as under srun."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_RAY)}


def _take(environment: Mapping[str, str]) -> None:
    """Give this process, which Ray has started for the tuning, the tuning's environment."""
    own = {name: value for name, value in os.environ.items() if name.startswith(OF_RAY)}
    os.environ.clear()
    os.environ.update({**own, **environment})


def _facts_there(
    workload: Workload, environment: Mapping[str, str], marker: Path | None
) -> dict[str, Any]:
    _take(environment)
    return facts_of(workload, marker)


def _play_there(
    workload: Workload, environment: Mapping[str, str], limit_s: float, task: HostTask
) -> Played:
    _take(environment)
    return play_task(replace(workload, python=sys.executable), task, limit_s)
