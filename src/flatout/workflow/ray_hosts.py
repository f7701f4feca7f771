"""`flatout run --ray`: the hosts of a Ray cluster that is there each start `flatout run`.

Ray finds the hosts and keeps them free for the training; torchrun starts and supervises the ranks,
as it does without Ray. flatout starts no cluster.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.agent.processes import die_with_parent
from flatout.launch.rank_launcher import IS_FIRST, THREADS
from flatout.records.errors import UserError
from flatout.records.files import module_command

POLL_S = 0.1
REACH_S = 10.0
END_S = 30.0
"""What a training that is to end has to save its files."""
DEBUGGER = "PYTHONBREAKPOINT"


def run_on_ray(command: Sequence[str], hosts: int, needs: Mapping[str, float]) -> int:
    """Start `flatout run ...` on so many hosts of the cluster, and show their output.

    Returns the first exit code that is not 0.

    Args:
        command: `run ...`, without `--ray`, `--hosts` and `--rendezvous`.
        hosts: of one training; each has to reach the working folder under the same name.
        needs: what each of them is to have free, by Ray's names: `GPU`, `CPU`.

    Raises:
        UserError: without Ray, without a cluster, or where it has too few such hosts.
    """
    with ray_cluster() as ray:
        from ray.util.placement_group import placement_group, remove_placement_group

        _check_size(ray.nodes(), hosts, needs)
        group = placement_group([dict(needs)] * hosts, strategy="STRICT_SPREAD")
        try:
            return _train_on(ray, group, command, hosts)
        finally:
            remove_placement_group(group)


@contextlib.contextmanager
def ray_cluster() -> Iterator[Any]:
    """Join the Ray cluster that is there, and give Ray."""
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs Ray: pip install 'flatout[ray]'") from None
    handler = signal.getsignal(signal.SIGTERM)
    debugger = os.environ.get(DEBUGGER)
    try:
        _reach(os.environ.get("RAY_ADDRESS", ""))
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError):
        raise UserError(
            "--ray found no cluster: start one (ray start --head), or name one in RAY_ADDRESS"
        ) from None
    try:
        # Ray's own would end this process before it has cleaned up.
        if handler is not None and signal.getsignal(signal.SIGTERM) != handler:
            signal.signal(signal.SIGTERM, handler)
        # Ray sets its own debugger, in which a breakpoint of the script would never return.
        os.environ.pop(DEBUGGER, None)
        if debugger is not None:
            os.environ[DEBUGGER] = debugger
        yield ray
    finally:
        ray.shutdown()


def last_line(error: Exception) -> str:
    """Return what went wrong: the text of Ray's errors begins with the remote process's stack."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _reach(address: str) -> None:
    """Fail at once where nothing answers at `host:port`: Ray tries for five minutes."""
    if "://" in address:
        raise UserError(
            f"--ray cannot use Ray Client ({address}): start flatout on a host of the cluster, or "
            "submit it with `ray job submit`"
        )
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def _check_size(nodes: Sequence[Mapping[str, Any]], hosts: int, needs: Mapping[str, float]) -> None:
    """Refuse what the cluster can never give: Ray itself would wait without an end."""
    fit = [
        node
        for node in nodes
        if node["Alive"] and all(node["Resources"].get(name, 0) >= n for name, n in needs.items())
    ]
    if len(fit) < hosts:
        each = " and ".join(f"{n:g} {name}" for name, n in needs.items())
        raise UserError(
            f"--ray: the cluster has {len(fit)} of {hosts} hosts with {each} each: "
            "fewer --hosts, or fewer --gpus or --ranks of each"
        )


def _train_on(ray: Any, group: Any, command: Sequence[str], hosts: int) -> int:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Once all its resources are free at the same time; until then it waits, as sbatch does.
    ray.get(group.ready())

    def on(function: Callable[..., Any], number: int, **options: Any) -> Any:
        needs = group.bundle_specs[number]
        return ray.remote(function).options(
            num_cpus=needs.get("CPU", 0),
            num_gpus=needs.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=number
            ),
            max_retries=0,
            **options,
        )

    words = list(command)
    if hosts > 1:
        try:
            first = ray.get(on(_free_endpoint, 0).remote())
        except ray.exceptions.RayError as error:
            raise UserError(
                f"--ray: flatout does not run on a host of the cluster: {last_line(error)}"
            ) from None
        words[1:1] = ["--hosts", str(hosts), "--rendezvous", first]
    followed = []
    for number in range(hosts):
        train = on(_train, number, num_returns="streaming")
        training = train.remote(words, str(Path.cwd()), is_first=number == 0)
        followed.append(_Followed(ray, f"host {number + 1} of {hosts}", training))
    waiting = [*followed]
    code = 0
    try:
        while waiting and not code:
            for one in waiting:
                one.thread.join(POLL_S)
            waiting = [one for one in waiting if one.thread.is_alive()]
            code = next((one.code for one in followed if one not in waiting and one.code), 0)
        _wait(waiting, END_S)  # torchrun tells the other hosts; one that does not hear is ended
    finally:
        for one in waiting:
            if one.thread.is_alive():
                ray.cancel(one.training)
        _wait(waiting, 2 * END_S)
    return code


def _wait(hosts: Sequence["_Followed"], most_s: float) -> None:
    """Wait for all of them together, so long at most."""
    ends_at = time.monotonic() + most_s
    for one in hosts:
        one.thread.join(max(0.0, ends_at - time.monotonic()))


class _Followed:
    """The training on one host: a thread shows its lines and keeps its exit code."""

    def __init__(self, ray: Any, name: str, training: Any) -> None:
        self.ray, self.name, self.training = ray, name, training
        self.code = 1
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        try:
            for reference in self.training:
                found = self.ray.get(reference)
                if isinstance(found, int):
                    self.code = found
                else:
                    _show(found)
        except self.ray.exceptions.TaskCancelledError:
            pass
        except self.ray.exceptions.RayError as error:
            _show(f"flatout: {self.name} is lost: {error}\n".encode())


def _show(lines: bytes) -> None:
    sys.stdout.buffer.write(lines)
    sys.stdout.flush()


def _free_endpoint() -> str:
    """Return `host:port` of a port that is free on this host, which the others reach."""
    import ray

    address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    with socket.socket() as free:
        free.bind((address, 0))
        return f"{address}:{free.getsockname()[1]}"


def _train(words: Sequence[str], folder: str, *, is_first: bool) -> Iterator[bytes | int]:
    """Run flatout on this host; yield its lines, and its exit code at the end."""
    if not Path(folder).is_dir():
        yield f"flatout: {socket.gethostname()} has no folder {folder}: share it\n".encode()
        yield 2
        return
    # Ray gives each task as many threads as processors were asked for: torchrun's ranks share out
    # what the host has.
    environment = {name: value for name, value in os.environ.items() if name != THREADS}
    environment[IS_FIRST] = str(int(is_first))
    with subprocess.Popen(
        module_command(sys.executable, "flatout", *words),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    ) as process:
        try:
            assert process.stdout is not None
            held = b""
            while part := os.read(process.stdout.fileno(), 1 << 16):
                held += part
                # Progress bars end their lines with a carriage return.
                whole = 1 + max(held.rfind(b"\n"), held.rfind(b"\r"))
                if whole:
                    yield held[:whole]
                held = held[whole:]
            if held:
                yield held
            yield process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
