"""Run code in copies of one process that has imported torch: the import takes longer than it.

`python copies.py` reads a line of JSON, {"code": ..., "folder": ...}, for each piece of code and
answers with {"exit_code": ..., "said": ...}. Each runs as `__main__` would, in a copy made for it.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
import types


class Copies:
    """The process that is copied, started when first asked and ended with `close`."""

    def __init__(self):
        self.process = None

    def run(self, code, folder):
        """Run code in a copy; return its exit code and what it said."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        self.process.stdin.write(json.dumps({"code": code, "folder": str(folder)}) + "\n")
        answer = json.loads(self.process.stdout.readline())
        return answer["exit_code"], answer["said"]

    def close(self):
        """End the process."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()


def serve():
    """Answer until there is no more to do. Torch is only imported here: no thread runs yet."""
    import torch._dynamo  # noqa: F401  the first step of any optimizer imports it

    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile() as log:
            copy = os.fork()
            if copy == 0:
                run_here(asked, log.fileno())
            _, status = os.waitpid(copy, 0)
            log.seek(0)
            said = log.read().decode(errors="replace")
        answer = {"exit_code": os.waitstatus_to_exitcode(status), "said": said}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def run_here(asked, log):
    """Run the code as this process's own, all output into the log, and end.

    All is done that is done at an exit but the taking apart of modules, which takes half a second.
    """
    code = 1
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        os.chdir(asked["folder"])
        sys.argv[:], sys.path[0] = ["-c"], ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(asked["code"], "<block>", "exec"), main.__dict__)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  whatever it is, the code ended with it
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
