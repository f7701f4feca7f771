import pytest

from tests.rules.source.scenario import codes_in

HEAD = "import numpy as np\nimport torch\n"


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.from_numpy(np.random.randn(3))",
        "x = torch.tensor(np.zeros((3, 4)))",
        "a = np.linspace(0, 1, 9)\nx = torch.as_tensor(a)",
    ],
)
def test_double_precision_of_numpy_is_found(line):
    assert list(codes_in(f"{HEAD}{line}\n")) == ["LP11"]


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.from_numpy(np.random.randn(3)).float()",
        "x = torch.tensor(np.zeros(3), dtype=torch.float32)",
        "x = torch.tensor(np.zeros(3, dtype=np.float32))",
        "x = torch.from_numpy(np.random.randint(9))",
        "x = torch.from_numpy(np.ones(3))\nx = x.to(torch.float32)",
        "x = torch.from_numpy(np.ones(3).astype('float32'))",
    ],
)
def test_what_is_cast_is_left_alone(line):
    assert codes_in(f"{HEAD}{line}\n") == {}
