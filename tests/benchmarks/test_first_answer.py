"""What the record of first answers says of what was measured."""

from benchmarks.peers.first_answer import SCRIPTS, TOOLS, edits, record_of


def rounds(install_s, ask_s):
    return [
        {"install_s": install_s + n, "ask_s": ask_s, "answer": "38 % of each step", "output": ""}
        for n in (-1, 0, 5)
    ]


def seen(flatout_s):
    others = {name: rounds(10.0, 20.0) for name in TOOLS if name != "flatout"}
    return {"flatout": rounds(10.0, flatout_s)} | others


def test_the_middle_round_is_shown_and_the_slower_tool_is_not_first():
    faster, slower = record_of(seen(15.0)), record_of(seen(25.0))

    assert faster.holds
    assert not slower.holds
    row = next(row for row in faster.table if row[0] == "flatout")
    assert row == ("flatout", "2", "0", "10.0 s", "15.0 s", "25.0 s", "`38 % of each step`")


def test_only_one_tool_wants_lines_in_the_script():
    assert [name for name in TOOLS if edits(name)] == ["TraceML"]
    assert edits("TraceML") == 3
    assert {tool.script for tool in TOOLS.values()} == {path.name for path in SCRIPTS.glob("*.py")}
