import os
import pty
import re
import subprocess
import sys

from flatout.cli.tuning_output import display
from flatout.records.live import Progress

NOW = {"done_share": 0.25, "elapsed_s": 150.0, "left_s": 450.0, "num_runs": 9}
ON_A_TERMINAL = """
from flatout.cli.tuning_output import display
from flatout.records.live import Progress
with display(600.0) as tell:
    now = {"done_share": 0.25, "elapsed_s": 150.0, "left_s": 450.0, "num_runs": 9}
    now["best_ratio"] = 1.62
    tell(Progress(trying="torch_compile [mode]", **now))
    tell(Progress(trying="tf32", event="torch_compile [mode]: kept 1.3x [1.2, 1.4]", **now))
"""


def on_a_terminal(code):
    """Return what a program writes to stderr when that is a terminal of 100 columns."""
    own, its = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stderr=its,
        env=os.environ | {"COLUMNS": "100", "TERM": "xterm"},
    )
    os.close(its)
    parts = []
    while True:
        try:
            part = os.read(own, 1 << 16)
        except OSError:  # the terminal's other side is closed
            break
        if not part:
            break
        parts.append(part)
    assert child.wait() == 0
    os.close(own)
    return b"".join(parts).decode()


def test_a_terminal_shows_what_is_tried_time_left_runs_and_best():
    text = on_a_terminal(ON_A_TERMINAL)

    assert "7 min 30 s left 9 runs best 1.62x tf32" in text


def test_events_stay_on_the_terminal_as_they_are():
    assert "torch_compile [mode]: kept 1.3x [1.2, 1.4]" in on_a_terminal(ON_A_TERMINAL)


def test_elsewhere_mere_ticks_are_not_written(capsys):
    with display(600.0) as tell:
        tell(Progress(trying="tf32", **NOW))
        tell(Progress(trying="tf32", event="tf32: no effect", **NOW))

    assert capsys.readouterr().err == "[2 min 30 s of 10 min 0 s, 9 runs] tf32: no effect\n"


SHOWN = """
import sys
sys.stdout = sys.stderr
from flatout.cli.options import show
show("1.5x faster.\\n\\ntechnique  verdict\\n------------------\\ntf32       kept\\n")
"""


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n")


def test_a_terminal_shows_the_answer_bold_and_the_same_words(capfd, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = on_a_terminal(SHOWN)
    subprocess.run([sys.executable, "-c", SHOWN], check=True)

    assert "\x1b[1m1.5x faster." in text
    assert "\x1b[32mkept" in text
    assert plain(text) == capfd.readouterr().err


def test_no_color_is_obeyed(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    assert "\x1b[" not in on_a_terminal(SHOWN)
