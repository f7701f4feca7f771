from flatout.records.messages import words
from tests.workflow.test_tune import Compiling, run


def test_a_start_up_beside_the_cache_of_an_earlier_tuning_is_not_called_that_of_a_first_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    first, second = (
        run(Compiling({"bf16_autocast": 0.5}), tmp_path / name, only=("bf16_autocast",))
        for name in ("first", "second")
    )

    warm = words("tune_note.warm")
    assert warm not in first.notes
    assert warm in second.notes
