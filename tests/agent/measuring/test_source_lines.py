import sys
from pathlib import Path

import torch

from flatout.agent.measuring.source_lines import SourceLines

HERE = Path(__file__).resolve()


def line_now(lines):
    return lines.here()


def test_a_line_is_named_relative_to_the_scripts_folder():
    lines = SourceLines(HERE.parent)

    named = line_now(lines)

    assert named.startswith("test_source_lines.py:")


def test_a_file_elsewhere_keeps_its_whole_path(tmp_path):
    named = line_now(SourceLines(tmp_path))

    assert named.startswith(f"{HERE}:")


def test_torchs_own_lines_are_passed_over():
    lines = SourceLines(HERE.parent)
    seen = []
    module = torch.nn.Identity()
    module.register_forward_hook(lambda *_: seen.append(lines.of(sys._getframe(1))))

    module(torch.ones(1))

    assert seen[0].startswith("test_source_lines.py:")
    assert not lines.is_torch(sys._getframe(0))
