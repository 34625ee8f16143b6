"""Which restarts count, and how long they are delayed, without processes."""

import pytest

from replicax._src.checkpoint.writing import new_part
from replicax._src.cli.restarts import Restarts
from replicax._src.cluster.processes import Ending

PREEMPTED, KILLED, FAILED = Ending(42, None, 0.0), Ending(None, 9, 0.0), Ending(1, None, 0.0)


@pytest.mark.parametrize("ending", [KILLED, FAILED])
def test_failures_count(ending):
    restarts = Restarts(2, None)
    assert restarts.after(ending) == "Starting all tasks again: restart 1 of 2."
    assert restarts.after(ending) == "Starting all tasks again: restart 2 of 2."
    assert restarts.after(ending) is None


def test_task_that_saved_and_left_is_no_failure():
    restarts = Restarts(1, None)
    for _ in range(9):
        assert "is not counted" in restarts.after(PREEMPTED)
        assert restarts.wait_s == 0
    assert "restart 1 of 1" in restarts.after(FAILED)
    assert restarts.after(FAILED) is None


def test_no_restarts_unless_requested(tmp_path):
    assert Restarts(0, None).after(PREEMPTED) is None  # 42 may mean something else in that script
    assert Restarts(0, tmp_path).after(PREEMPTED) is not None
    restarts = Restarts(0, tmp_path)
    (tmp_path / "ckpt-1").mkdir()
    assert restarts.after(KILLED) is None


def test_only_restarts_without_a_new_checkpoint_count(tmp_path):
    folder = tmp_path / "made later"
    restarts = Restarts(1, folder)
    for number in range(5):
        (folder / f"ckpt-{number}").mkdir(parents=True)
        assert "there is a new checkpoint" in restarts.after(KILLED)
        assert restarts.wait_s == 0
    new_part(str(folder / "ckpt-9"))  # one that was being written
    (folder / "9.orbax-checkpoint-tmp").mkdir()
    (folder / ".compiled").mkdir()
    (folder / "ckpt-0").rmdir()
    assert "restart 1 of 1" in restarts.after(KILLED)
    (folder / "ckpt-6").mkdir()
    assert "there is a new checkpoint" in restarts.after(KILLED)
    assert restarts.after(KILLED) is None


def test_restarts_without_progress_are_delayed_more_and_more(tmp_path):
    restarts = Restarts(100, tmp_path)
    waits = []
    for _ in range(9):
        restarts.after(KILLED)
        waits.append(restarts.wait_s)
    assert waits == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    (tmp_path / "ckpt-1").mkdir()
    restarts.after(KILLED)
    assert restarts.wait_s == 0
    for _ in range(3):  # and it is preempted before it has done anything
        restarts.after(PREEMPTED)
    assert restarts.wait_s == 2
