import os
import sys

import pytest

from flatout.launch.trial_process import ProcessOptions, run_process
from flatout.records.trial import Workload
from flatout.tuning.trials import ENTRY


@pytest.mark.slow
def test_the_environment_of_a_trial_is_in_no_file(tmp_path):
    (tmp_path / "look.py").write_text(
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ['FLATOUT_SPEC']).parent\n"
        "files = [path for path in folder.rglob('*') if path.is_file()]\n"
        "found = [path.name for path in files if b'hunter2' in path.read_bytes()]\n"
        "print(len(files) > 1, os.environ['MY_TOKEN'] == 'hunter2', found, flush=True)\n"
    )
    workload = Workload(target="look.py", folder=tmp_path, python=sys.executable)
    environment = {**os.environ, "MY_TOKEN": "hunter2"}

    ending = run_process(workload, ProcessOptions(entry=ENTRY, environment=environment))

    assert "True True []" in ending.log


@pytest.mark.slow
def test_a_thread_that_trains_is_noted_before_its_process_ends(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, threading, torch\n"
        "def train():\n"
        "    torch.ones(1, requires_grad=True).sum().backward()\n"
        "    os.kill(os.getpid(), 9)\n"
        "threading.Thread(target=train).start()\n"
    )
    workload = Workload(target=str(script), folder=tmp_path, python=sys.executable)

    ending = run_process(workload, ProcessOptions(entry=ENTRY, environment=os.environ))

    assert ending.trains_elsewhere
