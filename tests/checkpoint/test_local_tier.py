"""Two tiers of checkpoints in one process: frequent ones on a local disk, and others in the shared directory."""

import errno
import logging
import os
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.checkpoint import writing
from replicax.checkpoint import CheckpointWriteError
from replicax.errors import InvalidArgumentError


class Training:
    """A counter of steps and an array that tells the step, saved after each step into two directories."""

    def __init__(self, tmp_path, **options):
        self.step = rx.Variable(0)
        self.checkpoint = rx.Checkpoint(step=self.step, state={"w": jnp.zeros(3)})
        self.shared, self.local = tmp_path / "shared", tmp_path / "local"
        how = {"local_directory": self.local, "local_every": 2, "checkpoint_interval": 6} | options
        self.manager = rx.CheckpointManager(self.checkpoint, self.shared, step_counter=self.step, **how)

    def run(self, num_steps, **how):
        """Returns the path of the save after each step, relative to its tier: "shared/ckpt-1"."""
        paths = []
        for _ in range(num_steps):
            self.step.assign_add(1)
            number = int(self.step)
            self.checkpoint.state = {"w": jnp.full(3, float(number))}
            path = self.manager.save(number, **how)
            self.manager.wait()
            paths.append(path and self.named(path))
        return paths

    def named(self, path):
        tier = "shared" if os.path.dirname(path) == str(self.shared) else "local"
        return f"{tier}/{os.path.basename(path)}"

    def kept(self):
        return sorted(path.name for path in self.local.glob("*/0/*"))


def restored(tmp_path, **options):
    """What a new program restores."""
    training = Training(tmp_path, **options)
    path = training.manager.restore_or_initialize()
    value = int(training.step)
    assert np.array_equal(training.checkpoint.state["w"], np.full(3, float(value)))
    return training, path and training.named(path)


def test_saves_go_to_the_shared_directory_or_to_the_local_one(tmp_path):
    training = Training(tmp_path)
    paths = training.run(9)
    assert paths[:7] == ["shared/ckpt-1", None, "local/ckpt-3", None, "local/ckpt-5", None, "shared/ckpt-7"]
    assert paths[7:] == [None, "local/ckpt-9"]
    assert training.kept() == ["ckpt-5", "ckpt-9"]
    assert sorted(os.listdir(training.shared)) == [".local-checkpoints", "ckpt-1", "ckpt-7"]
    assert [training.named(path) for path in training.manager.checkpoints] == [
        "shared/ckpt-1",
        "shared/ckpt-7",
    ]
    assert training.manager.statistics()["num_saved"] == 2


@pytest.mark.parametrize(
    ("num_steps", "expected"), [(5, "local/ckpt-5"), (7, "shared/ckpt-7"), (8, "shared/ckpt-7")]
)
def test_newest_of_both_tiers_is_restored(tmp_path, num_steps, expected):
    Training(tmp_path).run(num_steps)
    assert restored(tmp_path)[1] == expected


def test_next_save_after_a_local_restart_is_shared(tmp_path):
    Training(tmp_path).run(5)
    training, _ = restored(tmp_path)
    assert training.run(3) == ["shared/ckpt-6", None, "local/ckpt-8"]


def test_explicit_save_is_shared(tmp_path):
    """On preemption for example: the host may be lost."""
    training = Training(tmp_path)
    training.run(2)
    assert training.run(1, check_interval=False) == ["shared/ckpt-3"]


def test_damaged_local_checkpoint_is_skipped(tmp_path, caplog):
    training = Training(tmp_path)
    training.run(5)
    (file,) = training.local.glob("*/0/ckpt-5/arrays/state/w/c.0")
    file.write_bytes(file.read_bytes()[:-1])
    assert restored(tmp_path)[1] == "local/ckpt-3"
    assert "ckpt-5" in caplog.text


@pytest.mark.parametrize(
    "text", ["../../elsewhere", "/elsewhere", "", "\0" * 8, "x" * 300, "a\nb", " ", "ABCDEF01"]
)
def test_token_that_is_none_does_not_become_a_path(text, tmp_path, caplog):
    training = Training(tmp_path)
    training.run(5)
    (tmp_path / "shared" / ".local-checkpoints").write_text(
        text.replace("/elsewhere", f"/{tmp_path}/elsewhere")
    )
    training, path = restored(tmp_path)
    assert path == "shared/ckpt-1"
    training.run(3)
    token = (tmp_path / "shared" / ".local-checkpoints").read_text()
    assert len(token) == 8
    assert token in os.listdir(training.local)
    assert len(os.listdir(training.local)) == 2
    assert sorted(os.listdir(tmp_path)) == ["local", "shared"]
    assert ("not a token" in caplog.text) is bool(text)


def test_part_of_another_local_save_is_found(tmp_path, caplog):
    training = Training(tmp_path)
    training.run(5)
    older, newer = sorted(training.local.glob("*/0/ckpt-*/arrays/state/w/c.0"))
    newer.write_bytes(older.read_bytes())
    assert restored(tmp_path)[1] == "local/ckpt-3"
    assert "ckpt-5" in caplog.text


def test_emptied_shared_directory_begins_a_new_training(tmp_path):
    training = Training(tmp_path)
    training.run(5)
    training.shared.rename(tmp_path / "moved away")
    assert restored(tmp_path)[1] is None


def test_two_trainings_may_use_one_local_directory(tmp_path):
    Training(tmp_path / "a", local_directory=tmp_path / "local").run(5)
    Training(tmp_path / "b", local_directory=tmp_path / "local").run(3)
    assert restored(tmp_path / "a", local_directory=tmp_path / "local")[1] == "local/ckpt-5"


def test_checkpoints_of_a_run_without_the_local_tier_are_newer(tmp_path):
    Training(tmp_path).run(5)
    without = Training(tmp_path, local_directory=None, local_every=None)
    without.manager.restore_or_initialize()
    without.run(7)
    assert restored(tmp_path)[1] == "shared/ckpt-7"


def test_training_continues_while_the_local_disk_is_full(tmp_path, caplog, monkeypatch):
    training, write_pieces, full = Training(tmp_path), writing.write_pieces, True

    def write(part, arrays, pieces):
        if full and str(training.local) in part:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_pieces(part, arrays, pieces)

    monkeypatch.setattr(writing, "write_pieces", write)
    with caplog.at_level(logging.WARNING, "replicax"):
        assert training.run(6)[-1] is None
    assert caplog.text.count("its disk is full") == 2
    assert training.kept() == []
    full = False
    assert training.run(3) == ["shared/ckpt-7", None, "local/ckpt-9"]
    assert restored(tmp_path)[1] == "local/ckpt-9"


def test_local_save_waits_for_no_running_save(tmp_path, monkeypatch):
    training, write_pieces, released = Training(tmp_path), writing.write_pieces, threading.Event()
    monkeypatch.setattr(writing, "write_pieces", lambda *args: (released.wait(30), write_pieces(*args))[1])
    training.step.assign(1)
    training.manager.save()
    training.step.assign(3)
    assert training.manager.save() is None
    released.set()
    training.manager.wait()
    assert training.named(training.manager.save()) == "local/ckpt-2"
    training.manager.close()


def test_read_only_local_directory_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError):
        Training(tmp_path, local_directory=tmp_path / "file")


@pytest.mark.parametrize(
    "options",
    [
        {"local_directory": None},
        {"local_every": None},
        {"local_every": 6},
        {"local_every": 0},
        {"local_every": 1.5},
        {"checkpoint_interval": None},
        {"local_directory": "shared"},
        {"local_directory": "shared/local"},
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(tmp_path, options):
    local = options.get("local_directory")
    with pytest.raises(InvalidArgumentError):
        Training(tmp_path, **(options if local is None else {"local_directory": tmp_path / local}))
