"""Documents held against the published JSON Schema files."""

import functools
import json

from jsonschema import Draft202012Validator

from benchmarks.json_schemas import FOLDER
from flatout.reporting.documents import finite


@functools.cache
def schema_of(name):
    return json.loads((FOLDER / f"{name}.schema.json").read_text())


def name_of(document):
    return document["schema"].removeprefix("flatout.").removesuffix("/1")


def complaints(document, *, name=None):
    """Return what a validator says of a document as it is written to a file."""
    validator = Draft202012Validator(schema_of(name or name_of(document)))
    plain = json.loads(json.dumps(finite(document)))
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(plain)]


def unknown_keys(document):
    """Return the keys that no schema names: users' tools would not know them."""
    schema = schema_of(name_of(document))
    return sorted(set(_unknown(document, schema, schema["$defs"], "")))


def _unknown(value, schema, known, where):
    while "$ref" in schema:
        schema = known[schema["$ref"].removeprefix("#/$defs/")]
    for option in schema.get("anyOf", []):
        if option.get("type") != "null":
            yield from _unknown(value, option, known, where)
    if isinstance(value, list | tuple):
        for item in value:
            yield from _unknown(item, schema.get("items") or {}, known, f"{where}[]")
    elif isinstance(value, dict) and "properties" in schema:
        for key, item in value.items():
            if key not in schema["properties"]:
                yield f"{where}.{key}"
            else:
                yield from _unknown(item, schema["properties"][key], known, f"{where}.{key}")
