"""Several checkpoints in one directory: which are kept, how incomplete ones are treated, and failures to write."""

import errno
import gc
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.checkpoint import writing
from replicax._src.checkpoint.contents import Contents
from replicax._src.checkpoint.directory import records_in
from replicax._src.checkpoint.retention import CheckpointRecord, Retention
from replicax._src.checkpoint.saved import SavedCheckpoint
from replicax.checkpoint import (
    CheckpointMismatchError,
    CheckpointWriteError,
    CorruptCheckpointError,
    UnmatchedCheckpointError,
    latest_checkpoint,
    list_variables,
    load_variable,
)
from replicax.errors import InvalidArgumentError


def names(paths):
    return [Path(path).name for path in paths]


@pytest.fixture
def checkpoint():
    return rx.Checkpoint(v=rx.Variable(0.0))


# --- which stay ----------------------------------------------------------------------------------------------


def record(order, metric=None, time_s=0.0):
    metrics = None if metric is None else {"m": metric}
    return CheckpointRecord(f"ckpt-{order}", Contents((), {}, {}, "", (), order, time_s or order, metrics))


@hypothesis.given(
    metrics=st.lists(st.none() | st.floats(width=16), max_size=12),
    max_to_keep=st.integers(1, 4),
    keep_best=st.integers(0, 4),
    mode=st.sampled_from(["max", "min"]),
)
def test_newest_and_best_are_kept_by_either_rule(metrics, max_to_keep, keep_best, mode):
    rule = Retention(max_to_keep, keep_best, lambda m: m["m"], mode)
    records: list[CheckpointRecord] = []
    seen = []
    for order, metric in enumerate(metrics):
        seen.append(record(order, metric))
        records = [*records, seen[-1]]
        gone = rule.to_remove(records)
        records = [r for r in records if r not in gone]
    kept = {r.path for r in records}
    assert {r.path for r in seen[-max_to_keep:]} <= kept
    numbers = [
        r.contents.metrics["m"]
        for r in seen
        if r.contents.metrics and not math.isnan(r.contents.metrics["m"])
    ]
    best = sorted(numbers, reverse=mode == "max")[:keep_best]
    kept_numbers = [r.contents.metrics["m"] for r in records if r.contents.metrics]
    for number in best:
        kept_numbers.remove(number)  # each is there, as often as it is among the best
    assert len(kept) <= max_to_keep + keep_best


def test_one_checkpoint_per_hour_is_kept():
    rule = Retention(1, every_n_hours=1)
    records = [record(order, time_s=1000.0 * order) for order in range(9)]
    assert [r.contents.number for r in records if r not in rule.to_remove(records)] == [0, 4, 8]


def test_newest_and_best_on_the_disk(checkpoint, tmp_path):
    with rx.CheckpointManager(
        checkpoint, tmp_path, max_to_keep=2, keep_best=1, best_fn=lambda metrics: metrics["accuracy"]
    ) as manager:
        for accuracy in (0.1, 0.9, 0.3, np.float32(0.2)):
            checkpoint.v.assign_add(1.0)
            path = manager.save(metrics={"accuracy": accuracy})
        manager.wait()
        assert names(manager.checkpoints) == ["ckpt-2", "ckpt-3", "ckpt-4"]
        assert names([manager.best_checkpoint, manager.latest_checkpoint, path]) == [
            "ckpt-2",
            "ckpt-4",
            "ckpt-4",
        ]
        assert latest_checkpoint(tmp_path) == path
        checkpoint.restore(manager.best_checkpoint)
        assert float(checkpoint.v) == 2.0
        assert names([manager.save()]) == ["ckpt-3"]
        manager.wait()
        assert names(manager.checkpoints) == ["ckpt-2", "ckpt-4", "ckpt-3"]  # by when they were saved
        assert manager.statistics()["num_saved"] == 5


def test_numbers_and_intervals(checkpoint, tmp_path):
    step = rx.Variable(0, trainable=False)
    manager = rx.CheckpointManager(
        checkpoint,
        tmp_path,
        checkpoint_name="model",
        step_counter=step,
        checkpoint_interval=10,
        max_to_keep=None,
    )
    saved = []
    for _ in range(25):
        saved.append(manager.save(checkpoint_number=step))
        step.assign_add(1)
    assert names(filter(None, saved)) == ["model-0", "model-10", "model-20"]
    assert names([manager.save(check_interval=False)]) == ["model-21"]
    manager.close()
    for number in (-1, "three", 2.7):
        message(InvalidArgumentError, lambda n=number: manager.save(n, check_interval=False), "at least 0")
    for wrong in (
        {"max_to_keep": 0},
        {"max_to_keep": 2.5},
        {"max_to_keep": "3"},
        {"keep_best": 1, "best_fn": "loss"},
        {"keep_checkpoint_every_n_hours": "1"},
        {"step_counter": step, "checkpoint_interval": 0},
        {"best_mode": "best"},
        {"keep_best": 1},
        {"checkpoint_interval": 3},
        {"checkpoint_name": "a/b"},
        {"checkpoint_name": "a\0b"},
        {"checkpoint_name": 3},
    ):
        with pytest.raises(InvalidArgumentError):
            rx.CheckpointManager(checkpoint, tmp_path, **wrong)
    for directory in (3, None, "", f"{tmp_path}/a\0b"):
        message(
            InvalidArgumentError,
            lambda d=directory: rx.CheckpointManager(checkpoint, d),
            "directory is a path",
        )
    no_step = rx.CheckpointManager(checkpoint, tmp_path, step_counter="step", checkpoint_interval=3)
    message(InvalidArgumentError, no_step.save, "step_counter must be a variable or a function", "'step'")


def test_metrics_are_checked_before_saving(checkpoint, tmp_path):
    """Checkpoints of an earlier program cannot be compared and count as the worst."""
    rx.CheckpointManager(checkpoint, tmp_path, asynchronous=False).save(metrics={"loss": 9.0})
    manager = rx.CheckpointManager(
        checkpoint, tmp_path, max_to_keep=1, keep_best=1, best_fn=lambda metrics: metrics["a"]
    )
    for wrong in ({"b": 1.0}, {"a": "high"}, 0.5):
        message(InvalidArgumentError, lambda wrong=wrong: manager.save(metrics=wrong), "metrics")
    for value in (0.5, 0.2, math.nan):
        manager.save(metrics={"a": value})
    assert names(manager.checkpoints) == ["ckpt-2", "ckpt-4"]
    assert names([manager.best_checkpoint]) == ["ckpt-2"]


def test_replacing_another_programs_checkpoint_warns(checkpoint, tmp_path, caplog):
    rx.CheckpointManager(checkpoint, tmp_path, asynchronous=False).save()
    others = rx.Checkpoint(v=rx.Variable(1.0))
    restored = rx.CheckpointManager(others, tmp_path, asynchronous=False)
    restored.restore_or_initialize()
    restored.save()
    restored.save(1)
    assert not caplog.text
    rx.CheckpointManager(rx.Checkpoint(v=others.v), tmp_path).save()
    assert "Replacing the checkpoint" in caplog.text


def test_a_directory_that_is_deleted_is_made_again(checkpoint, tmp_path, monkeypatch):
    manager = rx.CheckpointManager(checkpoint, tmp_path / "in it")
    shutil.rmtree(tmp_path / "in it")
    manager.save()
    assert names(manager.checkpoints) == ["ckpt-1"]
    write_pieces = writing.write_pieces
    monkeypatch.setattr(
        writing, "write_pieces", lambda *args: (write_pieces(*args), shutil.rmtree(tmp_path / "in it"))[0]
    )
    manager.save()
    message(CheckpointWriteError, manager.wait, "deleted in the meantime")
    (tmp_path / "in it").write_text("")
    message(CheckpointWriteError, manager.save, "is a file")


def test_initializer_is_called_without_a_checkpoint(checkpoint, tmp_path):
    called = []
    manager = rx.CheckpointManager(checkpoint, tmp_path, init_fn=lambda: called.append(1))
    assert manager.restore_or_initialize() is None
    path = manager.save()
    assert manager.restore_or_initialize() == path
    assert called == [1]
    message(
        InvalidArgumentError, lambda: rx.CheckpointManager(checkpoint, tmp_path, init_fn=3), "init_fn", "3"
    )


def test_program_may_grow_but_not_change(tmp_path, caplog):
    v, w = rx.Variable(1.0), rx.Variable(2.0)
    path = rx.CheckpointManager(rx.Checkpoint(v=v), tmp_path, asynchronous=False).save()
    v.assign(0.0)
    assert rx.CheckpointManager(rx.Checkpoint(v=v, w=w), tmp_path).restore_or_initialize() == path
    assert (float(v), float(w)) == (1.0, 2.0)
    assert "does not have w (Variable), so these keep" in caplog.text

    v.assign(0.0)
    manager = rx.CheckpointManager(rx.Checkpoint(renamed=v), tmp_path)
    differ = "renamed (Variable): not in the checkpoint\n  v: only in the checkpoint"
    assert "manager.restore()" not in message(CheckpointMismatchError, manager.restore_or_initialize, differ)
    message(CheckpointMismatchError, manager.restore, "has v; the program has renamed (Variable)")
    assert float(v) == 0.0


def test_program_that_has_changed_in_part_may_restore_the_rest(tmp_path, caplog):
    old = rx.Checkpoint(v=rx.Variable(1.0), old=rx.Variable(2.0))
    rx.CheckpointManager(old, tmp_path, asynchronous=False).save()
    v, new = rx.Variable(0.0), rx.Variable(0.0)
    manager = rx.CheckpointManager(rx.Checkpoint(v=v, new=new), tmp_path)
    message(
        CheckpointMismatchError, manager.restore_or_initialize, "only in the checkpoint", "manager.restore()"
    )
    assert float(v) == 0.0
    status = manager.restore()
    assert (float(v), float(new)) == (1.0, 0.0)
    assert "does not have new (Variable), so these keep" in caplog.text
    message(UnmatchedCheckpointError, status.assert_existing_objects_matched, "new")


def test_unbuilt_objects_count_as_part_of_the_program(tmp_path, caplog):
    """The optimizer is new, and the model is not built yet."""
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    wanted = model(np.ones((1, 3)))
    path = rx.CheckpointManager(rx.Checkpoint(model=model), tmp_path, asynchronous=False).save()
    later = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    tracked = rx.Checkpoint(model=later, optimizer=keras.optimizers.SGD())
    assert rx.CheckpointManager(tracked, tmp_path).restore_or_initialize() == path
    assert "optimizer/iterations" in caplog.text
    np.testing.assert_array_equal(later(np.ones((1, 3))), wanted)


def test_without_a_checkpoint_restoring_does_nothing(checkpoint, tmp_path):
    """As programs for TensorFlow begin: ``checkpoint.restore(manager.latest_checkpoint)``."""
    manager = rx.CheckpointManager(checkpoint, tmp_path)
    status = checkpoint.restore(manager.latest_checkpoint).expect_partial()
    assert status.path is None
    for asserts in (
        status.assert_consumed,
        status.assert_existing_objects_matched,
        status.assert_nontrivial_match,
    ):
        message(UnmatchedCheckpointError, asserts, "got the path None", "restore_or_initialize")


# --- while it is written ---------------------------------------------------------------------------------------


def test_save_takes_the_state_at_the_call(checkpoint, tmp_path, monkeypatch):
    """The next step changes the variable before the writer has started; the checkpoint is not found before it is
    complete."""
    may_write = threading.Event()
    write_pieces = writing.write_pieces
    monkeypatch.setattr(writing, "write_pieces", lambda *args: may_write.wait(60) and write_pieces(*args))
    manager = rx.CheckpointManager(checkpoint, tmp_path)
    checkpoint.v.assign(5.0)
    path = manager.save()
    checkpoint.v.assign(6.0)
    assert records_in(str(tmp_path)) == []
    with pytest.raises(TimeoutError):
        manager.wait(timeout_s=0.01)
    may_write.set()
    assert manager.latest_checkpoint == path, "the manager itself waits for what it writes"
    checkpoint.restore(path)
    assert float(checkpoint.v) == 5.0


@pytest.fixture
def slow_writer(monkeypatch):
    """Writing starts after the call that follows ``save``."""
    write_pieces = writing.write_pieces
    monkeypatch.setattr(writing, "write_pieces", lambda *args: (time.sleep(0.2), write_pieces(*args))[1])


FINDERS = {
    "latest_checkpoint": lambda manager, path: latest_checkpoint(manager.directory),
    "latest_checkpoint of a link": lambda manager, path: latest_checkpoint(linked(manager.directory)),
    "the manager": lambda manager, path: manager.latest_checkpoint,
    "another manager": lambda manager, path: rx.CheckpointManager(
        manager.checkpoint, manager.directory
    ).restore_or_initialize(),
    "restore": lambda manager, path: manager.checkpoint.restore(path).path,
    "restore_or_initialize": lambda manager, path: manager.restore_or_initialize(),
    "load_variable": lambda manager, path: load_variable(path, "v") == 2.0 and path,
    "list_variables": lambda manager, path: list_variables(manager.directory) == [("v", ())] and path,
}


def linked(directory):
    os.symlink(directory, f"{directory}-link")
    return f"{directory}-link"


@pytest.mark.usefixtures("slow_writer")
@pytest.mark.parametrize("found", FINDERS.values(), ids=FINDERS)
def test_save_in_progress_counts_as_saved(found, checkpoint, tmp_path):
    """With an older checkpoint in the directory, the older one was found, or none."""
    manager = rx.CheckpointManager(checkpoint, tmp_path / "training", max_to_keep=1)
    checkpoint.v.assign(1.0)
    manager.save()
    checkpoint.v.assign(2.0)
    path = manager.save()
    assert os.path.basename(found(manager, path)) == "ckpt-2"
    checkpoint.v.assign(0.0)
    checkpoint.restore(path)
    assert float(checkpoint.v) == 2.0


@pytest.mark.rest
@pytest.mark.usefixtures("slow_writer")
@pytest.mark.parametrize("found", FINDERS.values(), ids=FINDERS)
def test_failed_save_is_not_mistaken_for_the_previous_one(found, checkpoint, tmp_path, monkeypatch):
    manager = rx.CheckpointManager(checkpoint, tmp_path / "training")
    manager.save()
    manager.wait()
    monkeypatch.setattr(writing, "_write_manifest", lambda *args: 1 / 0)
    path = manager.save()
    message(CheckpointWriteError, lambda: found(manager, path), "ZeroDivisionError")
    assert names([latest_checkpoint(manager.directory)]) == ["ckpt-1"], "it is said once"
    manager.wait()


@pytest.mark.usefixtures("slow_writer")
def test_save_of_a_deleted_manager_is_waited_for(checkpoint, tmp_path):
    path = rx.CheckpointManager(checkpoint, tmp_path).save()
    gc.collect()
    assert latest_checkpoint(tmp_path) == path


def test_python_waits_for_the_last_save(tmp_path):
    program = (
        "import replicax as rx, sys\n"
        "m = rx.CheckpointManager(rx.Checkpoint(v=rx.Variable([1.0] * 1000)), sys.argv[1]); m.save()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert names([latest_checkpoint(tmp_path)]) == ["ckpt-1"]


KILLED = """
import os, sys
import replicax as rx
from replicax._src.checkpoint import writing
checkpoint = rx.Checkpoint(v=rx.Variable(7.0))
checkpoint.write(sys.argv[1])
if sys.argv[2] == "replaced":
    rename = os.rename
    def rename_and_die(old, new):
        rename(old, new)
        if "replaced" in new:
            os._exit(9)
    os.rename = rename_and_die
else:
    writing._write_manifest = lambda *args: os._exit(9)
checkpoint.v.assign(8.0)
checkpoint.write(sys.argv[1])
"""


@pytest.mark.rest
@pytest.mark.parametrize("when", ["part", "replaced"])
def test_process_killed_while_writing_leaves_the_old_checkpoint(when, tmp_path, checkpoint):
    path = tmp_path / "ckpt-1"
    run = subprocess.run([sys.executable, "-c", KILLED, str(path), when], timeout=120)
    assert run.returncode == 9
    assert [name for name in os.listdir(tmp_path) if when in name]
    manager = rx.CheckpointManager(checkpoint, tmp_path)
    assert os.listdir(tmp_path) == ["ckpt-1"]
    manager.restore_or_initialize()
    assert float(checkpoint.v) == 7.0


def test_files_of_another_living_writer_are_not_removed(tmp_path, checkpoint):
    with subprocess.Popen(["sleep", "60"]) as other:
        part = writing.beside(str(tmp_path / "ckpt-1"), "part").replace(f"-{os.getpid()}-", f"-{other.pid}-")
        os.mkdir(part)
        rx.CheckpointManager(checkpoint, tmp_path)
        assert os.path.exists(part)
        other.kill()
        other.wait(60)
        rx.CheckpointManager(checkpoint, tmp_path)
        assert not os.path.exists(part)


def test_files_of_another_host_are_removed_only_under_this_name(tmp_path, checkpoint):
    mine, others = (tmp_path / f"{name}-1.part-another-host-7-0123abcd" for name in ("ckpt", "other"))
    mine.mkdir(), others.mkdir()
    rx.CheckpointManager(checkpoint, tmp_path)
    assert os.listdir(tmp_path) == [others.name]


@pytest.mark.parametrize("what", ["directory", "file", "link"])
def test_only_a_checkpoint_is_replaced(what, tmp_path, checkpoint):
    path, kept = tmp_path / "training", tmp_path / "training" / "ckpt-1"
    if what == "directory":
        checkpoint.save(path / "ckpt")
    elif what == "file":
        path.write_text("notes")
    else:
        path.symlink_to(checkpoint.save(tmp_path / "ckpt"))
    for save in (lambda: checkpoint.write(path), lambda: checkpoint.snapshot(str(path))()):
        text = message(CheckpointWriteError, save, "is not a checkpoint")
        assert "Choose another path" in text
    assert {"directory": kept.is_dir(), "file": path.is_file(), "link": path.is_symlink()}[what]
    assert not list(tmp_path.glob("*.part-*"))


@pytest.mark.parametrize("tier", ["Checkpoint.save", "CheckpointManager", "local"])
def test_last_save_is_the_latest_even_if_the_clock_is_set_back(tier, tmp_path, monkeypatch):
    step = rx.Variable(0)
    checkpoint = rx.Checkpoint(step=step)
    how = {
        "step_counter": step,
        "checkpoint_interval": 9,
        "local_directory": tmp_path / "l",
        "local_every": 1,
    }
    manager = rx.CheckpointManager(checkpoint, tmp_path / "s", 2, **(how if tier == "local" else {}))
    now = time.time()
    for hours in (0, 1, -5, -4, 2):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + 3600 * hours)
        step.assign_add(1)
        checkpoint.save(tmp_path / "s" / "ckpt") if tier == "Checkpoint.save" else manager.save()
        manager.wait()
        assert tier == "local" or names([latest_checkpoint(tmp_path / "s")]) == [f"ckpt-{int(step)}"]
        expected = int(step)
        step.assign(0)
        manager.restore_or_initialize()
        assert int(step) == expected


@pytest.mark.parametrize("when", ["before it is opened", "before it is read"])
def test_reader_takes_the_newer_checkpoint_if_one_is_removed(when, tmp_path, monkeypatch, caplog):
    """An evaluator runs beside a training that keeps few checkpoints."""
    v = rx.Variable(1.0)
    training = rx.CheckpointManager(rx.Checkpoint(v=v), tmp_path, max_to_keep=1, best_fn=lambda m: m["m"])
    training.save(metrics={"m": math.nan})
    training.wait()
    read = rx.Variable(0.0)
    evaluator = rx.CheckpointManager(rx.Checkpoint(v=read), tmp_path)
    method = "_read_contents" if when == "before it is opened" else "array"
    original = getattr(SavedCheckpoint, method)

    def interrupted(saved, *args):
        monkeypatch.setattr(SavedCheckpoint, method, original)
        v.assign(2.0)
        training.save()
        training.wait()
        return original(saved, *args)

    records_in(str(tmp_path))  # what it has read of the manifest is kept
    monkeypatch.setattr(SavedCheckpoint, method, interrupted)
    with caplog.at_level(logging.WARNING):
        assert evaluator.restore_or_initialize() == str(tmp_path / "ckpt-2")
    assert float(read) == 2.0
    assert not caplog.messages


def test_unreadable_checkpoint_is_not_a_removed_one(tmp_path, monkeypatch):
    """The directory lists the checkpoint, and a stale handle, for example, says that it does not exist."""
    v = rx.Variable(1.0)
    training = rx.CheckpointManager(rx.Checkpoint(v=v), tmp_path)
    training.save()
    training.wait()

    def unreadable(saved, key):
        raise CorruptCheckpointError(f"{saved.path!r} cannot be read")

    monkeypatch.setattr(SavedCheckpoint, "array", unreadable)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    again = rx.CheckpointManager(rx.Checkpoint(v=v), tmp_path)
    message(
        CorruptCheckpointError, again.restore_or_initialize, "None of the 1 checkpoint(s)", "cannot be read"
    )


# --- where nothing can be written ------------------------------------------------------------------------------


def test_full_disk_raises_and_keeps_existing_checkpoints(checkpoint, tmp_path, monkeypatch):
    manager = rx.CheckpointManager(checkpoint, tmp_path)
    first = manager.save()
    manager.wait()
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    text = message(CheckpointWriteError, manager.save, "MiB", "earlier checkpoints are unchanged")
    assert "Errno 28" in text
    assert os.listdir(tmp_path) == ["ckpt-1"]
    monkeypatch.undo()
    manager.wait()
    manager.save()
    manager.close()
    assert names(manager.checkpoints)[0] == Path(first).name


def test_disk_fills_up_while_writing(tmp_path, capfd, caplog):
    """A limit on the size of files: the writes fail, with hundreds of lines that nobody needs."""
    checkpoint = rx.Checkpoint(v=rx.Variable(np.random.RandomState(0).rand(1 << 18).astype("float32")))
    manager = rx.CheckpointManager(checkpoint, tmp_path, asynchronous=False)
    manager.save()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            text = message(
                CheckpointWriteError, manager.save, "ckpt-2", "exceed the size limit of this process"
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(text) < 700
    assert "Traceback" not in caplog.text + capfd.readouterr().err
    assert os.listdir(tmp_path) == ["ckpt-1"]
    checkpoint.restore(manager.latest_checkpoint).assert_consumed()


def test_unwritable_directory_raises_at_once(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    message(
        CheckpointWriteError, lambda: rx.CheckpointManager(checkpoint, tmp_path / "file" / "in it"), "file"
    )

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    error = CheckpointWriteError
    message(error, lambda: rx.CheckpointManager(checkpoint, tmp_path), str(tmp_path), "read-only")


def test_other_writer_errors_are_raised_at_the_next_save(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_write_manifest", lambda *args: 1 / 0)
    manager = rx.CheckpointManager(checkpoint, tmp_path)
    manager.save()
    message(CheckpointWriteError, manager.save, "ZeroDivisionError")
    assert not os.listdir(tmp_path)


def test_save_numbers_survive_a_damaged_newest_checkpoint(checkpoint, tmp_path):
    manager = rx.CheckpointManager(checkpoint, tmp_path)
    for _ in range(2):
        manager.save()
    manager.wait()
    os.remove(tmp_path / "ckpt-2" / "manifest.json")
    again = rx.CheckpointManager(rx.Checkpoint(v=rx.Variable(0.0)), tmp_path)
    assert names([again.restore_or_initialize()]) == ["ckpt-1"]
    assert names([again.save()]) == ["ckpt-2"]
    again.wait()
    assert names(again.checkpoints) == ["ckpt-1", "ckpt-2"]
