import subprocess
import sys

import pytest

import flatout
from flatout.agent.marks import StepMark


def test_outside_a_trial_a_step_does_nothing_and_imports_no_torch():
    code = "import sys, flatout\nwith flatout.step(): pass\nprint('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


def test_edges_are_told_and_an_exception_is_no_whole_step():
    heard = []
    mark = StepMark()
    mark.listen(lambda: heard.append("began"), heard.append)

    with mark:
        pass
    with pytest.raises(ValueError, match="broke"), mark:
        raise ValueError("broke")

    assert heard == ["began", True, "began", False]


def test_the_mark_of_the_package_is_one_object():
    assert flatout.step() is flatout.step()
