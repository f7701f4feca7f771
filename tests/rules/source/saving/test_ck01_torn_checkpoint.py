import pytest

from tests.rules.source.scenario import codes_in, fixed
from tests.rules.source.training import READ

SAME_LOSSES = (READ, f'{READ}    torch.save(model.state_dict(), "last.pt")\n')
LOOP = """
import os, torch
PATH = "last.pt"
for epoch in range(3):
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
    {save}
"""


def script(path, save="torch.save(state, {path})"):
    return LOOP.format(save=save.format(path=path))


@pytest.mark.parametrize(
    "path", ["'last.pt'", "PATH", "os.path.join(args.out, 'a.pt')", "f'{out}/a.pt'"]
)
def test_a_file_that_is_overwritten_is_found(path):
    assert codes_in(script(path)) == {"CK01": [8]}


def test_the_fix_writes_another_file_and_renames_it():
    assert fixed(script("'last.pt'"), "CK01").endswith(
        "    torch.save(state, 'last.pt.part')\n    os.replace('last.pt.part', 'last.pt')\n"
    )


@pytest.mark.parametrize(
    "path",
    ["f'{epoch}.pt'", "os.path.join(out, str(epoch))", "path_of(epoch)", "stream", "args.path"],
)
def test_new_and_unknown_files_are_left_alone(path):
    assert codes_in(script(path)) == {}


def test_files_that_are_renamed_and_those_after_the_loop_are_left_alone():
    assert codes_in(script(0, "torch.save(s, 'a.tmp'); os.replace('a.tmp', 'a.pt')")) == {}
    assert codes_in(script(0, "pass") + "torch.save(s, 'last.pt')\n") == {}


def test_an_import_in_another_function_does_not_bring_os_here():
    text = script("'last.pt'").replace("import os, torch", "import torch\ndef f():\n    import os")

    assert "import torch\nimport os\ndef f" in fixed(text, "CK01")
