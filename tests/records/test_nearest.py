from flatout.records.errors import unknown


def test_a_slip_of_the_finger_is_answered_with_the_word_meant():
    assert unknown("flag", "--jsn", ["--json", "--out"]).endswith("did you mean '--json'?")


def test_a_word_like_no_other_is_answered_with_all():
    assert unknown("verb", "xyz", ["tune", "run"]).endswith("known are: run, tune")


def test_nothing_known_is_said_so():
    assert unknown("rule", "x", []).endswith("known are: none")
