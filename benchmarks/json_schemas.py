"""JSON Schema of the documents that `--json` writes, made from the types of the records.

The files in `flatout/reporting/schemas` hold what `documents` returns: `python -m
benchmarks.json_schemas` writes them, and a test compares them.
"""

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from flatout.records.ablation import (
    Ablation,
    Contrast,
    Feeding,
    LossCheck,
    Prediction,
    Row,
    Survey,
    SurveyRow,
)
from flatout.records.finding import SourcePlace
from flatout.records.json_records import declared
from flatout.records.plan import Plan
from flatout.records.profile import Profile
from flatout.records.recipe import Choice, Recipe

FOLDER = Path(__file__).parents[1] / "src/flatout/reporting/schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
TEXT, COUNT, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": ["number", "null"]}
YES_NO_SAME = {"enum": ["yes", "no", "same", ""]}
Schema = dict[str, Any]
SCHEMAS: dict[Any, Any] = {
    int: "integer",
    float: ["number", "null"],
    bool: "boolean",
    str: "string",
    Path: "string",
    type(None): "null",
}
"""Of a leaf the JSON Schema's name of its type; anything else may be anything."""


def documents() -> dict[str, Schema]:
    """Return the schema of each kind of document, by its name."""
    made = {}
    for name, build in BUILDERS.items():
        known: Schema = {}
        body = build(known)
        title = f"flatout.{name}/1"
        body["properties"] = {"schema": {"const": title}} | body["properties"]
        body["required"] = ["schema", *body["required"]]
        definitions = {key: known[key] for key in sorted(known)}
        made[name] = {"$schema": DIALECT, "title": title, **body, "$defs": definitions}
    return made


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _record(kind: Any, known: Schema, *left_out: str, plus: Schema | None = None) -> Schema:
    """Return a record's schema with other fields instead of those that are left out."""
    record = record_schema(kind, known, left_out)
    properties = record["properties"] | (plus or {})
    return record | {"properties": properties, "required": [*record["required"], *(plus or {})]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _profile(known: Schema) -> Schema:
    device = {"device": _object({"kind": TEXT, "name": TEXT})}
    return _record(Profile, known, "device_kind", "device_name", plus=device)


def _profile_within(known: Schema) -> Schema:
    """Return the schema of a profile within another document."""
    if "Profile" not in known:
        profile = _profile(known)
        profile["properties"]["schema"] = {"const": "flatout.profile/1"}
        known["Profile"] = profile
    return {"$ref": "#/$defs/Profile"}


def _pair() -> Schema:
    """Return the fields of a comparison, which are null where nothing was compared."""
    interval = {"type": ["array", "null"], "items": NUMBER, "minItems": 2, "maxItems": 2}
    return {"ratio": NUMBER, "interval": interval, "n": COUNT, "resolution": NUMBER}


def _ablation(known: Schema) -> Schema:
    profile = _profile_within(known)
    feeding = _record(Feeding, known, plus={"binds": TEXT, "share": NUMBER})
    best = {
        "recipe": schema_of(Recipe, known),
        "profile": _or_null(profile),
        "loss_check": schema_of(LossCheck | None, known),
        "feeding": _or_null(feeding),
    }
    pair = _pair()
    row = _record(
        Row, known, "choice", "comparison", plus=record_schema(Choice, known)["properties"]
    )
    row["properties"] |= pair | COMPARED
    row["required"] += [*pair]
    prediction = _record(Prediction, known, plus={"error": NUMBER})
    return _record(
        Ablation,
        known,
        *("baseline", "rows", "recipe", "confirmation", "final", "final_check", "feeding"),
        plus={
            "baseline": _object({"profile": profile}),
            "rows": _list(row),
            "best": _best(best, pair),
            "calibration": _list(prediction),
        },
    )


COMPARED = {"source": TEXT, "blocks": COUNT}
"""What only an entry that was compared has."""


def _best(own: Schema, pair: Schema) -> Schema:
    """Return the final recipe's entry."""
    best = _object(own | pair)
    best["properties"] |= COMPARED
    return best


def _check(known: Schema) -> Schema:
    place = record_schema(SourcePlace, known)["properties"]
    finding = _object(place | {"column": COUNT, "end_line": COUNT})
    return _object(
        {
            "files": COUNT,
            "findings": _list(finding),
            "not_analysable": _list(_object({"path": TEXT, "because": TEXT})),
            "fixes": _object(dict.fromkeys(("safe", "suggested", "made"), COUNT)),
        }
    )


def _plan(known: Schema) -> Schema:
    return _record(Plan, known, plus={"fits": {"type": "boolean"}, "spare_bytes": COUNT})


def _survey(known: Schema) -> Schema:
    row = _record(SurveyRow, known, plus={"is_faster": YES_NO_SAME, "is_smaller": YES_NO_SAME})
    return _record(
        Survey,
        known,
        *("baseline", "rows"),
        plus={
            "baseline": _object({"profile": _profile_within(known)}),
            "rows": _list(row),
            "loss_check": {"const": "not_judged"},
        },
    )


BUILDERS = {
    "ablation": _ablation,
    "check": _check,
    "contrast": lambda known: record_schema(Contrast, known),
    "plan": _plan,
    "profile": _profile,
    "survey": _survey,
}


def schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of what `to_plain` makes of a type, once written to a file.

    Only fields without a default are required: documents of earlier versions have fewer. A number
    may be null where it may be infinite or not a number.

    Args:
        hint: a type that a field of a record may have, or a record.
        definitions: of each record the schema; those that are met are added.

    >>> schema_of(tuple[int, ...] | None, {})
    {'anyOf': [{'type': 'array', 'items': {'type': 'integer'}}, {'type': 'null'}]}
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is not None:
        return _schema_of_many(origin, parts, definitions)
    if is_dataclass(hint):
        name = hint.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}  # a record may hold others of its kind
            definitions[name] = record_schema(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    return {"type": SCHEMAS[hint]} if hint in SCHEMAS else {}


def _schema_of_many(
    origin: Any, parts: tuple[Any, ...], definitions: dict[str, Any]
) -> dict[str, Any]:
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [schema_of(part, definitions) for part in parts]}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(parts[1], definitions)}
    if origin is tuple and parts[-1] is not Ellipsis:
        items = [schema_of(part, definitions) for part in parts]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return {"type": "array", "items": schema_of(parts[0], definitions)}


def record_schema(
    kind: Any, definitions: dict[str, Any], left_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the JSON Schema of a record without the fields that are left out."""
    kept = [item for item in declared(kind) if item[0] not in left_out]
    return {
        "type": "object",
        "description": (kind.__doc__ or "").strip().partition("\n")[0],
        "properties": {name: schema_of(hint, definitions) for name, hint, _ in kept},
        "required": [name for name, _, has_default in kept if not has_default],
    }


if __name__ == "__main__":
    for kind, document in documents().items():
        (FOLDER / f"{kind}.schema.json").write_text(json.dumps(document, indent=1) + "\n")
