"""Secrets are hidden by name and by shape, and nothing else is."""

import pytest

from flatout.records.secrets import HIDDEN, hide_in_text, hide_in_words
from flatout.records.trial import Workload

BODY = "Ab1" * 14


@pytest.mark.parametrize(
    "secret",
    [
        f"hf_{BODY}",
        f"sk-{BODY}",
        f"sk-ant-api03-{BODY}",
        "AKIA" + "ABCD" * 4,
        f"ghp_{BODY}",
        f"github_pat_{BODY}",
        f"glpat-{BODY}",
        f"xoxb-{BODY}",
        f"AIza{BODY}",
        f"eyJ{BODY}.{BODY}.{BODY}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{BODY}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_secret_is_hidden_wherever_it_is(secret):
    assert hide_in_text(f"login with {secret}!") == f"login with {HIDDEN}!"
    assert hide_in_words(["--login", secret, f"x={secret}"]) == ["--login", HIDDEN, f"x={HIDDEN}"]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgres://me:hunter2@db/x", f"postgres://{HIDDEN}@db/x"),
        ("https://:hunter2@db/x", f"https://{HIDDEN}@db/x"),
        ("https://s3/x?a=1&X-Amz-Signature=hunter2", f"https://s3/x?a=1&{HIDDEN}"),
        ("ssh://git@host/x", "ssh://git@host/x"),
    ],
)
def test_passwords_in_addresses_are_hidden(address, shown):
    assert hide_in_text(address) == shown


@pytest.mark.parametrize(
    "name",
    ["--token", "--api-key", "--apiKey", "--hf_token", "--secret", "--db.password", "--AWS_SECRET"],
)
def test_the_value_of_a_secrets_name_is_hidden(name):
    assert hide_in_words([name, "hunter2", "x"]) == [name, HIDDEN, "x"]
    assert hide_in_words([f"{name}=hunter2"]) == [f"{name}={HIDDEN}"]
    assert hide_in_words([f"{name.strip('-')}=hunter2"]) == [f"{name.strip('-')}={HIDDEN}"]


@pytest.mark.parametrize(
    "words",
    [
        ["--tokenizer", "bert", "--max-tokens", "64", "--pad-token", "[PAD]", "--key-dim=8"],
        ["--use-token", "--lr", "0.1"],
        ["--revision", "0123456789abcdef0123456789abcdef01234567", "keys.json", "task-key"],
    ],
)
def test_what_only_sounds_alike_is_shown(words):
    assert hide_in_words(words) == words


def test_a_workload_shows_no_secret_and_still_passes_it_on():
    workload = Workload(target="train.py", arguments=("--token", "hunter2"))

    assert workload.command_line == f"train.py --token {HIDDEN}"
    assert workload.arguments == ("--token", "hunter2")
