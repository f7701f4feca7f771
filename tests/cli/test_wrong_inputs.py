"""What people get wrong: one clear line, exit code 2, and nothing left behind."""

import pytest

from flatout.cli import call

PARSES = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs')\n"
FILES = {
    "train.py": PARSES,
    "broken.json": '{"schema": ',
    "empty.json": "",
    "list.json": "[1]",
    "other.json": '{"schema": "someone/1"}',
    "data.txt": "x",
    "broken.toml": "[flatout",
    "empty.toml": "",
    "ok.toml": '[[technique]]\nname = "tf32"\n',
    "unknown.toml": '[[technique]]\nname = "bf17"\n',
    "setting.toml": '[[technique]]\nname = "loader_workers"\nnum_worker = 2\n',
    "value.toml": '[[technique]]\nname = "loader_workers"\nnum_workers = "two"\n',
}
WRONG = """
measure
measure nosuch.py
measure folder
measure .
measure data.txt
measure --html folder train.py
measure --html data.txt/r.html train.py
measure --json folder train.py
measure --limit 0 train.py
measure --limit soon train.py
measure --runs 0 train.py
measure --runs many train.py
measure --lang de train.py
measure --with nosuch.toml train.py
measure --with broken.toml train.py
measure --with empty.toml train.py
measure --with unknown.toml train.py
measure --with setting.toml train.py
measure --with value.toml train.py
measure --trace trace.txt train.py
measure train.py --html r.html
measure train.py --epochs 3 --details
measure python
measure python nosuch.py
measure python -c print(1)
measure uv run
measure uv run --with x train.py
measure torchrn train.py
measure -m
measure -m nosuchpkg.train
measure train.py:task
measure --bogus train.py
measure A=1 python train.py
tune
tune nosuch.py
tune --budget x train.py
tune --budget -5m train.py
tune --numerics wild train.py
tune --only bf17 train.py
tune --skip bf17 train.py
tune --only tf32 --skip tf32 train.py
tune --out data.txt train.py
tune --out data.txt/x train.py
tune --resume --out new train.py
tune --json folder train.py
tune train.py --budget 3m
run train.py
run --with nosuch.toml train.py
run --with broken.toml train.py
run --with unknown.toml train.py
run --with train.py
run --with ok.toml nosuch.py
run --plan broken.json train.py
run --plan other.json train.py
run --gpus 0 train.py
run --gpus 2 --ranks 2 train.py
run --ranks 2 --zero 1 train.py
run --ranks 2 --offload train.py
run --with ok.toml --zero 3 --offload train.py
run --with ok.toml --on-oom pray train.py
run --on-oom adapt --resume-args ' train.py
compare broken.json other.json
compare empty.json empty.json
compare list.json list.json
compare other.json other.json
compare nosuch.json other.json
compare folder folder
plan --gpu h9000 train.py
plan --batch 0 train.py
plan --gpus 0 train.py
check nosuch.py
check --select XX99 train.py
check --diff --fix train.py
pack
pack images out.packed
pack nosuch out.packed
pack --check nosuch
pack --encode gif images out.packed
patch ok.toml nosuch.py
patch nosuch.toml train.py
container --with nosuch.toml
techniques nosuch
restore nosuch
roofline --limit 0 train.py
survey nosuch.py
watch --json x.json
tnue train.py
plan --gpu l4 nosuch.py
run --gpus 64 train.py
measure --json /proc/r.json train.py
measure --html /proc/r.html train.py
tune --out /proc/out train.py
survey --out /proc/out train.py
plan --json /proc/plan.json train.py
run --record /proc/run.json train.py
pack empty.json out.packed
pack images out.packed --lang de
compare --lang fr other.json other.json
compare --fail-below -1 other.json other.json
run --lang xx --with ok.toml train.py
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        is_recipe = text.startswith("[[")
        (made / name).write_text('[flatout]\nversion = "0.1.0"\n' * is_recipe + text)
    (made / "folder").mkdir()
    (made / "images").mkdir()
    return made


@pytest.mark.parametrize("typed", WRONG.strip().splitlines())
def test_a_wrong_input_is_one_clear_line(typed, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))

    code = call(typed.split())

    captured = capfd.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("flatout: ")
    assert len(captured.err.splitlines()) == 1
    assert sorted(folder.rglob("*")) == before
