import subprocess
import sys
from pathlib import Path

import pytest

from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.workflow.patch import patch
from flatout.workflow.recipe_files import write_recipe
from tests.support.programs import ran

SCRIPT = """\
import torch
from torch.utils.data import DataLoader

device = torch.device("cuda")
loader = DataLoader(data, batch_size=8, shuffle=True)  # the photographs
model = Net().to(device)
optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=1e-3,
)
for epoch in range(3):
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        # as usual
        output = model(x)
        loss = criterion(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def patched(tmp_path):
    """Return the script after the diff of a recipe, applied by `patch`, and what was left out."""

    def change(*choices, text=SCRIPT):
        path = tmp_path / "train.py"
        path.write_text(text)
        made = patch(Recipe(choices=choices), path)
        if made.diff:
            subprocess.run(["patch", "-p1", path], input=made.diff, text=True, check=True)
        compile(path.read_text(), "train.py", "exec")
        return path.read_text(), made.left_out

    return change


def test_loader_arguments_go_to_the_training_loader(patched):
    text, left_out = patched(
        Choice(technique="loader_workers", settings={"num_workers": 3, "prefetch_factor": 4}),
        Choice(technique="pinned_memory"),
        Choice(technique="persistent_workers"),
    )

    assert left_out == ()
    assert (
        "DataLoader(data, batch_size=8, shuffle=True, num_workers=3, prefetch_factor=4, "
        "pin_memory=True, persistent_workers=True)  # the photographs"
    ) in text
    assert "x.to(device, non_blocking=True), y.to(device, non_blocking=True)" in text


@pytest.mark.parametrize(
    ("written", "as_here"),
    [
        ("DataLoader(data, batch_size=8, shuffle=True)", "DataLoader(data, **loader_kwargs)"),
        (
            "DataLoader(data, batch_size=8, shuffle=True)",
            "DataLoader(data, 8, True, None, None, 2)",
        ),
        ("lr=1e-3,", "**optimizer_kwargs,"),
    ],
)
def test_a_call_that_may_have_the_argument_already_is_left_as_it_is(patched, written, as_here):
    script = SCRIPT.replace(written, as_here)
    workers = {"num_workers": 3, "prefetch_factor": 4}

    text, left_out = patched(
        Choice(technique="loader_workers", settings=workers)
        if "loader" in as_here.lower()
        else Choice(technique="fused_optimizer"),
        text=script,
    )

    assert text == script
    assert len(left_out) == 1


def test_autocast_is_around_model_and_loss_only(patched):
    text, _ = patched(Choice(technique="bf16_autocast"))

    assert text == SCRIPT.replace(
        "        output = model(x)\n        loss = criterion(output, y)\n",
        "        with torch.autocast(device.type, dtype=torch.bfloat16):\n"
        "            output = model(x)\n            loss = criterion(output, y)\n",
    )


def test_autocast_is_on_the_device_that_a_text_names_when_the_script_runs(patched):
    chosen = '"cuda" if torch.cuda.is_available() else "cpu"'

    text, _ = patched(
        Choice(technique="bf16_autocast"), text=SCRIPT.replace('torch.device("cuda")', chosen)
    )

    assert "with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):" in text


def test_the_optimizer_gets_an_argument_on_a_line_of_its_own(patched):
    text, _ = patched(Choice(technique="fused_optimizer"))

    assert "    lr=1e-3,\n    fused=True,\n)" in text


def test_lines_for_the_model_are_above_the_epochs_and_switches_after_the_imports(patched):
    text, left_out = patched(
        Choice(technique="torch_compile"),
        Choice(technique="channels_last"),
        Choice(technique="tf32"),
        Choice(technique="cudnn_autotune"),
    )

    assert left_out == ()
    lines = text.splitlines()
    assert 'torch.set_float32_matmul_precision("high")' in lines[2:4]
    assert "torch.backends.cudnn.benchmark = True" in lines[2:4]
    epochs = lines.index("for epoch in range(3):")
    assert lines[epochs - 2 : epochs] == [
        'model.compile(mode="default")',
        "model.to(memory_format=torch.channels_last)",
    ]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (
            "loader_workers",
            "loader = DataLoader(data, batch_size=8, shuffle=True)",
            "loader = make()",
        ),
        ("fused_optimizer", "torch.optim.AdamW(", "make("),
        ("bf16_autocast", "output = model(x)", "output = model(x) + other(x); other.train()"),
        (
            "torch_compile",
            "    for x, y in loader:",
            "    def step(model):\n     for x, y in loader:",
        ),
        ("scheduled_gc", "", ""),
    ],
)
def test_what_has_no_clear_place_is_left_out_and_named(patched, name, before, after):
    text = SCRIPT.replace(before, after) if before else SCRIPT

    assert patched(Choice(technique=name), text=text) == (text, (name,))


BLOCKS = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        parts = [torch.nn.{part}(8{size}) for _ in range(3)]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(p, torch.nn.Tanh()) for p in parts)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)  # one after the other
        return self.head(x)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
losses = []
for step in range(5):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def losses_of(text):
    known = {"__name__": "__main__"}
    exec(compile(text, "train.py", "exec"), known)
    return known["losses"]


def test_blocks_are_checkpointed_where_forward_calls_them_and_nothing_else_changes(patched):
    text = BLOCKS.format(part="Linear", size=", 8")

    new, left_out = patched(
        Choice(technique="activation_checkpointing"),
        Choice(technique="foreach_optimizer"),
        Choice(technique="cpu_threads", settings={"threads": 1}),
        text=text,
    )

    assert left_out == ()
    call = "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # one after"
    assert f"            x = {call} the other" in new
    assert "import torch.utils.checkpoint" in new
    assert "lr=1e-2, foreach=True)" in new
    assert "torch.set_num_threads(1)" in new
    assert losses_of(new) == pytest.approx(losses_of(text), rel=1e-6)


def test_blocks_that_count_their_batches_have_no_clear_place(patched):
    text = BLOCKS.format(part="BatchNorm1d", size="")
    name = "activation_checkpointing"

    assert patched(Choice(technique=name), text=text) == (text, (name,))
    selective = Choice(technique=name, settings={"mode": "selective"})
    plain = BLOCKS.format(part="Linear", size=", 8")
    assert patched(selective, text=plain) == (plain, (name,))


def test_what_is_no_python_is_refused(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n(")

    with pytest.raises(UserError, match="cannot be patched"):
        patch(Recipe(choices=(Choice(technique="tf32"),)), tmp_path / "train.py")


TRAINED = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(2):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
"""


@pytest.mark.slow
def test_a_patched_script_trains_to_the_losses_of_its_recipe(tmp_path):
    recipe = Recipe(
        choices=(
            Choice(technique="loader_workers", settings={"num_workers": 2, "prefetch_factor": 2}),
            Choice(technique="fused_optimizer"),
            Choice(technique="bf16_autocast"),
            Choice(technique="cpu_threads", settings={"threads": 1}),
        )
    )
    (tmp_path / "train.py").write_text(TRAINED)
    write_recipe(recipe, tmp_path / "recipe.toml")
    flatout = [sys.executable, "-m", "flatout"]
    under_recipe = losses_said(tmp_path, *flatout, "run", "--with", "recipe.toml", "train.py")

    done = ran([*flatout, "patch", "recipe.toml", "train.py"], cwd=tmp_path)
    subprocess.run(["git", "apply"], input=done.stdout, cwd=tmp_path, text=True, check=True)

    assert done.stderr == ""
    patched = losses_said(tmp_path, sys.executable, "train.py")
    assert len(patched) == 16
    assert patched == pytest.approx(under_recipe, rel=1e-2)
    assert (tmp_path / "train.py").read_text() != TRAINED


def losses_said(folder, *command):
    done = ran(command, cwd=folder, check=True)
    return [float(x.split()[1]) for x in done.stdout.splitlines() if x.startswith("loss")]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("encoding", "head"),
    [
        ("utf-8", ""),
        ("utf-8-sig", ""),
        ("latin-1", "# -*- coding: latin-1 -*-\n# Größe\n"),
        ("utf-8", "# a page\f ends here, a line\u2028 does not\n"),
    ],
)
def test_the_diff_fits_the_bytes_of_the_file(tmp_path, encoding, head, end):
    path = tmp_path / "my train.py"
    before = (head + SCRIPT).replace("\n", end).encode(encoding)
    path.write_bytes(before)
    write_recipe(Recipe(choices=(Choice(technique="tf32"),)), tmp_path / "recipe.toml")
    flatout = [sys.executable, "-m", "flatout", "patch", "recipe.toml", path.name]

    made = subprocess.run(flatout, cwd=tmp_path, capture_output=True, check=True).stdout

    subprocess.run(["git", "apply", "--check"], input=made, cwd=tmp_path, check=True)
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=made, cwd=tmp_path, check=True)
    line = f'torch.set_float32_matmul_precision("high"){end}'.encode()
    assert path.read_bytes().replace(line, b"") == before
    assert line in path.read_bytes()


def test_the_diff_of_a_link_is_that_of_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "real/train.py").write_text(SCRIPT)
    (tmp_path / "link.py").symlink_to("real/train.py")

    made = patch(Recipe(choices=(Choice(technique="tf32"),)), Path("link.py"))

    subprocess.run(["git", "apply"], input=made.diff, text=True, check=True)
    assert "set_float32" in (tmp_path / "real/train.py").read_text()


@pytest.mark.parametrize(
    "imports",
    [
        'import os\nos.environ["A"] = "1"\nimport torch',
        "import os\nimport torch\nimport math",
        "import torch.nn.functional as F\nimport torch",
    ],
)
def test_a_switch_is_where_torch_is_known_and_before_the_training(patched, imports):
    text = SCRIPT.replace("import torch\n", f"{imports}\n", 1) + "import math\nprint(math.pi)\n"

    new, left_out = patched(Choice(technique="tf32"), text=text)

    lines = new.splitlines()
    switch = lines.index('torch.set_float32_matmul_precision("high")')
    assert left_out == ()
    assert lines.index("import torch") < switch < lines.index("model = Net().to(device)")


@pytest.mark.parametrize("name", ["tf32", "cudnn_autotune", "bf16_autocast", "channels_last"])
@pytest.mark.parametrize(
    "imports", ["import torch.optim as optim", "def f():\n    import torch", "import torch as th"]
)
def test_nothing_is_written_that_needs_a_name_of_torch_that_is_not_there(patched, name, imports):
    text = SCRIPT.replace("import torch\n", f"{imports}\n", 1)

    assert patched(Choice(technique=name), text=text) == (text, (name,))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("cudnn_autotune", "torch.backends.cudnn.benchmark = False"),
        ("cudnn_autotune", "import torch.backends.cudnn as cudnn; cudnn.benchmark = False"),
        ("tf32", 'torch.set_float32_matmul_precision("highest")'),
    ],
)
def test_a_switch_that_the_script_sets_back_has_no_clear_place(patched, name, line):
    text = f"{SCRIPT}\ndef seed_all():\n    {line}\n"

    assert patched(Choice(technique=name), text=text) == (text, (name,))


@pytest.mark.parametrize(
    "made",
    [
        "torch.nn.Sequential(Net())",
        "torch.nn.Sequential(Net()).to(device)",
        "Row(Net())\n\nclass Row(torch.nn.Sequential):\n    pass\n",
    ],
)
def test_a_model_with_torchs_own_forward_is_not_compiled_by_a_call_that_does_nothing(patched, made):
    text = SCRIPT.replace("Net().to(device)", made)

    assert patched(Choice(technique="torch_compile"), text=text) == (text, ("torch_compile",))
    assert "model.to(memory_format" in patched(Choice(technique="channels_last"), text=text)[0]


LOSS = "        loss = criterion(output, y)\n"


@pytest.mark.parametrize(
    "loss",
    [
        "        loss: torch.Tensor = criterion(output, y)\n",
        "        if smooth:\n            loss = soft(output, y)\n        else:\n"
        "            loss = criterion(output, y)\n",
        "        losses = [criterion(output, y)]\n        loss = sum(losses)\n",
    ],
)
def test_a_loss_of_any_form_is_under_autocast(patched, loss):
    text, _ = patched(Choice(technique="bf16_autocast"), text=SCRIPT.replace(LOSS, loss))

    inside = "".join(f"    {line}\n" for line in loss.splitlines())
    head = "        with torch.autocast(device.type, dtype=torch.bfloat16):\n"
    assert f"{head}            output = model(x)\n{inside}        optimizer.zero_grad()\n" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("loader = ", "criterion = torch.nn.BCELoss()\nloader = "),
        ("criterion(output, y)", "torch.nn.functional.binary_cross_entropy(output, y)"),
        ("criterion(output, y)", "criterion(output @ output.T, y)"),
        ("criterion(output, y)", "criterion(torch.einsum('ik,jk->ij', output, output), y)"),
        (
            "optimizer.step()\n",
            "optimizer.step()\n        scores.append(output.detach().cpu().numpy())\n",
        ),
        (
            "optimizer.step()\n",
            "optimizer.step()\n        p = torch.sigmoid(output)\n        show(p.cpu().numpy())\n",
        ),
    ],
)
def test_what_fails_or_is_another_loss_under_autocast_has_no_place_there(patched, before, after):
    text = SCRIPT.replace(before, after)

    assert patched(Choice(technique="bf16_autocast"), text=text) == (text, ("bf16_autocast",))


@pytest.mark.parametrize("read", ["output.argmax(1).cpu().numpy()", "y.cpu().numpy()"])
def test_what_numpy_can_read_may_be_read(patched, read):
    text = f"{SCRIPT}        seen.append({read})\n"

    assert patched(Choice(technique="bf16_autocast"), text=text)[1] == ()


@pytest.mark.parametrize(
    "train",
    [
        "for epoch in range(3):\n    loss = model(x).mean()\n",
        "def step():\n    loss = model(x).mean()\n",
    ],
)
def test_autocast_is_on_the_device_of_the_model_where_no_copy_shows_it(patched, train):
    text = f"""\
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net().to(device)
x = data.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{train}    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for _ in range(9):
    step()
"""

    new, _ = patched(Choice(technique="bf16_autocast"), text=text)

    assert "with torch.autocast(next(model.parameters()).device.type, dtype" in new


BRANCHES = """\
if args.first:
    {one}
else:
    {other}
"""


def test_what_the_branches_make_is_changed_in_each(patched):
    adam = "optimizer = torch.optim.Adam(model.parameters())"
    sgd = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    drawn = "loader = DataLoader(data, batch_size=8, shuffle=True)"
    given = "loader = DataLoader(data, sampler=sampler)"
    text = SCRIPT.replace(drawn, BRANCHES.format(one=given, other=drawn))
    start, end = text.index("optimizer = "), text.index("for epoch")
    text = text[:start] + BRANCHES.format(one=sgd, other=adam) + text[end:]
    workers = {"num_workers": 3, "prefetch_factor": 4}

    new, left_out = patched(
        Choice(technique="loader_workers", settings=workers),
        Choice(technique="fused_optimizer"),
        text=text,
    )

    assert left_out == ()
    assert new.count("num_workers=3") == 2
    assert new.count("fused=True") == 2


EVALUATED = """\
from data import train_loader

test_loader = DataLoader(held_out, batch_size=8)


def evaluate():
    with torch.no_grad():
        return [model(x) for x in test_loader] + [x for x in test_loader]


def score():
    for x in test_loader:
        print(model(x))
"""


def test_a_lone_loader_that_only_evaluates_is_left_alone(patched):
    loader = "loader = DataLoader(data, batch_size=8, shuffle=True)  # the photographs\n"
    text = SCRIPT.replace(loader, EVALUATED).replace("in loader:", "in train_loader:")
    choice = Choice(technique="loader_workers", settings={"num_workers": 3, "prefetch_factor": 2})

    assert patched(choice, text=text) == (text, ("loader_workers",))


def test_of_two_loaders_the_one_whose_batches_a_function_trains_on_is_changed(patched):
    text = """\
import torch
from torch.utils.data import DataLoader

loader = DataLoader(data, batch_size=8, shuffle=True)
held_out = DataLoader(others, batch_size=8)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())


def step(x, y):
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for x, y in loader:
    step(x, y)
for x, y in held_out:
    print(model(x))
"""
    choice = Choice(technique="loader_workers", settings={"num_workers": 3, "prefetch_factor": 2})

    new, left_out = patched(choice, text=text)

    assert left_out == ()
    assert "shuffle=True, num_workers=3, prefetch_factor=2)" in new
    assert new.count("num_workers") == 1


@pytest.mark.parametrize("move", ["x.cuda(0, True)", "x.to(device, **how)"])
def test_a_copy_that_may_have_the_argument_already_is_left_as_it_is(patched, move):
    text, left_out = patched(
        Choice(technique="pinned_memory"), text=SCRIPT.replace("x.to(device)", move)
    )

    assert left_out == ()
    assert f"x, y = {move}, y.to(device, non_blocking=True)" in text


def test_a_model_of_each_fold_is_changed_within_the_fold(patched):
    start = SCRIPT.index("model = ")
    folds = "for fold in range(5):\n" + "".join(
        f"    {line}\n" for line in SCRIPT[start:].splitlines()
    )
    choices = [Choice(technique="torch_compile"), Choice(technique="channels_last")]

    new, left_out = patched(*choices, text=SCRIPT[:start] + folds)

    assert left_out == ()
    assert '    model.compile(mode="default")\n    model.to(memory_format' in new
    assert "torch.channels_last)\n    for epoch in range(3):" in new


def test_each_model_of_a_list_is_changed_in_its_round(patched):
    start = SCRIPT.index("model = ")
    rest = SCRIPT[start:].replace("model = Net().to(device)\n", "")
    rounds = "for model in models:\n" + "".join(f"    {line}\n" for line in rest.splitlines())

    new, _ = patched(Choice(technique="channels_last"), text=SCRIPT[:start] + rounds)

    assert "    model.to(memory_format=torch.channels_last)\n    for epoch" in new


def test_torch_refuses_fused_and_foreach_together_so_one_is_taken_back(patched):
    text = SCRIPT.replace("lr=1e-3,", "lr=1e-3,\n    foreach=True,")

    new, left_out = patched(Choice(technique="fused_optimizer"), text=text)

    assert left_out == ()
    assert "    foreach=None,\n    fused=True,\n" in new


def test_a_loader_without_workers_is_not_told_to_keep_them(patched):
    text = SCRIPT.replace("shuffle=True)", "num_workers=workers)")
    text = text.replace("model = Net", "other = DataLoader(more, batch_size=8)\nmodel = Net")
    text = text.replace("x, y in loader", "(x, y), z in zip(loader, other)")

    new, left_out = patched(Choice(technique="persistent_workers"), text=text)

    assert left_out == ()
    assert "num_workers=workers, persistent_workers=True)" in new
    assert "other = DataLoader(more, batch_size=8)\n" in new
