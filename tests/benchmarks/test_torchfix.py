"""What the page about torchfix says of what was measured."""

from benchmarks.peers.torchfix import FOUND, page


def ran(cpu_s, *, ended=True, **found):
    return {"cpu_s": cpu_s, "found": found, "ended": ended}


def test_a_file_that_one_tool_did_not_finish_is_counted_and_left_out_of_the_times():
    found = {
        "torchfix": "0.7.0",
        "limit_s": 60,
        "start": {"flatout": ran(0.5), "torchfix": ran(1.0)},
        "at_once": {"flatout": ran(2.0), "torchfix": ran(60.0, ended=False)},
        "files": [
            {"lines": 100, "flatout": ran(1.0, DL02=2), "torchfix": ran(3.0, TOR401=1)},
            {"lines": 900, "flatout": ran(2.0), "torchfix": ran(60.0, ended=False)},
        ],
    }

    text = page(found)

    assert "| files finished | 2 | 1 |" in text
    assert "| CPU time of those that both finished | 1.0 s | 3.0 s |" in text
    assert "| all in one process | 2.0 s | did not end |" in text
    assert "2 files drawn at random from those of the speed test, 100 lines" in text
    assert "- flatout: DL02 2" in text


def test_the_codes_are_read_from_what_the_tools_print():
    assert FOUND["torchfix"].findall("a.py:3:1: TOR401 Detected DataLoader") == ["TOR401"]
    assert FOUND["flatout"].findall('{"code": "SYN10", "line": 3}') == ["SYN10"]
