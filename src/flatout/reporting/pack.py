"""The report of `pack`: what the store holds, what was left out, whether it equals its source."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.records.units import format_bytes, format_duration, format_rate
from flatout.reporting.tables import Column, ascii_only, labelled, table, wrapped

WORDS = {
    "original": "as it is",
    "raw": "as uint8 pixels",
    "jpeg": "as re-encoded JPEG",
    "qoi": "as QOI",
    "zstd": "as compressed uint8 pixels",
    "tokens": "as tokens",
}


def render_pack(packed: Mapping[str, Any], *, width: int = 80) -> str:
    """Return the report of a `flatout.pack/1` document."""
    lines = [*wrapped(_headline(packed), width), ""]
    lines += labelled("stored  ", _stored(packed), width)
    lines += labelled("order   ", _order(packed), width)
    if packed["classes"]:
        lines += labelled("classes ", _classes(packed), width)
    if packed["skipped"]:
        lines += labelled("skipped ", _skipped(packed), width)
        for item in packed["skipped_first"]:
            lines += wrapped(item, width, indent=" " * 10)
    if packed["ignored"]:
        words = f"{_count(packed['ignored'], 'file')} of a kind that is not packed"
        lines += labelled("ignored ", words, width)
    if packed["verification"]:
        lines += labelled("verified", _verified(packed), width)
        for item in packed["verification"]["problems"]:
            lines += wrapped(item, width, indent=" " * 10)
    lines += ["", *labelled("next", f'data = flatout.data.open("{packed["folder"]}")', width)]
    return _lines(lines)


def render_check(checked: Mapping[str, Any], *, width: int = 80) -> str:
    """Return the report of a `flatout.pack_check/1` document."""
    samples = _count(checked["samples"], "sample")
    where = f"{checked['folder']}: {samples}, {format_bytes(checked['bytes'])}"
    if checked["is_sound"]:
        took = format_duration(checked["seconds"])
        return _lines(wrapped(f"{where}; all as they were written, read in {took}.", width))
    lines = wrapped(f"{where}; {_count(checked['num_problems'], 'problem')} found.", width)
    for item in checked["problems"]:
        lines += wrapped(item, width, indent=" " * 10)
    return _lines([*lines, "", *labelled("next", "pack again into an empty folder", width)])


def render_formats(found: Mapping[str, Any], *, width: int = 80) -> str:
    """Return the report of a `flatout.formats/1` document: a row a format, the fastest first."""
    own = found["costs"][0]
    costs = sorted(found["costs"], key=lambda cost: -cost["images_per_s"])
    exact = [cost for cost in costs if not cost["difference"] and cost["name"] in WORDS]
    best = exact[0] if exact and exact[0]["images_per_s"] > own["images_per_s"] else None
    titles = ["bytes per\nimage", "decode\nper image", "images/s\nper core"]
    titles.append(f"images/s\n{_count(found['usable_cores'], 'core')}")
    if own["cores_needed"]:
        titles.append("cores\nneeded")
    columns = [Column("format"), *(Column(x, is_number=True) for x in titles), Column("pixels")]
    lines = [*wrapped(_fastest(own, best, found["images"]), width), ""]
    lines += [*table(columns, [_format_row(cost, found) for cost in costs]), ""]
    if found["not_installed"]:
        lines += labelled("missing", f"not installed: {', '.join(found['not_installed'])}", width)
    lines += labelled("decode ", "CPU time to RGB pixels, median of five rounds", width)
    lines += labelled("storage", _storage(found), width)
    if best:
        command = f"flatout pack {shlex.quote(found['source'])} DST --encode {best['name']}"
        lines += ["", *labelled("next", command, width)]
    return _lines(lines)


def _fastest(own: Mapping[str, Any], best: Mapping[str, Any] | None, images: int) -> str:
    if best is None:
        return (
            "No lossless format that is packed gives more images a second than the files as they "
            f"are ({_count(images, 'image')})."
        )
    faster = best["images_per_s"] / own["images_per_s"]
    larger = best["bytes_per_image"] / own["bytes_per_image"]
    return (
        f"As {best['name']} the images come {faster:.1f} times as fast, with the same pixels "
        f"and {larger:.1f} times the bytes ({_count(images, 'image')})."
    )


def _format_row(cost: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    is_bound = _exceeds_memory(cost, found)
    row = [
        cost["name"],
        format_bytes(cost["bytes_per_image"]),
        f"{cost['decode_ms']:.2f} ms",
        format_rate(cost["images_per_s_per_core"]),
        format_rate(cost["images_per_s"]) + (" (storage)" if is_bound else ""),
    ]
    if cost["cores_needed"]:
        row.append(f"{cost['cores_needed']:.2g}")
    return [*row, "the same" if not cost["difference"] else f"off by {cost['difference']:.1f}"]


def _exceeds_memory(cost: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return bool(found["read_bytes_per_s"]) and cost["total_bytes"] > found["free_memory_bytes"]


def _storage(found: Mapping[str, Any]) -> str:
    free = format_bytes(found["free_memory_bytes"])
    if not found["read_bytes_per_s"]:
        return f"not looked at: only a folder of files shows it; {free} of memory are free"
    rate = f"{format_bytes(found['read_bytes_per_s'])}/s, file after file"
    return f"{rate}; what fits into {free} of free memory is read once"


def _lines(lines: Sequence[str]) -> str:
    return ascii_only("\n".join(lines)) + "\n"


def _headline(packed: Mapping[str, Any]) -> str:
    where = f"{packed['folder']}: {_count(packed['samples'], 'sample')}"
    where += f" in {_count(packed['file_shards'], 'file shard')}, {format_bytes(packed['bytes'])}"
    problems = packed["verification"] and packed["verification"]["num_problems"]
    if problems:
        return f"{where}; {_count(problems, 'sample')} NOT as in the source."
    if packed["was_packed"]:
        return f"{where}; it was packed before."
    rate = packed["samples"] / packed["seconds"] if packed["seconds"] else 0.0
    took = format_duration(packed["seconds"])
    return f"{where}; packed in {took}, {format_rate(rate)} samples a second."


def _stored(packed: Mapping[str, Any]) -> str:
    encoding = packed["encoding"]
    words = WORDS[encoding["kind"]]
    if encoding["kind"] == "jpeg":
        words += f" of quality {encoding['quality']}"
    if encoding["short_side"]:
        words += f", images with a short side of at most {encoding['short_side']} pixels"
    if packed["is_lossless"]:
        return f"{words}: lossless"
    return f"{words}: LOSSY, not the source's samples; train with it knowingly"


def _order(packed: Mapping[str, Any]) -> str:
    if packed["order"] == "shuffled":
        return f"a permutation of all samples, seed {packed['seed']}"
    return "as in the source; not shuffled, so it cannot be read block by block"


def _classes(packed: Mapping[str, Any]) -> str:
    """Name some: a folder of splits looks like classes called train and val."""
    more = ", ..." if packed["classes"] > len(packed["classes_first"]) else ""
    return f"{packed['classes']}: {', '.join(packed['classes_first'])}{more}"


def _skipped(packed: Mapping[str, Any]) -> str:
    return f"{_count(packed['skipped'], 'sample')}, listed in {packed['folder']}/skipped.jsonl"


def _verified(packed: Mapping[str, Any]) -> str:
    found = packed["verification"]
    if found["num_problems"]:
        return f"{_count(found['num_problems'], 'problem')}; the first:"
    what = "is the source's, bit by bit"
    if not packed["is_lossless"]:
        what = "is exactly what this encoding makes of the source's"
    return f"each of the {_count(found['samples'], 'sample')} {what}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
