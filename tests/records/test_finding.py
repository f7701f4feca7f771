from flatout.records.finding import Check
from flatout.records.json_records import to_plain


def test_a_check_is_plain_json():
    check = Check(status="warn", what="swap in use", why="stalls", next="free memory")

    assert to_plain(check) == {
        "status": "warn",
        "what": "swap in use",
        "why": "stalls",
        "next": "free memory",
    }
