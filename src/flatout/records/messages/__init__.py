"""Every sentence of the reports, by name, in each language.

English is the source: `en.toml` has every name, the other languages the same names with the same
fields. A rule, a note or a trial says a sentence as `words(name, field=...)`: that is its English
text, which remembers its name and fields, so that a report can say it in another language. What is
no such sentence (a script's own words, a note that was read back from a file) stays as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, TypeAlias

from flatout.records.input_files import parse_toml

ENGLISH = "en"
LANGUAGES = (ENGLISH, "ko")

Text: TypeAlias = "str | tuple[Text, ...]"
"""What a report says: words of no language, a sentence, or several with commas between them."""


class Sentence(str):
    """One message of the catalogue with its fields, as its English text."""

    __slots__ = ("code", "fields")
    code: str
    fields: Mapping[str, Text]

    def __new__(cls, code: str, fields: Mapping[str, Text]) -> "Sentence":
        """Return the sentence; raises KeyError for a code or a field that does not exist."""
        english = messages(ENGLISH)
        self = super().__new__(cls, english.filled(code, fields))
        self.code, self.fields = code, fields
        return self

    def __getnewargs__(self) -> tuple[str, Mapping[str, Text]]:  # type: ignore[override]
        """Return what a copy is made of."""
        return self.code, self.fields


def words(code: str, /, **fields: Text) -> Sentence:
    """Return a message of the catalogue.

    >>> words("unit.ratio", value="1.20")
    '1.20x'
    """
    return Sentence(code, fields)


def named(family: str, name: str) -> str:
    """Return the word for a name that other code gave, the name itself where there is none."""
    code = f"{family}.{name}"
    return words(code) if code in messages(ENGLISH).texts else name


def written(text: str) -> str:
    """Return a sentence without its full stop."""
    return text.rstrip(". ") if text.endswith((".", " ")) else text


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
        return self.filled(text.code, text.fields) if isinstance(text, Sentence) else text

    def filled(self, code: str, fields: Mapping[str, Text]) -> str:
        """Return a message, its fields in this language too."""
        return self(code, **{name: self.text(value) for name, value in fields.items()})


@lru_cache(maxsize=len(LANGUAGES))
def messages(language: str) -> Messages:
    """Return the sentences of a language, one of `LANGUAGES`."""
    source = files(__name__).joinpath(f"{language}.toml").read_text(encoding="utf-8")
    return Messages(language=language, texts=dict(_flat(parse_toml(source))))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
