import re
import shutil
from dataclasses import replace

import pytest

from flatout.records.machine import Stack
from flatout.reporting.doctor import dockerfile
from tests.support.programs import ran

CUDA = Stack(
    kind="cuda",
    torch="2.11.0",
    index="https://download.pytorch.org/whl/cu128",
    python="3.12",
    flatout="0.1.0",
    shm_gib=8,
    about="NVIDIA H200",
)
WHEEL = "wheels/flatout-0.1.0-py3-none-any.whl"
FULL = replace(
    CUDA,
    recipe="recipe.toml",
    requirements="requirements.txt",
    source=WHEEL,
    extras=("jpeg", "lowbit"),
)
CPU = replace(FULL, kind="cpu")
ROCM = replace(CUDA, kind="rocm")
ADDRESS = "https://example.org/flatout-0.1.0-py3-none-any.whl"
STACKS = {"cuda": CUDA, "full": FULL, "cpu": CPU, "rocm": ROCM}


def instructions(text):
    """Return the instructions with their words, continued lines joined and comments dropped."""
    kept = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", "", "\n".join(kept)).split("\n")]


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_every_line_is_an_instruction_and_the_first_names_the_measured_python(stack):
    found = instructions(dockerfile(stack))

    allowed = {"FROM", "SHELL", "RUN", "ENV", "ARG", "COPY", "WORKDIR", "ENTRYPOINT"}
    assert {name for name, _ in found} <= allowed
    assert found[0] == ["FROM", "python:3.12-slim-bookworm"]
    assert found[-1][0] == "ENTRYPOINT"


def test_torch_is_the_measured_one_and_stays():
    text = dockerfile(FULL)

    assert "--index-url https://download.pytorch.org/whl/cu128 torch==2.11.0" in text
    assert "--constraint /opt/constraints.txt --requirement /opt/requirements.txt" in text
    assert text.index("torch==2.11.0") < text.index("/opt/requirements.txt")


def test_allocator_compiler_and_caches_are_there():
    text = dockerfile(CUDA)

    assert "libtcmalloc-minimal4" in text
    assert "g++" in text
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in text
    assert "TORCHINDUCTOR_CACHE_DIR=/cache/inductor" in text
    assert "TRITON_CACHE_DIR=/cache/triton" in text
    assert "-v flatout-cache:/cache" in text


def test_the_recipe_is_what_runs():
    found = dict(reversed(pair) for pair in instructions(dockerfile(FULL)))

    assert found['["flatout", "run", "--with", "/opt/recipe.toml"]'] == "ENTRYPOINT"
    assert found["recipe.toml /opt/recipe.toml"] == "COPY"
    assert 'ENTRYPOINT ["python"]' in dockerfile(CUDA)


@pytest.mark.parametrize(
    ("source", "copied", "installed"),
    [
        (WHEEL, f"{WHEEL} /opt/{WHEEL[7:]}", f"/opt/{WHEEL[7:]}[jpeg,lowbit]"),
        ("clones/flatout", "clones/flatout /opt/flatout", "/opt/flatout[jpeg,lowbit]"),
        (ADDRESS, "", f"flatout[jpeg,lowbit] @ {ADDRESS}"),
    ],
)
def test_flatout_comes_from_what_was_named_and_never_from_an_index(source, copied, installed):
    found = instructions(dockerfile(replace(FULL, source=source)))

    copies = [words for name, words in found if name == "COPY"]
    installs = [words for name, words in found if "flatout" in words and "pip install" in words]
    assert [words for words in copies if "flatout" in words] == ([copied] if copied else [])
    assert installs == [
        f'pip install --no-cache-dir --constraint /opt/constraints.txt "{installed}"'
    ]


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (CUDA, "--gpus all --shm-size=8g"),
        (CPU, "docker run --rm --shm-size=8g"),
        (ROCM, "--device=/dev/kfd --device=/dev/dri --group-add video"),
    ],
)
def test_the_command_hands_devices_and_shared_memory_in(stack, words):
    text = dockerfile(stack)

    assert words in text
    assert '--user "$(id -u):$(id -g)"' in text


def test_a_script_s_name_cannot_become_an_instruction():
    text = dockerfile(replace(CUDA, script="a b.py\nRUN rm -rf /"))

    assert not any(line.startswith("RUN rm -rf") for line in text.splitlines())
    assert "'a b.py RUN rm -rf /'" in text


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_hadolint_has_no_remarks(stack):
    done = ran(["hadolint", "-"], input=dockerfile(stack))

    assert (done.returncode, done.stdout) == (0, "")
