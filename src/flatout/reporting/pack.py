"""The report of `pack`: what the store holds, what was left out, whether it equals its source."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from flatout.records.messages import ENGLISH, Messages, Sentence, Text, messages, words
from flatout.records.units import format_bytes, format_duration, format_rate
from flatout.reporting.blocks import safe
from flatout.reporting.tables import Column, labelled, padded, table, wrapped

KINDS = ("original", "raw", "jpeg", "qoi", "zstd", "tokens")
LABELS = ("stored", "order", "classes", "skipped", "ignored", "verified")
ITEM = " " * 10
"""Indents what belongs to the line above."""


def render_pack(packed: Mapping[str, Any], *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report of a `flatout.pack/1` document."""
    say = messages(language)
    order = words("pack.unshuffled")
    if packed["order"] == "shuffled":
        order = words("pack.shuffled", seed=str(packed["seed"]))
    facts: dict[str, list[Text]] = {"stored": [_stored(packed)], "order": [order]}
    if packed["classes"]:
        # Some are named: a folder of splits looks like classes called train and val.
        more = ", ..." if packed["classes"] > len(packed["classes_first"]) else ""
        facts["classes"] = [f"{packed['classes']}: {', '.join(packed['classes_first'])}{more}"]
    if packed["skipped"]:
        place = f"{packed['folder']}/skipped.jsonl"
        skipped = words("pack.skipped_in", n=_count(packed["skipped"]), place=place)
        facts["skipped"] = [skipped, *packed["skipped_first"]]
    if packed["ignored"]:
        facts["ignored"] = [words("pack.other_kind", n=_count(packed["ignored"], "file"))]
    if packed["verification"]:
        facts["verified"] = [_verified(packed), *packed["verification"]["problems"]]
    head = wrapped(say.text(_headline(packed)), width)
    command = f'data = flatout.data.open("{packed["folder"]}")'
    return _report([*head, "", *_labelled(facts, LABELS, say, width)], command, say, width)


def render_check(checked: Mapping[str, Any], *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report of a `flatout.pack_check/1` document."""
    say = messages(language)
    where = words(
        "pack.where",
        folder=checked["folder"],
        samples=_count(checked["samples"]),
        size=format_bytes(checked["bytes"]),
    )
    if checked["is_sound"]:
        sound = words("pack.sound", where=where, time=format_duration(checked["seconds"]))
        return _report(wrapped(say.text(sound), width), "", say, width)
    problems = _count(checked["num_problems"], "problem")
    lines = wrapped(say.text(words("pack.unsound", where=where, problems=problems)), width)
    for item in checked["problems"]:
        lines += wrapped(say.text(item), width, indent=ITEM)
    return _report(lines, say("pack.again"), say, width)


def render_files(found: Mapping[str, Any], *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report of a `flatout.pack_files/1` document."""
    say = messages(language)
    rate = found["files"] / found["seconds"] if found["seconds"] else 0.0
    head = words(
        "pack.copied",
        folder=found["folder"],
        files=_count(found["files"], "file"),
        size=format_bytes(found["bytes"]),
        time=format_duration(found["seconds"]),
        rate=format_rate(rate),
    )
    facts: dict[str, list[Text]] = {
        "order": [words("pack.shuffled_files", seed=str(found["seed"]))]
    }
    if found["uneven"] is not None:
        now, before = f"{found['uneven']:.2f}", f"{found['uneven_before']:.2f}"
        mixing = words("pack.neighbours", now=now, before=before, folder=found["source"])
        facts["mixing"] = [mixing]
    lines = [*wrapped(say.text(head), width), "", *_labelled(facts, facts, say, width)]
    return _report(lines, "flatout tune --numerics training train.py", say, width)


def render_formats(found: Mapping[str, Any], *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report of a `flatout.formats/1` document: a row a format, the fastest first."""
    say = messages(language)
    own = found["costs"][0]
    costs = sorted(found["costs"], key=lambda cost: -cost["images_per_s"])
    exact = [cost for cost in costs if not cost["difference"] and cost["name"] in KINDS]
    best = exact[0] if exact and exact[0]["images_per_s"] > own["images_per_s"] else None
    titles = [say(f"pack.{x}") for x in ("bytes_per_image", "decode_per_image", "per_core")]
    titles.append(say("pack.all_cores", n=say.text(_count(found["usable_cores"], "core"))))
    if own["cores_needed"]:
        titles.append(say("pack.cores_needed"))
    columns = [
        Column(say("pack.format")),
        *(Column(x, is_number=True) for x in titles),
        Column(say("pack.pixels")),
    ]
    lines = [*wrapped(say.text(_fastest(own, best, found["images"])), width), ""]
    lines += [*table(columns, [_format_row(cost, found, say) for cost in costs]), ""]
    facts: dict[str, list[Text]] = {}
    if found["not_installed"]:
        facts["missing"] = [words("pack.not_installed", names=tuple(found["not_installed"]))]
    facts |= {"decode": [words("pack.decode_is")], "storage": [_storage(found)]}
    lines += _labelled(facts, ("missing", "decode", "storage"), say, width)
    command = ""
    if best:
        command = f"flatout pack {shlex.quote(found['source'])} DST --encode {best['name']}"
    return _report(lines, command, say, width)


def _fastest(own: Mapping[str, Any], best: Mapping[str, Any] | None, images: int) -> Sentence:
    if best is None:
        return words("pack.none_faster", n=_count(images, "image"))
    return words(
        "pack.faster",
        name=best["name"],
        faster=f"{best['images_per_s'] / own['images_per_s']:.1f}",
        larger=f"{best['bytes_per_image'] / own['bytes_per_image']:.1f}",
        n=_count(images, "image"),
    )


def _format_row(cost: Mapping[str, Any], found: Mapping[str, Any], say: Messages) -> list[str]:
    rate = format_rate(cost["images_per_s"])
    if found["read_bytes_per_s"] and cost["total_bytes"] > found["free_memory_bytes"]:
        rate = say("pack.bound_by_storage", rate=rate)
    row = [
        cost["name"],
        format_bytes(cost["bytes_per_image"]),
        f"{cost['decode_ms']:.2f} ms",
        format_rate(cost["images_per_s_per_core"]),
        rate,
    ]
    if cost["cores_needed"]:
        row.append(f"{cost['cores_needed']:.2g}")
    off = f"{cost['difference']:.1f}"
    return [*row, say("pack.off_by", n=off) if cost["difference"] else say("pack.the_same")]


def _storage(found: Mapping[str, Any]) -> Sentence:
    free = format_bytes(found["free_memory_bytes"])
    if not found["read_bytes_per_s"]:
        return words("pack.storage_unknown", free=free)
    return words("pack.storage_rate", rate=format_bytes(found["read_bytes_per_s"]), free=free)


def _labelled(
    facts: Mapping[str, Sequence[Text]], names: Iterable[str], say: Messages, width: int
) -> list[str]:
    """Return facts behind labels as wide as the widest of these names, each above its items."""
    size = max(cell_len(say(f"pack.{name}")) for name in names)
    lines: list[str] = []
    for name, (text, *items) in facts.items():
        lines += labelled(padded(say(f"pack.{name}"), size), say.text(text), width)
        lines += [line for x in items for line in wrapped(say.text(x), width, indent=ITEM)]
    return lines


def _report(lines: Sequence[str], command: str, say: Messages, width: int) -> str:
    end = ["", *labelled(say("label.next"), command, width)] if command else []
    return safe("\n".join([*lines, *end]), say) + "\n"


def _headline(packed: Mapping[str, Any]) -> Sentence:
    where = words(
        "pack.where_packed",
        folder=packed["folder"],
        samples=_count(packed["samples"]),
        shards=_count(packed["file_shards"], "shard"),
        size=format_bytes(packed["bytes"]),
    )
    problems = packed["verification"] and packed["verification"]["num_problems"]
    if problems:
        return words("pack.differs", where=where, n=_count(problems))
    if packed["was_packed"]:
        return words("pack.was_packed", where=where)
    rate = packed["samples"] / packed["seconds"] if packed["seconds"] else 0.0
    took = format_duration(packed["seconds"])
    return words("pack.packed", where=where, time=took, rate=format_rate(rate))


def _stored(packed: Mapping[str, Any]) -> Sentence:
    encoding = packed["encoding"]
    kind = words(f"pack.as_{encoding['kind']}")
    if encoding["kind"] == "jpeg":
        kind = words("pack.as_jpeg_of", quality=str(encoding["quality"]))
    if encoding["short_side"]:
        kind = words("pack.with_short_side", kind=kind, n=str(encoding["short_side"]))
    return words("pack.lossless" if packed["is_lossless"] else "pack.lossy", kind=kind)


def _verified(packed: Mapping[str, Any]) -> Sentence:
    found = packed["verification"]
    if found["num_problems"]:
        return words("pack.first_problems", n=_count(found["num_problems"], "problem"))
    name = "pack.all_equal" if packed["is_lossless"] else "pack.all_as_encoded"
    return words(name, n=_count(found["samples"]))


def _count(number: int, what: str = "sample") -> Sentence:
    """Return a number of things; English says one and many, Korean the same of both."""
    return words(f"pack.{what}{'' if number == 1 else 's'}", n=str(number))
