import subprocess
import sys

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
