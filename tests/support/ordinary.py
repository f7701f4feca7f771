"""Scripts as people write them, measured as their users would, each with one known cause.

One thread computes, so that the cores of a busy machine do not wait for each other.
"""

import json
import os
import re
import shutil

from flatout.records.profile import profile_from_json
from tests.paths import ROOT
from tests.reporting import test_no_contradictions as contradictions
from tests.schemas import complaints, unknown_keys
from tests.support.programs import python

SCRIPTS = ROOT / "tests/scripts/ordinary"
MOST_LINES = 25
COMPUTES = (
    r"^(\d\d(\.\d)? % of each step is computing \((forward|backward)"
    r"|fp32 computing in \w+ takes .* multiplies bf16 in hardware)"
)
"""What the first line says of a model that computes; the second where the processor does that."""
PROPERTIES = [
    one.hypothesis.inner_test
    for name, one in vars(contradictions).items()
    if hasattr(one, "hypothesis") and one.hypothesis.inner_test.__code__.co_argcount == 1
    # A stage of a real pipeline may take nothing, which is shown as 0 %; a profile that was read
    # has the words of its advice, no longer their names.
    if name
    not in {
        "test_nothing_but_zero_is_shown_as_zero",
        "test_no_two_findings_turn_a_setting_in_different_ways",
    }
]
"""What holds for random profiles holds for real ones: no two lines disagree."""


def flatout(folder, *words):
    return python(["-m", "flatout", *words], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})


def check_document(document):
    """Hold what a command wrote against the published schema."""
    assert complaints(document) == []
    assert unknown_keys(document) == []


def check_report(folder, name, first_line, findings):
    """Measure a script, and hold its report against the known cause and against itself."""
    shutil.copy(SCRIPTS / f"{name}.py", folder)

    done = flatout(folder, "measure", "--json", "p.json", f"{name}.py")

    assert done.returncode == 0, done.stderr
    assert re.search(first_line, " ".join(done.stdout.partition("\n\n")[0].split())), done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[-1].split()[1:] == ["flatout", "tune", f"{name}.py"]
    made = {"photos"} if name == "photo_folder" else set()
    assert {path.name for path in folder.iterdir()} - made == {"p.json", f"{name}.py"}
    plain = json.loads((folder / "p.json").read_text())
    check_document(plain)
    profile = profile_from_json(plain)
    assert findings <= {finding.code for finding in profile.findings}
    for holds in PROPERTIES:
        holds(profile)
