"""Which restarts count, and how long they are delayed, without processes."""

import json
import os
import re
import subprocess
import sys

import pytest

import replicax as rx
from replicax._launch.newest_checkpoint import newest_checkpoint
from replicax._launch.replacements import Replacements
from replicax._launch.restarts import Restarts
from replicax._src.checkpoint.writing import new_part
from replicax._src.cluster.processes import Ending
from replicax._src.cluster.spec import Task

A, B = Task("worker", 0), Task("worker", 1)
PREEMPTED, KILLED, FAILED = Ending(42, None, 0.0), Ending(None, 9, 0.0), Ending(1, None, 0.0)
SHORT_S, LONG_S = 29.0, 31.0


def save(folder, number, name="ckpt"):
    """Leaves what the launcher reads of a checkpoint."""
    path = folder / f"{name}-{number}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"crc32": 0, "contents": {"number": number}}))
    return path


@pytest.mark.parametrize("run_s", [SHORT_S, LONG_S])
@pytest.mark.parametrize("ending", [KILLED, FAILED])
def test_failures_count(ending, run_s):
    restarts = Restarts(2, None)
    assert restarts.after(ending, run_s) == "Starting all tasks again: restart 1 of 2."
    assert restarts.after(ending, run_s) == "Starting all tasks again: restart 2 of 2. It waits 2 s."
    assert restarts.after(ending, run_s) is None


def test_task_that_worked_saved_and_left_is_no_failure():
    restarts = Restarts(1, None)
    for _ in range(9):
        assert "is not counted" in restarts.after(PREEMPTED, LONG_S)
        assert restarts.wait_s == 0
    assert "restart 1 of 1" in restarts.after(FAILED, LONG_S)
    assert restarts.after(FAILED, LONG_S) is None


def test_preemption_after_a_short_run_without_a_new_checkpoint_counts(tmp_path):
    for folder in (None, tmp_path):
        restarts = Restarts(2, folder)
        assert restarts.after(PREEMPTED, SHORT_S) == "Starting all tasks again: restart 1 of 2."
        assert restarts.wait_s == 1
        assert "restart 2 of 2" in restarts.after(PREEMPTED, SHORT_S)
        assert restarts.after(PREEMPTED, SHORT_S) is None
    restarts = Restarts(0, tmp_path)  # no restarts after failures
    assert [restarts.after(PREEMPTED, SHORT_S) is None for _ in range(4)] == [False] * 3 + [True]
    restarts = Restarts(1, tmp_path)
    for number in range(5):
        save(tmp_path, number)
        assert "is not counted" in restarts.after(PREEMPTED, SHORT_S)
        assert restarts.wait_s == 0


def test_no_restarts_unless_requested(tmp_path):
    assert Restarts(0, None).after(PREEMPTED, LONG_S) is None  # 42 may mean something else in that script
    assert Restarts(0, tmp_path).after(PREEMPTED, LONG_S) is not None
    restarts = Restarts(0, tmp_path)
    save(tmp_path, 1)
    assert restarts.after(KILLED, LONG_S) is None


def test_only_restarts_without_a_new_checkpoint_count(tmp_path):
    folder = tmp_path / "made later"
    restarts = Restarts(1, folder)
    for number in range(5):
        save(folder, number)
        assert "there is a new checkpoint" in restarts.after(KILLED, SHORT_S)
        assert restarts.wait_s == 0
    assert "restart 1 of 1" in restarts.after(KILLED, SHORT_S)
    save(folder, 6)
    assert "there is a new checkpoint" in restarts.after(KILLED, SHORT_S)
    assert restarts.after(KILLED, SHORT_S) is None


def leave_part(folder):
    part = new_part(str(folder / "ckpt-9"))
    os.rename(save(folder, 9, "x") / "manifest.json", f"{part}/manifest.json")


def leave_damaged(folder):
    (save(folder, 9) / "manifest.json").write_text('{"contents": {"num')


@pytest.mark.parametrize(
    "leave",
    [
        lambda folder: (folder / "events.out.tfevents.1.vm").touch(),
        lambda folder: (folder / "core-9").touch(),
        lambda folder: (folder / "logs-9").mkdir(),
        lambda folder: (folder / "9.orbax-checkpoint-tmp").mkdir(),
        lambda folder: (folder / ".compiled").mkdir(),
        lambda folder: save(folder, 2),  # older than the one from which the run began
        leave_part,
        leave_damaged,
        lambda folder: (save(folder, 9) / "manifest.json").write_text("[" * 100_000),
        lambda folder: (save(folder, 9) / "manifest.json").write_text('{"contents": {"number": "9"}}'),
        lambda folder: (save(folder, 9) / "manifest.json").write_bytes(b"\xff\x00"),
    ],
    ids=["events", "core", "logs", "orbax", "compiled", "older", "part", "damaged", "deep", "text", "bytes"],
)
def test_other_names_in_the_directory_are_no_progress(tmp_path, leave):
    save(tmp_path, 5)
    restarts = Restarts(1, tmp_path)
    leave(tmp_path)
    assert newest_checkpoint(tmp_path) == 5
    assert "restart 1 of 1" in restarts.after(FAILED, SHORT_S)


def test_restarts_without_progress_are_delayed_more_and_more(tmp_path):
    restarts = Restarts(100, tmp_path)
    waits = []
    for _ in range(9):
        restarts.after(KILLED, SHORT_S)
        waits.append(restarts.wait_s)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    save(tmp_path, 1)
    restarts.after(KILLED, SHORT_S)
    assert restarts.wait_s == 0
    for _ in range(3):  # and it is preempted before it has done anything
        restarts.after(PREEMPTED, LONG_S)
    assert restarts.wait_s == 4


def test_restarts_of_single_tasks_count_with_those_of_all():
    restarts = Restarts(3, None)
    replacements = Replacements(restarts)
    assert replacements.after(A, LONG_S, 0.0, has_entered=True) == "restart 1 of 3."
    assert replacements.after(B, LONG_S, 0.0, has_entered=True) == "restart 2 of 3."
    assert restarts.after_death(is_in_vain=True) == "restart 3 of 3."
    assert replacements.after(A, LONG_S, 0.0, has_entered=True) is None
    assert Replacements(Restarts(0, None)).after(A, LONG_S, 0.0, has_entered=True) is None


def test_restart_after_a_new_checkpoint_is_not_counted_if_the_task_has_worked(tmp_path):
    replacements = Replacements(Restarts(2, tmp_path))
    for number in range(5):
        save(tmp_path, number)
        assert "is not counted" in replacements.after(A, LONG_S, 0.0, has_entered=True)
    assert replacements.after(A, LONG_S, 0.0, has_entered=True) == "restart 1 of 2."
    save(tmp_path, 9)  # by the others
    assert replacements.after(A, SHORT_S, 0.0, has_entered=False).startswith("restart 2 of 2.")


def test_each_task_starts_at_once_and_later_if_its_processes_end_soon():
    replacements, started = Replacements(Restarts(100, None)), []
    waits = []
    for _ in range(8):
        note = replacements.after(A, SHORT_S, 10.0, has_entered=False)
        waits.append(float(re.search(r"It waits (\S+) s", note)[1]) if "waits" in note else 0)
        replacements.start_due(10.0 + waits[-1] - 0.01, started.append)
        assert not started
        assert replacements.is_due(A)
        replacements.start_due(10.0 + waits[-1], started.append)
        assert started == [A]
        assert not replacements.is_due(A)
        started.clear()
    assert waits == [0, 1, 2, 4, 8, 16, 30, 30]
    assert "waits" not in replacements.after(B, SHORT_S, 10.0, has_entered=True)
    assert "waits" not in replacements.after(A, LONG_S, 10.0, has_entered=True)
    assert "waits" not in replacements.after(A, SHORT_S, 10.0, has_entered=True)
    assert replacements.after(A, LONG_S, 10.0, has_entered=False).endswith("It waits 1 s.")


def test_number_of_real_checkpoints_is_found_without_jax(tmp_path):
    manager = rx.CheckpointManager(rx.Checkpoint(x=rx.Variable(1)), tmp_path, max_to_keep=2)
    for number in range(1, 4):
        manager.save()
        manager.wait()
        assert newest_checkpoint(tmp_path) == number
    manager.close()
    program = """
import sys
from replicax._launch.newest_checkpoint import newest_checkpoint
print(newest_checkpoint(sys.argv[1]), "jax" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == "3 False\n"
