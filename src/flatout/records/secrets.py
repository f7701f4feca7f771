"""Hide secrets in what is stored or shown: command lines, and the last lines of a script's output.

By name (`--api-key x`, `wandb.token=x`) and by shape (`hf_...`, `sk-...`, `AKIA...`, addresses
with a password). A secret that has neither a name nor a shape of its own is not seen.
"""

import re
from collections.abc import Sequence

HIDDEN = "_hidden_"
"""Stands for a secret; needs no quotes in a shell."""
NAMES = frozenset(
    {"token", "key", "secret", "password", "passwd", "passphrase", "pwd", "apikey", "pat"}
    | {"credential", "credentials", "auth", "authorization"}
)
"""Last words of names whose values are hidden; `max_tokens`, `tokenizer` and `key_dim` are none."""
HARMLESS = re.compile(r"(pad|eos|bos|sep|cls|mask|unk|image|special|sort|primary)_?token|sort_?key")
"""Names of models' tokens and of columns, which are no secrets."""
NAME = re.compile(r"[\w.+-]{1,80}")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{16,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|\bglpat-[A-Za-z0-9_-]{16,}"
    r"|\bxox[abeprs]-[A-Za-z0-9-]{10,}|\bAIza[A-Za-z0-9_-]{30,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)"
    r"|(?<=://)[^/\s:@]*:[^/\s@]*(?=@)"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{8,}"
    r"|(?<=[?&])[\w-]*(?i:token|key|secret|password|signature|sig)=[^&\s]+",
    re.DOTALL,
)
"""What the services' own secrets look like: Hugging Face, OpenAI and Anthropic, AWS, GitHub,
GitLab, Slack, Google, JSON web tokens, PEM keys; passwords in addresses, signed addresses."""


def hide_in_text(text: str) -> str:
    """Return a text with everything that has the shape of a secret hidden.

    >>> hide_in_text("git clone https://me:pw@host/x")
    'git clone https://_hidden_@host/x'
    """
    return SHAPES.sub(HIDDEN, text)


def hide_in_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the values of secrets hidden.

    >>> hide_in_words(["--lr", "0.1", "--api-key", "a1", "WANDB_TOKEN=b2", "--max-tokens", "64"])
    ['--lr', '0.1', '--api-key', '_hidden_', 'WANDB_TOKEN=_hidden_', '--max-tokens', '64']
    """
    shown: list[str] = []
    is_value = False
    for word in words:
        if is_value and not word.startswith("-"):
            shown.append(HIDDEN)
            is_value = False
            continue
        name, equals, value = word.partition("=")
        is_named = _is_secret(name)
        is_value = is_named and not equals and word.startswith("-")
        shown.append(f"{name}={HIDDEN}" if is_named and value else hide_in_text(word))
    return shown


def _is_secret(name: str) -> bool:
    words = [word.lower() for word in WORD.findall(name)] if NAME.fullmatch(name) else []
    is_harmless = HARMLESS.fullmatch("_".join(words[-2:])) is not None
    return bool(words) and words[-1] in NAMES and not is_harmless
