import json

import pytest

from flatout.cli import call

FOUND = "import torch\nx = torch.zeros(3000).cuda()\ny = torch.rand(3000).cuda()\n"


@pytest.fixture
def script(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "train.py").write_text(FOUND)
    return folder / "train.py"


def test_findings_are_listed_with_what_to_write_and_exit_with_1(script, capsys):
    assert call(["check", "train.py"]) == 1

    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("train.py:2:5: SYN10 torch.zeros fills memory of the host")
    assert shown[1].startswith("    write: make it there")
    assert shown[-1] == (
        "2 findings in 1 file; --fix fixes 1 and keeps the numbers; "
        "--diff shows 1 more, --fix --suggested writes them"
    )


def test_the_python_function_returns_the_same(script):
    import flatout

    found = flatout.check("train.py", select=["SYN"])

    assert [(path, finding.code, finding.line) for path, finding in found.findings] == [
        ("train.py", "SYN10", 2),
        ("train.py", "SYN10", 3),
    ]
    assert str(found).startswith("train.py:2:5: SYN10")


def test_a_file_without_findings_exits_with_0(script, capsys):
    script.write_text("import torch\n")

    assert call(["check", "train.py"]) == 0
    assert capsys.readouterr().out == "nothing found in 1 file\n"


def test_fix_writes_what_keeps_the_numbers_and_suggested_the_rest(script, capsys):
    assert call(["check", "--fix", "train.py"]) == 1
    assert script.read_text() == FOUND.replace("zeros(3000).cuda()", 'zeros(3000, device="cuda")')

    assert call(["check", "--fix", "--suggested", "train.py"]) == 0
    assert "cuda()" not in script.read_text()
    assert capsys.readouterr().out.endswith("1 fixed, nothing found in 1 file\n")


def test_diff_shows_all_fixes_and_writes_nothing(script, capsys):
    assert call(["check", "--diff", "train.py"]) == 1

    assert capsys.readouterr().out.count("\n+") == 3
    assert script.read_text() == FOUND


def test_json_goes_to_the_terminal_or_into_a_file(script, capsys, folder):
    call(["check", "--output", "json", "--json", "found.json", "train.py"])

    plain = json.loads(capsys.readouterr().out)
    assert plain == json.loads((folder / "found.json").read_text())
    assert plain["schema"] == "flatout.check/1"
    assert {
        key: plain["findings"][0][key] for key in ("code", "path", "line", "column", "fix")
    } == {
        "code": "SYN10",
        "path": "train.py",
        "line": 2,
        "column": 5,
        "fix": "safe",
    }


@pytest.mark.parametrize("more", ["--diff", "--output=sarif"])
def test_json_on_standard_output_is_all_that_is_there(script, capsys, more):
    assert call(["check", more, "--json", "-", "train.py"]) == 1

    assert json.loads(capsys.readouterr().out)["schema"] == "flatout.check/1"


def test_github_gets_one_command_a_finding(script, capsys):
    call(["check", "--output", "github", "train.py"])

    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("::warning file=train.py,line=2,endLine=2,col=5,title=SYN10::torch.")


def test_sarif_names_rule_place_and_message(script, capsys):
    call(["check", "--output", "sarif", "train.py"])

    run = json.loads(capsys.readouterr().out)["runs"][0]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["SYN10"]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "train.py"
    assert place["region"]["startLine"] == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--suggested", "train.py"],
        ["--fix", "--diff", "train.py"],
        ["--select", "NOPE", "train.py"],
        ["gone.py"],
        [],
    ],
)
def test_misuse_exits_with_2_and_one_line(script, capsys, words):
    assert call(["check", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
