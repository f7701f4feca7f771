"""Results that were stored by this and by earlier versions are read, and nothing of them is lost.

The files in `data` have every part filled in; made by hand, no machine measured them. A field that
is added later needs a default: stored files lack it.
"""

import json

import pytest

from flatout.records.ablation import ablation_from_json
from flatout.records.plan import Accumulating
from flatout.records.profile import profile_from_json
from flatout.records.trial import trial_from_json
from flatout.reporting.documents import finite
from flatout.workflow.recipe_files import read_recipe, recipe_from_toml, recipe_to_toml
from tests.paths import ROOT
from tests.reporting.made_up_roofline import FOUND
from tests.reporting.plans import too_large

DATA = ROOT / "tests/records/data"
STORED = [
    path
    for folder in (DATA, ROOT / "tests/reporting/data")
    for kind in ("profile", "ablation")
    for path in sorted(folder.glob(f"{kind}_*.json"))
]
RENAMED = {"levers": "techniques"}
"""Fields whose old name is still read: the word is on the list of those that we do not use."""
READERS = {"flatout.profile/1": profile_from_json, "flatout.ablation/1": ablation_from_json}
MEASURED = [
    path
    for path in sorted(ROOT.glob("benchmarks/records/*/result.json"))
    if any(f'"{schema}"' in path.read_text() for schema in READERS)
]


def results_in(plain):
    """Return every profile and tuning in a document, with the functions that read them."""
    if isinstance(plain, list):
        return [found for item in plain for found in results_in(item)]
    if not isinstance(plain, dict):
        return []
    read = READERS.get(plain.get("schema"))
    below = [found for item in plain.values() for found in results_in(item)]
    return [(read, plain), *below] if read else below


def differences(stored, written, where=""):
    """Yield what of a stored value was lost or changed; what was added since is fine."""
    if isinstance(stored, dict) and isinstance(written, dict):
        for name, value in stored.items():
            now = RENAMED.get(name, name)
            if now in written:
                yield from differences(value, written[now], f"{where}.{name}")
            else:
                yield f"{where}.{name} is lost"
    elif isinstance(stored, list) and isinstance(written, list) and len(stored) == len(written):
        for place, (old, new) in enumerate(zip(stored, written, strict=True)):
            yield from differences(old, new, f"{where}[{place}]")
    elif stored != written:
        yield f"{where}: {stored!r} became {written!r}"


def through_json(plain):
    return json.loads(json.dumps(finite(plain), allow_nan=False))


@pytest.mark.parametrize(
    "path", [*STORED, *MEASURED], ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_a_stored_profile_or_tuning_is_read_and_written_without_loss(path):
    for read, stored in results_in(json.loads(path.read_text())):
        written = through_json(read(stored).to_json())

        assert list(differences(finite(stored), written)) == []
        assert through_json(read(written).to_json()) == written


@pytest.mark.parametrize("name", ["records/data/trial_full", "reporting/data/trial_crash"])
def test_a_stored_trial_is_read_and_written_without_loss(name):
    stored = json.loads((ROOT / f"tests/{name}.json").read_text())
    trial = trial_from_json(stored)

    assert list(differences(finite(stored), through_json(trial.to_json()))) == []
    assert trial_from_json(trial.to_json()) == trial


@pytest.mark.parametrize(
    ("name", "record"),
    [
        (
            "plan_full",
            too_large(accumulating=Accumulating(micro_batch=4, steps=2), notes=("a note",)),
        ),
        ("roofline_full", FOUND),
    ],
)
def test_what_is_only_written_keeps_its_form(name, record):
    stored = json.loads((DATA / f"{name}.json").read_text())

    assert list(differences(stored, through_json(record.to_json()))) == []


@pytest.mark.parametrize(
    "path",
    sorted(ROOT.glob("benchmarks/records/*/recipe.toml")),
    ids=lambda path: path.parent.name,
)
def test_a_stored_recipe_file_is_read_and_written_without_loss(path):
    recipe = read_recipe(path)

    assert recipe_from_toml(recipe_to_toml(recipe)) == recipe
