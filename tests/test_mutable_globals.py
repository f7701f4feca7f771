"""State of a process is in objects; module globals that functions change are named here, with why.

The list may only become shorter. What it finds is what `benchmarks.structure.mutable_globals` sees:
names that a function rebinds or changes in place.
"""

import pytest

from benchmarks.structure import SOURCE, modules_of, mutable_globals

PATCHES = "patches belong to torch's own functions, of which a process has one each"
SESSION = "techniques see loaders and models, and no session: one a process"
SCRIPT = "facts about objects of the script's, weakly held, that must not be pickled with them"
SHIM = "what torch's C++ was told of stays for the life of the process"
ALLOWED = {
    "agent.events": (SESSION, "_LISTENERS"),
    "agent.hooks.loader": (SCRIPT, "_recipes"),
    "agent.hooks.optimizer": (SCRIPT, "_KEPT"),
    "agent.measuring.attention": (PATCHES, "_UNSEEN"),
    "agent.optimizer_swap": (
        SCRIPT,
        *("_NEEDED", "_OF_ALL", "_OF_PARAMETERS", "_PARTED", "_SUCCESSORS"),
    ),
    "agent.patching": (PATCHES, "_lock", "_points"),
    "agent.recompute": (SCRIPT, "_MOVING"),
    "agent.training_device": (SESSION, "_followed"),
    "data.byte_batches.ring": (
        "a process's blocks, by which workers name them",
        "_OURS",
        "_THEIRS",
    ),
    "data.images.pillow": (PATCHES, "_ACTIVE"),
    "data.images.substitution": (PATCHES, "_SWAPS"),
    "data.proof.aliases": (PATCHES, "_GIVEN", "_SEEN"),
    "data.proof.joint_proof": (SCRIPT, "_tried"),
    "planner.tracing.cuda_shim": (SHIM, "_kept"),
    "planner.tracing.simulated_gpu": (SHIM, "_capability"),
}
"""By module why it has them, and their names."""


def test_no_module_global_changes_without_a_reason():
    named = {
        f"flatout.{module}.{name}" for module, (_, *names) in ALLOWED.items() for name in names
    }

    assert set(mutable_globals(modules_of(SOURCE))) - named == set()


@pytest.mark.parametrize("module", ALLOWED)
def test_what_is_named_is_still_there(module):
    source = (SOURCE / module.replace(".", "/")).with_suffix(".py")
    text = (source if source.exists() else source.with_suffix("") / "__init__.py").read_text()

    _, *names = ALLOWED[module]
    assert [name for name in names if f"\n{name}" not in text] == []
