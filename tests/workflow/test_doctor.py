from flatout.hardware.machine import read_machine
from flatout.workflow.doctor import doctor


def test_the_doctor_looks_at_this_host_and_leaves_nothing_behind(tmp_path):
    checks = doctor(read_machine(torch=False), folder=tmp_path)

    assert {check.status for check in checks} <= {"ok", "warn", "bad"}
    assert any("cores" in check.what for check in checks)
    assert any(str(tmp_path) in check.what for check in checks)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_well_says_why_and_what_to_do():
    checks = doctor(read_machine(torch=False))

    assert [c.what for c in checks if c.status != "ok" and not (c.why and c.next)] == []


def test_what_is_well_asks_for_nothing():
    checks = doctor(read_machine(torch=False))

    assert [c.what for c in checks if c.status == "ok" and c.next] == []
