from flatout.records.finding import Check


def test_a_check_is_plain_json():
    check = Check(status="warn", what="swap in use", why="stalls", next="free memory")

    assert check.to_json() == {
        "status": "warn",
        "what": "swap in use",
        "why": "stalls",
        "next": "free memory",
    }
