"""Every sentence of the reports on a measurement, by name, in each language.

English is the source: `en.toml` has every name, the other languages the same names with the same
fields. Sentences that are written elsewhere (a rule's reason, a note of the measuring) reach a
report in English; they are recognised by their English template and said in the other language,
numbers kept. One that is not recognised stays English.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, TypeAlias

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGLISH = "en"
LANGUAGES = (ENGLISH, "ko")
ELSEWHERE = ("finding.", "note.", "progress.", "trial.")
"""Names of sentences that other layers write: English here only so that they are recognised."""
FIELD = re.compile(r"\{(\w+)\}")

Text: TypeAlias = "str | Sentence | tuple[Text, ...]"
"""What a report says: words of no language, one message, or several with commas between them."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """One message with its fields, in no language yet."""

    code: str
    fields: Mapping[str, Text] = field(default_factory=dict)
    otherwise: str = ""
    """English text, or a name, that is shown where the catalogue has no such code."""


def words(code: str, /, **fields: Text) -> Sentence:
    """Return a message of the catalogue."""
    return Sentence(code, fields)


def named(family: str, name: str) -> Sentence:
    """Return the word for a name that other code gave, the name itself where there is none."""
    return Sentence(f"{family}.{name}", otherwise=name)


def written(text: str) -> Sentence:
    """Return a sentence that a rule or a note wrote in English, without its full stop."""
    return Sentence("", otherwise=text.rstrip(". "))


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

    def text(self, text: Text) -> str:
        """Return what a report says, in this language.

        >>> messages("en").text((named("phase", "h2d"), named("phase", "mine")))
        'copy to device, mine'
        """
        if isinstance(text, str):
            return text
        if isinstance(text, tuple):
            return ", ".join(map(self.text, text))
        if text.otherwise and text.code not in self.texts:
            return self.translated(text.otherwise)
        return self(text.code, **{name: self.text(value) for name, value in text.fields.items()})

    def translated(self, text: str) -> str:
        """Return a sentence that other code wrote in English; as it is where it is not known."""
        if self.language == ENGLISH:
            return text
        for name, pattern in _patterns():
            if found := pattern.fullmatch(text):
                return self(name, **{k: self.translated(v) for k, v in found.groupdict().items()})
        return text


@lru_cache(maxsize=len(LANGUAGES))
def messages(language: str) -> Messages:
    """Return the sentences of a language, one of `LANGUAGES`."""
    source = files(__name__).joinpath(f"{language}.toml").read_text(encoding="utf-8")
    return Messages(language=language, texts=dict(_flat(tomllib.loads(source))))


def fields_of(template: str) -> frozenset[str]:
    """Return the names of the fields in a message.

    >>> sorted(fields_of("{share} of {n}"))
    ['n', 'share']
    """
    return frozenset(FIELD.findall(template))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    english = messages(ENGLISH).texts
    return tuple(
        (name, _pattern(text)) for name, text in english.items() if name.startswith(ELSEWHERE)
    )


def _pattern(template: str) -> re.Pattern[str]:
    """Return what recognises a sentence made from a template, each field a group."""
    parts: list[str] = []
    seen: set[str] = set()
    for number, part in enumerate(FIELD.split(template)):
        if number % 2 == 0:
            parts.append(re.escape(part))
        else:
            parts.append(f"(?P={part})" if part in seen else f"(?P<{part}>.+?)")
            seen.add(part)
    return re.compile("".join(parts), re.DOTALL)
