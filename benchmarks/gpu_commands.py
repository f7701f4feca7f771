"""The commands on a GPU as a user types them, the ends that memory brings, and the tests for a GPU.

Each command is a process of its own with a time limit; what it wrote as JSON is looked at. It
has run on an H200, all but what waits for memory to run out.
"""

import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import MOST_SAID, Bench
from benchmarks.ladder import SMALL_GPT
from benchmarks.programs import python
from flatout.hardware.catalogue import model_of
from flatout.records.recipe import Choice, Recipe
from flatout.workflow.demo import scenarios
from flatout.workflow.recipe_files import write_recipe

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
LEAST_S = 15.0
"""With less time left no command is begun."""
END_S = 10.0
"""What pytest is given to write what it has when its time is up."""
MEMORY_SHARE = 0.35
"""Of the device, what a process that is to run out of it may have: others train there too."""
BYTES_A_SAMPLE = 1_800_000_000
"""Of the naive GPT-2 at 1,024 tokens a sample takes some 3 GB in fp32 (an estimate): a batch made
with this is half as large again as what fits."""
SAME_LOSS = 0.05
"""Two trainings of some hundred steps, one in bf16, end this close in their loss."""
GPT2 = SCRIPTS / "naive_gpt2.py"
SLOW = scenarios() / "slow_compute" / "train.py"
SLOW_SMALL = (
    *("--batch-size", "2", "--context", "16", "--layers", "1", "--width", "16", "--heads", "2"),
    *("--limit", "200000"),
)

ENDS = "PASSED|FAILED|ERROR|SKIPPED"
ASKED = r"(?:/ (\d+) selected|collected (\d+) items?$|\[(\d+) items?\])"
"""What pytest says of its tests, alone and in several processes (pytest-xdist)."""

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command, and what has to be in the JSON that it writes."""

    name: str
    words: tuple[str, ...]
    """`{json}` stands for the file of its result, `{work}` for its folder."""
    seconds: float
    find_fault: Callable[[Document, Path], str] = lambda _document, _work: ""
    """Returns what is wrong with its result; empty where nothing is."""
    exit_code: int = 0
    says: str = ""
    """A pattern that its output has to match."""


def commands(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Play each command that looks closer, then a recipe against the script as it is."""
    device = bench.machine.device
    size = SLOW_SMALL if smoke else ("--batch-size", "16", "--context", "512", "--layers", "8")
    script = (str(SLOW), *size, "--epochs", "1000", "--evals", "1")
    gpu = "h200" if device.kind == "cpu" else model_of(device).name
    rows = play_all(
        (
            Command(name="doctor", words=("doctor", "--json", "{json}"), seconds=40),
            Command(
                name="measure",
                words=(
                    *("measure", "--details", "--limit", "150s", "--trace", "{work}/t.json.gz"),
                    *("--json", "{json}", *script),
                ),
                seconds=160,
                find_fault=_fault_of_profile,
            ),
            Command(
                name="roofline",
                words=("roofline", "--limit", "40s", "--json", "{json}", *script),
                seconds=60,
            ),
            Command(
                name="plan",
                words=("plan", "--gpu", gpu, "--fit", "--json", "{json}", *script),
                seconds=90,
            ),
            Command(name="watch", words=("watch", "--once", "--json", "{json}"), seconds=30),
        ),
        seconds * 2 / 3,
        bench,
        smoke=smoke,
    )
    row = with_recipe(seconds / 3, bench, smoke=smoke)
    bench.say(f"  {row_words(row)}")
    return {"rows": [*rows, row]}


def out_of_memory(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Let memory run out: what is said, what tune makes of it, and a training that adapts."""
    has_device = bench.machine.device.kind != "cpu"
    batch = int(MEMORY_SHARE * bench.machine.device.memory_bytes / BYTES_A_SAMPLE)
    is_real = has_device and not smoke
    size = ("--batch-size", str(batch), "--context", "1024") if is_real else SMALL_GPT
    rows = play_all(
        (
            Command(
                name="words",
                words=("measure", "--quick", "--json", "{json}", str(GPT2), *size),
                seconds=60,
                exit_code=2 if is_real else 0,
                says="(?i)out of memory" if is_real else "",
            ),
            Command(
                name="rescue",
                words=(
                    *("tune", "--budget", "100s" if is_real else "20s", "--out", "{work}/rescue"),
                    *("--json", "{json}", str(GPT2), *size),
                ),
                seconds=170,
                find_fault=_fault_of_rescue if is_real else lambda *_: "",
            ),
            Command(
                name="adapt",
                words=("run", "--on-oom", "adapt", str(GPT2), *size, "--steps", "5"),
                seconds=90,
                says="(?i)start" if is_real else "",
            ),
        ),
        seconds,
        bench,
        {"PYTORCH_ALLOC_CONF": f"per_process_memory_fraction:{MEMORY_SHARE}"},
        smoke=smoke,
    )
    return {"rows": rows}


def _fault_of_profile(document: Document, work: Path) -> str:
    if document["device"]["kind"] != "cuda":
        return f"it trained on {document['device']['kind']}"
    if document.get("mfu") is None:
        return "no MFU"
    return "" if list(work.glob("t.json*")) else "no trace was written"


def _fault_of_rescue(document: Document, _work: Path) -> str:
    choices = document["best"]["recipe"]["choices"]
    return "" if choices else "no recipe makes the script fit"


def play_all(
    items: Sequence[Command],
    seconds: float,
    bench: Bench,
    variables: Mapping[str, str] | None = None,
    *,
    smoke: bool = False,
) -> list[dict[str, Any]]:
    """Play commands one after the other until the time is up; tried out, each has all of it."""
    deadline = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    for command in items:
        left_s = deadline - time.monotonic()
        rows.append(
            {"command": command.name, "holds": False, "why": "no time left"}
            if left_s < LEAST_S
            else played(
                command, left_s if smoke else min(left_s, command.seconds), bench, variables or {}
            )
        )
        bench.say(f"  {row_words(rows[-1])}")
        bench.note({"rows": rows})
    return rows


def played(
    command: Command, seconds: float, bench: Bench, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return how a command went, with some variables in its environment."""
    work = bench.work / "commands" / command.name
    work.mkdir(parents=True, exist_ok=True)
    result = work / "result.json"
    words = [word.format(json=result, work=work) for word in command.words]
    row: dict[str, Any] = {"command": command.name, "holds": False}
    began = time.monotonic()
    try:
        done = python(
            ["-m", "flatout", *words],
            cwd=work,
            timeout=seconds,
            env={**own_environment(), **variables},
        )
    except subprocess.TimeoutExpired:
        return row | {"why": f"not done within {seconds:.0f} s", "took_s": seconds}
    said = f"{done.stdout}\n{done.stderr}"
    row |= {
        "took_s": round(time.monotonic() - began, 1),
        "exit_code": done.returncode,
        "said": said.strip()[-MOST_SAID:],
    }
    why = ""
    if done.returncode != command.exit_code:
        why = f"exit code {done.returncode}: {last_line(said)}"
    elif command.says and not re.search(command.says, said):
        why = f"it does not say {command.says}"
    elif "{json}" in command.words and done.returncode == 0:
        row["result"] = json.loads(result.read_text(encoding="utf-8"))
        why = command.find_fault(row["result"], work)
    return row | {"holds": not why, "why": why}


def own_environment() -> dict[str, str]:
    """Return the environment in which this copy of flatout is the one that is found."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def last_line(text: str) -> str:
    """Return the last line that is not empty, cut."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"


def with_recipe(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Train some hundred steps with a recipe and without, both with evaluation and checkpoint."""
    work = bench.work / "commands" / "run"
    work.mkdir(parents=True, exist_ok=True)
    names = ("bf16_autocast", "fused_optimizer")
    recipe = Recipe(choices=tuple(Choice(technique=name) for name in names))
    write_recipe(recipe, work / "recipe.toml")
    size = SLOW_SMALL if smoke else ("--batch-size", "16", "--context", "512", "--layers", "8")
    steps = "20" if smoke else "300"
    found: dict[str, Any] = {"command": "run", "holds": False, "why": ""}
    for name, before in (
        ("plain", ()),
        ("tuned", ("-m", "flatout", "run", "--with", str(work / "recipe.toml"))),
    ):
        out = work / name
        words = (str(SLOW), *size, "--steps", steps, "--evals", "2", "--out", str(out))
        try:
            done = python(
                [*before, *words, "--log", str(work / f"{name}.log")],
                cwd=work,
                timeout=max(LEAST_S, seconds / 2),
                env=own_environment(),
            )
        except subprocess.TimeoutExpired as late:
            return found | {"why": f"{name}: not done within {late.timeout:.0f} s"}
        if done.returncode != 0:
            return found | {"why": f"{name}: {last_line(done.stdout + done.stderr)}"}
        log = (work / f"{name}.log").read_text(encoding="utf-8")
        times_ms = [json.loads(line)["step_ms"] for line in log.splitlines()]
        losses = [float(x) for x in re.findall(r"loss[ =:]+([\d.]+)", done.stdout)]
        found[name] = {
            "step_ms": statistics.median(times_ms[len(times_ms) // 2 :]),
            "losses": losses,
            "checkpoints": sorted(path.name for path in out.rglob("*.pt")),
            "said": done.stdout[-MOST_SAID:],
        }
    return found | judged_runs(found["plain"], found["tuned"])


def judged_runs(plain: Mapping[str, Any], tuned: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether a run with a recipe ended as the plain one did.

    >>> run = {"losses": [4.0, 2.0], "checkpoints": ["a.pt"], "step_ms": 4.0}
    >>> judged_runs(run, run | {"losses": [4.0, 2.01], "step_ms": 2.0})
    {'holds': True, 'why': '', 'ratio': 2.0}
    >>> judged_runs(run, run | {"losses": [4.0, 3.0]})["why"]
    'the last loss is 3.0, not 2.0'
    """
    why = ""
    if not plain["checkpoints"] or plain["checkpoints"] != tuned["checkpoints"]:
        why = f"checkpoints {tuned['checkpoints']}, not {plain['checkpoints']}"
    elif not plain["losses"] or len(plain["losses"]) != len(tuned["losses"]):
        why = f"{len(tuned['losses'])} losses were told, not {len(plain['losses'])}"
    elif abs(tuned["losses"][-1] / plain["losses"][-1] - 1) > SAME_LOSS:
        why = f"the last loss is {tuned['losses'][-1]}, not {plain['losses'][-1]}"
    return {"holds": not why, "why": why, "ratio": plain["step_ms"] / tuned["step_ms"]}


def all_hold(result: Mapping[str, Any]) -> bool:
    """Return whether every command did what it has to."""
    return bool(result["rows"]) and all(row["holds"] for row in result["rows"])


def row_words(row: Mapping[str, Any]) -> str:
    """Return one command in a line."""
    took = f" in {row['took_s']:.0f} s" if "took_s" in row else ""
    gain = f", {row['ratio']:.2f}x" if "ratio" in row else ""
    return f"{row['command']}{gain}{took}: {row['why'] or 'as it should be'}"


def device_tests(seconds: float, bench: Bench, *, smoke: bool = False) -> dict[str, Any]:
    """Run the tests marked gpu; those that were not reached in time are told by their number."""
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.(multi_)?gpu\b", path.read_text(encoding="utf-8"))
    )
    asked = ["-m", "not gpu and not slow", "tests/hardware/test_catalogue.py"]
    command = [sys.executable, "-m", "pytest", "-rfEs", "-v", "-W", "default", "--timeout", "90"]
    command += asked if smoke else ["-m", "gpu or multi_gpu", *files]
    if not smoke and importlib.util.find_spec("xdist"):
        command += ["-n", "4", "--dist", "loadfile"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=own_environment() | {"COLUMNS": "200"},
        start_new_session=True,
    )
    is_late = False
    try:
        said, _ = process.communicate(timeout=max(1.0, seconds - END_S))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        is_late = True
        process.send_signal(signal.SIGINT)  # it then says what it has
        try:
            said, _ = process.communicate(timeout=END_S / 2)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            rest, _ = process.communicate()
            said = rest or (error.output or b"").decode(errors="replace")
    found = counted(said) | {"is_late": is_late, "said": said[-4 * MOST_SAID :]}
    for line in found["failed"]:
        bench.say(f"  {line[:200]}")
    return found


def counted(said: str) -> dict[str, Any]:
    r"""Return how pytest's tests ended, from what it says of each.

    >>> counted("a.py::t PASSED [1%]\n[gw0] [ 2%] FAILED a.py::u \n[gw1] [ 3%] SKIPPED a.py::v")
    {'passed': 1, 'skipped': 1, 'failed': ['a.py::u'], 'asked': None}
    """
    after = re.findall(rf"^(\S+::.*?) ({ENDS})", said, re.MULTILINE)
    before = re.findall(rf"^\[gw\d+\] \[ *\d+%\] ({ENDS}) (\S+::.*?) *$", said, re.MULTILINE)
    ends = [*before, *((end, name) for name, end in after)]
    asked = re.search(ASKED, said, re.MULTILINE)
    names = {name: end for end, name in ends}
    return {
        "passed": sum(end == "PASSED" for end in names.values()),
        "skipped": sum(end == "SKIPPED" for end in names.values()),
        "failed": sorted(name for name, end in names.items() if end in ("FAILED", "ERROR")),
        "asked": int(next(filter(None, asked.groups()))) if asked else None,
    }


def tests_pass(result: Mapping[str, Any]) -> bool:
    """Return whether all were reached and none failed; one that was skipped shows nothing."""
    is_whole = result["asked"] is not None and not result["is_late"]
    reached = result["passed"] + result["skipped"]
    return is_whole and not result["failed"] and 0 < result["asked"] == reached


def tests_words(result: Mapping[str, Any]) -> str:
    """Return how the tests ended in a line."""
    words = [f"{result['passed']} passed, {result['skipped']} skipped"]
    words += [f"{len(result['failed'])} failed"] if result["failed"] else []
    words += [f"of {result['asked']}, not all reached"] if result["is_late"] else []
    return "; ".join([", ".join(words), *result["failed"]])
