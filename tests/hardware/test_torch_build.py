import torch

from flatout.hardware.accelerator import read_build, torch_build
from tests.support.programs import python

CUDA_BUILD = """
from typing import Optional
__all__ = ['__version__', 'cuda', 'hip']
__version__ = '2.11.0+cu128'
debug = False
cuda: Optional[str] = '12.8'
hip: Optional[str] = None
"""


def test_a_cuda_build_is_read_from_its_file(tmp_path):
    (tmp_path / "version.py").write_text(CUDA_BUILD)

    build = read_build(tmp_path)

    assert (build.version, build.cuda, build.hip) == ("2.11.0+cu128", "12.8", None)
    assert not build.is_cpu_only


def test_a_folder_without_a_version_file_is_no_build(tmp_path):
    assert read_build(tmp_path).version == ""


def test_the_file_tells_what_torch_itself_tells():
    build = torch_build()

    assert build.version == torch.__version__
    assert build.cuda == torch.version.cuda
    assert build.hip == torch.version.hip


def test_reading_the_build_imports_no_torch():
    code = (
        "import sys; from flatout.hardware.accelerator import torch_build; torch_build(); "
        "print('torch' in sys.modules)"
    )

    done = python(["-c", code], check=True)

    assert done.stdout.strip() == "False"
