"""Every sentence of the reports, by name, in each language.

English is the source: `en.toml` has every name, the other languages the same names with the same
fields. A rule, a note or a trial says a sentence as `words(name, field=...)`: that is its English
text, which remembers its name and fields, so that a report can say it in another language. What is
no such sentence (a script's own words) stays as it is. A sentence that was written to a file as its
English text, or by code that cannot read the catalogue, is known again by its message.

What is said in plain English and by no name is known by its text alone: `plain_ko.toml` has it in
Korean. A technique, a rule or a command is one module, so what it says may be in that, in a text
called KOREAN: lines of English, each with its Korean indented below it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from flatout.records.input_files import parse_toml
from flatout.records.units import MAX_RATIO_END, format_interval, format_ratio

ENGLISH = "en"
LANGUAGES = (ENGLISH, "ko")
FIELD = re.compile(r"\{(\w+)\}")
LEAST_WORDS = 3
"""Words of its own that a message has by which its text is known again: fewer fit anything."""
JOINTS = {"joint.and": "; ", "joint.because": ": "}
"""Messages that join two texts, and what they put between them."""
OWN = re.compile(r'^KOREAN = """\n(.*?)^"""', re.MULTILINE | re.DOTALL)
PAIR = re.compile(r"((?:^\S.*\n)+)((?:^ .*\n)+)", re.MULTILINE)
"""Lines of English, and those of Korean below them."""

Text: TypeAlias = "str | tuple[Text, ...]"
"""What a report says: words of no language, a sentence, or several with commas between them."""


class Sentence(str):
    """One message of the catalogue with its fields, as its English text.

    The code of what has no name there is its English text, with the fields' names in it.
    """

    __slots__ = ("code", "fields")
    code: str
    fields: Mapping[str, Text]

    def __new__(cls, code: str, fields: Mapping[str, Text], text: str = "") -> "Sentence":
        """Return the sentence, as the text that it was recognised in, if any."""
        self = super().__new__(cls, text or messages(ENGLISH).filled(code, fields))
        self.code, self.fields = code, fields
        return self

    def __getnewargs__(self) -> tuple[str, Mapping[str, Text], str]:  # type: ignore[override]
        """Return what a copy is made of."""
        return self.code, self.fields, str(self)


def words(code: str, /, **fields: Text) -> Sentence:
    """Return a message of the catalogue.

    >>> words("unit.ratio", value="1.20")
    '1.20x'
    """
    return Sentence(code, fields)


def times(ratio: float) -> Sentence:
    """Return a ratio as the language writes it."""
    return words("unit.ratio", value=format_ratio(ratio)[:-1])


def interval_of(interval: tuple[float, float]) -> str:
    """Return an interval of a ratio; one without a meaningful end is unknown."""
    is_known = interval[1] <= MAX_RATIO_END
    return format_interval(*interval) if is_known else words("unit.no_interval")


def named(family: str, name: str) -> str:
    """Return the word for a name that other code gave, the name itself where there is none."""
    code = f"{family}.{name}"
    return words(code) if code in messages(ENGLISH).texts else name


def written(text: str) -> str:
    """Return a sentence without its full stop."""
    return text.rstrip(". ") if text.endswith((".", " ")) else text


def joined(*texts: str, joint: str = "joint.and") -> str:
    """Return texts with semicolons, or another joint, between them; each is still a sentence.

    >>> joined("one", "two", "three"), joined("one", "two", joint="joint.with")
    ('one; two; three', 'one and two')
    """
    first, *others = texts
    return words(joint, one=first, other=joined(*others, joint=joint)) if others else first


def code_of(text: str) -> str:
    """Return the name of a sentence, also of one that was read back; empty for any other text."""
    known = recognised(text)
    return known.code if isinstance(known, Sentence) else ""


def recognised(text: str) -> str:
    """Return the sentence that an English text was made as; any other text as it is.

    Of the messages that fit, the one with the most words of its own. Where none does, what is left
    and right of a semicolon or a colon may each be a sentence.

    >>> recognised("the loss was not finite at step 3").code
    'trial.not_finite'
    """
    if isinstance(text, Sentence):
        return text
    if "{" not in text and text in plain_texts():
        return Sentence(text, {}, text)
    return text if text.count(" ") < LEAST_WORDS - 1 else _recognised(text)


@lru_cache(maxsize=1024)
def _recognised(text: str) -> str:
    single = _fitting(text, of_one=True)
    if single is not None:
        return single
    if text.endswith(".") and isinstance(first := recognised(text[:-1]), Sentence):
        return Sentence("joint.end", {"text": first})
    several, most = text, 0
    for code, joint in JOINTS.items():
        for place in (found.start() for found in re.finditer(joint, text)):
            one, other = recognised(text[:place]), recognised(text[place + len(joint) :])
            count = isinstance(one, Sentence) + isinstance(other, Sentence)
            if count > most:
                several, most = Sentence(code, {"one": one, "other": other}), count
    return several if most == 2 else _fitting(text, of_one=False) or several


def _fitting(text: str, *, of_one: bool) -> Sentence | None:
    """Return the message that a text fits; of one sentence, no field has a semicolon."""
    for code, template, longest in _known_messages():
        if longest in text and (found := _pattern(template, of_one=of_one).fullmatch(text)):
            fields = found.groupdict()
            if "phases" in fields:
                fields["phases"] = _phases(fields["phases"])
            return Sentence(code, fields, text)
    return None


def _phases(text: str) -> str:
    """Return the names of phases in a text as sentences: one word is known by its place alone."""
    known = recognised(text)
    if isinstance(known, Sentence):
        return known
    codes = {name: f"phase.{code}" for code, name in messages(ENGLISH).family("phase").items()}
    names = (words(codes[x]) if x in codes else x for x in text.split(" and "))
    return joined(*names, joint="joint.with")


@lru_cache(maxsize=1)
def _known_messages() -> tuple[tuple[str, str, str], ...]:
    """Return name, English text and longest part of each message that is known by its words."""
    found = []
    plain = {template: template for template in plain_texts()}
    for code, template in {**plain, **messages(ENGLISH).texts}.items():
        parts = FIELD.split(template)[::2]
        own_words = sum(len(re.findall("[A-Za-z]+", part)) for part in parts)
        if own_words >= LEAST_WORDS or code in plain:
            found.append((code, template, max(parts, key=len)))
    found.sort(key=lambda one: -len(FIELD.sub("", one[1])))
    return tuple(found)


@lru_cache(maxsize=256)
def _pattern(template: str, *, of_one: bool) -> re.Pattern[str]:
    """Return what finds a message's fields in its text; one that comes twice is the same twice.

    A field that a message begins with takes in no other sentence before it.
    """
    seen: set[str] = set()
    pattern, within = "", "(?:(?!; ).)*?" if of_one else ".*?"
    for number, part in enumerate(FIELD.split(template)):
        if number % 2 == 0:
            pattern += re.escape(part)
        else:
            field = within if pattern else "(?:(?!; |: ).)*?"
            pattern += f"(?P={part})" if part in seen else f"(?P<{part}>{field})"
            seen.add(part)
    return re.compile(pattern, re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """The sentences of one language."""

    language: str
    texts: Mapping[str, str]

    def __call__(self, name: str, /, **fields: object) -> str:
        """Return a message with its fields filled in.

        >>> messages("en")("unit.ratio", value="1.20")
        '1.20x'
        """
        return self.texts[name].format(**fields)

    def family(self, name: str) -> dict[str, str]:
        """Return a table's messages, for a process whose Python may lack what reads the file."""
        start = f"{name}."
        return {key[len(start) :]: x for key, x in self.texts.items() if key.startswith(start)}

    def text(self, text: Text) -> str:
        """Return what a report says, in this language.

        >>> messages("en").text((named("phase", "h2d"), named("phase", "mine")))
        'copy to device, mine'
        """
        if isinstance(text, tuple):
            return ", ".join(map(self.text, text))
        if self.language == ENGLISH:
            return str(text)
        known = recognised(text)
        return self.filled(known.code, known.fields) if isinstance(known, Sentence) else text

    def filled(self, code: str, fields: Mapping[str, Text]) -> str:
        """Return a message, its fields in this language too."""
        template = self.texts[code] if code in self.texts else plain_texts()[code]
        return template.format(**{name: self.text(value) for name, value in fields.items()})


@lru_cache(maxsize=len(LANGUAGES))
def messages(language: str) -> Messages:
    """Return the sentences of a language, one of `LANGUAGES`."""
    source = files(__name__).joinpath(f"{language}.toml").read_text(encoding="utf-8")
    return Messages(language=language, texts=dict(_flat(parse_toml(source))))


@lru_cache(maxsize=1)
def plain_texts() -> Mapping[str, str]:
    """Return what is said in plain English, with its Korean; {names} stand for what is filled in.

    >>> plain_texts()["the data set is empty"].isascii()
    False
    """
    folder = Path(__file__).parent
    found: dict[str, str] = {}
    for table in parse_toml((folder / "plain_ko.toml").read_text(encoding="utf-8")).values():
        found |= table
    plug_ins = ("techniques", "rules", "cli")
    for path in (p for kind in plug_ins for p in folder.parents[1].glob(f"{kind}/**/*.py")):
        for block in OWN.findall(path.read_text(encoding="utf-8")):
            pairs = PAIR.findall(block)
            found |= {" ".join(one.split()): " ".join(other.split()) for one, other in pairs}
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
