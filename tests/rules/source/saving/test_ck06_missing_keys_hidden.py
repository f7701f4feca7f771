import pytest

from tests.rules.source.scenario import codes_in


def test_a_result_that_is_thrown_away_is_found():
    assert codes_in("import torch\nm.load_state_dict(s, strict=False)\n") == {"CK06": [2]}


@pytest.mark.parametrize(
    "line",
    [
        "m.load_state_dict(s)",
        "m.load_state_dict(s, strict=True)",
        "m.load_state_dict(s, strict=args.strict)",
        "print(m.load_state_dict(s, strict=False))",
        "found = m.load_state_dict(s, False)",
    ],
)
def test_strict_loading_and_results_that_are_looked_at_are_left_alone(line):
    assert codes_in(f"import torch\n{line}\n") == {}
