import json

from flatout.seams.supervisor import ENDED_GRACE_S, GRACE_S, _Results


def write(folder, number, why):
    (folder / f"result-{number}.json").write_text(json.dumps({"why": why}))


def test_without_a_result_nothing_is_old(tmp_path):
    assert not _Results(tmp_path).are_old(1e9)


def test_trainer_that_was_stopped_leaves_its_launcher_little_time(tmp_path):
    write(tmp_path, 1, "done")
    results = _Results(tmp_path)

    assert not results.are_old(100.0)
    assert results.are_old(100.1 + GRACE_S)


def test_trainer_that_ended_by_itself_may_have_failed_and_its_launcher_tells_later(tmp_path):
    write(tmp_path, 1, "script_ended")
    results = _Results(tmp_path)

    assert not results.are_old(100.0)
    assert not results.are_old(100.1 + GRACE_S)
    assert results.are_old(100.1 + ENDED_GRACE_S)


def test_stopped_trainer_counts_more_than_one_that_ended(tmp_path):
    write(tmp_path, 1, "script_ended")
    results = _Results(tmp_path)
    results.are_old(100.0)

    write(tmp_path, 2, "done")
    results.are_old(101.0)

    assert results.are_old(101.1 + GRACE_S)
