"""The report of `pack`: what the store holds, what was left out, whether it equals its source."""

import shlex
from collections.abc import Mapping
from typing import Any

from flatout.records.messages import ENGLISH, Sentence, Text, messages, words
from flatout.records.units import format_bytes, format_duration, format_rate
from flatout.reporting.blocks import (
    UNKNOWN,
    Block,
    Facts,
    Next,
    Table,
    known_columns,
    listed,
    report,
)

KINDS = ("original", "raw", "jpeg", "qoi", "zstd", "tokens")
LABELS = "pack.label_"


def render_pack(packed: Mapping[str, Any], *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report of a `flatout.pack/1` document."""
    order = words("pack.unshuffled")
    if packed["order"] == "shuffled":
        order = words("pack.shuffled", seed=str(packed["seed"]))
    rows: list[tuple[str, Text]] = [("stored", _stored(packed)), ("order", order)]
    if packed["classes"]:
        # Some are named: a folder of splits looks like classes called train and val.
        more = ", ..." if packed["classes"] > len(packed["classes_first"]) else ""
        first = ", ".join(packed["classes_first"])
        rows.append(("classes", f"{packed['classes']}: {first}{more}"))
    if packed["skipped"]:
        place = f"{packed['folder']}/skipped.jsonl"
        skipped = words("pack.skipped_in", n=_count(packed["skipped"]), place=place)
        rows += [("skipped", skipped), *(("", each) for each in packed["skipped_first"])]
    if packed["ignored"]:
        rows.append(("ignored", words("pack.other_kind", n=_count(packed["ignored"], "file"))))
    if found := packed["verification"]:
        rows += [("verified", _verified(packed)), *(("", each) for each in found["problems"])]
    then = Next(command=f'data = flatout.data.open("{packed["folder"]}")')
    facts = Facts(rows=tuple(rows), labels=LABELS)
    return report((_headline(packed), facts, then), messages(language), width)


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
        took = format_duration(checked["seconds"])
        return report([words("pack.sound", where=where, time=took)], say, width)
    problems = _count(checked["num_problems"], "problem")
    head = words("pack.unsound", where=where, problems=problems)
    then = Next(command=say("pack.again"))
    return report((head, listed(checked["problems"]), then), say, width)


def render_files(found: Mapping[str, Any], *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report of a `flatout.pack_files/1` document."""
    rate = found["files"] / found["seconds"] if found["seconds"] else 0.0
    head = words(
        "pack.copied",
        folder=found["folder"],
        files=_count(found["files"], "file"),
        size=format_bytes(found["bytes"]),
        time=format_duration(found["seconds"]),
        rate=format_rate(rate),
    )
    order, mixing = words("pack.shuffled_files", seed=str(found["seed"])), ""
    if found["uneven"] is not None:
        now, before = f"{found['uneven']:.2f}", f"{found['uneven_before']:.2f}"
        mixing = words("pack.neighbours", now=now, before=before, folder=found["source"])
    facts = Facts(rows=(("order", order), ("mixing", mixing)), labels=LABELS)
    then = Next(command="flatout tune --numerics training train.py")
    return report((head, facts, then), messages(language), width)


def render_formats(found: Mapping[str, Any], *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report of a `flatout.formats/1` document: a row a format, the fastest first."""
    own = found["costs"][0]
    costs = sorted(found["costs"], key=lambda cost: -cost["images_per_s"])
    exact = [cost for cost in costs if not cost["difference"] and cost["name"] in KINDS]
    best = exact[0] if exact and exact[0]["images_per_s"] > own["images_per_s"] else None
    all_cores = words("pack.all_cores", n=_count(found["usable_cores"], "core"))
    formats = Table(
        columns=(
            *("format", "bytes_per_image", "decode_per_image", "per_core"),
            *(all_cores, "cores_needed", "pixels"),
        ),
        rows=tuple(_format_row(cost, found) for cost in costs),
    )
    absent = found["not_installed"]
    facts = Facts(
        rows=(
            ("missing", words("pack.not_installed", names=tuple(absent)) if absent else ""),
            ("decode", words("pack.decode_is")),
            ("storage", _storage(found)),
        ),
        labels=LABELS,
    )
    blocks: list[Block] = [_fastest(own, best, found["images"]), known_columns(formats), facts]
    if best:
        source = shlex.quote(found["source"])
        blocks.append(Next(command=f"flatout pack {source} DST --encode {best['name']}"))
    return report(blocks, messages(language), width)


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


def _format_row(cost: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[Text, ...]:
    rate = format_rate(cost["images_per_s"])
    if found["read_bytes_per_s"] and cost["total_bytes"] > found["free_memory_bytes"]:
        rate = words("pack.bound_by_storage", rate=rate)
    off = f"{cost['difference']:.1f}"
    return (
        cost["name"],
        format_bytes(cost["bytes_per_image"]),
        f"{cost['decode_ms']:.2f} ms",
        format_rate(cost["images_per_s_per_core"]),
        rate,
        f"{cost['cores_needed']:.2g}" if cost["cores_needed"] else UNKNOWN,
        words("pack.off_by", n=off) if cost["difference"] else words("pack.the_same"),
    )


def _storage(found: Mapping[str, Any]) -> Sentence:
    free = format_bytes(found["free_memory_bytes"])
    if not found["read_bytes_per_s"]:
        return words("pack.storage_unknown", free=free)
    return words("pack.storage_rate", rate=format_bytes(found["read_bytes_per_s"]), free=free)


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
