"""``CheckpointManager(continuous=True)``: a loop that calls ``save`` after each step, on slow, full and read-only disks."""

import errno
import logging
import os
import random
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from live_members import Members
from replicax._src.checkpoint import writing
from replicax._src.checkpoint.continuous_saves import ContinuousSaves
from replicax._src.control.standing import Moment
from replicax.checkpoint import CheckpointWriteError
from replicax.errors import InvalidArgumentError

pytestmark = pytest.mark.timeout(120)


class Disk:
    """The disk under a manager: it keeps a write until ``release``, or fails.

    Attributes:
      failure: The ``errno`` with which it fails; None if it works.
      most_at_once: The largest number of writes at one time.
    """

    def __init__(self, monkeypatch, *, is_slow=False):
        self.failure, self.is_slow, self.most_at_once = None, is_slow, 0
        self._num_running, self._released = 0, threading.Semaphore(0)
        write_pieces = writing.write_pieces

        def write(*args):
            self._num_running += 1
            self.most_at_once = max(self.most_at_once, self._num_running)
            try:
                assert not self.is_slow or self._released.acquire(timeout=60)
                if self.failure is not None:
                    raise OSError(self.failure, os.strerror(self.failure))
                return write_pieces(*args)
            finally:
                self._num_running -= 1

        monkeypatch.setattr(writing, "write_pieces", write)

    def release(self, manager):
        """Lets one write end, and waits until it is durable."""
        self._released.release()
        manager._background.wait(60, keeps_failure=True)


class Training:
    """A counter of steps and an array that tells the step."""

    def __init__(self, folder, **options):
        self.step = rx.Variable(0)
        self.checkpoint = rx.Checkpoint(step=self.step, state={"w": jnp.zeros(3)})
        self.manager = rx.CheckpointManager(self.checkpoint, folder, continuous=True, **options)

    def run(self, num_steps, *, settles=False, **how):
        """Returns the steps after which a save began. With ``settles`` each save ends before the next step."""
        began = []
        for _ in range(num_steps):
            self.step.assign_add(1)
            self.checkpoint.state = {"w": jnp.full(3, float(int(self.step)))}
            if self.manager.save(int(self.step), **how) is not None:
                began.append(int(self.step))
            if settles:
                self.manager._background.wait(60, keeps_failure=True)
        return began


def kept(folder):
    return sorted(int(name[5:]) for name in os.listdir(folder) if name[5:].isdigit())


def test_next_save_begins_after_the_last_one_is_durable_and_never_two_at_once(tmp_path, monkeypatch):
    disk, training = Disk(monkeypatch, is_slow=True), Training(tmp_path, max_to_keep=2)
    assert training.manager.saves_continuously
    assert training.run(4) == [1]
    assert kept(tmp_path) == []
    disk.release(training.manager)
    assert kept(tmp_path) == [1]
    assert training.run(3) == [5]
    disk.release(training.manager)
    assert training.run(1) == [8]
    disk.release(training.manager)
    assert kept(tmp_path) == [5, 8]
    disk.is_slow = False
    assert training.run(3, settles=True) == [9, 10, 11]
    assert disk.most_at_once == 1


def addresses(checkpoint):
    return {key: buffer.ctypes.data for key, buffer in checkpoint._buffers._buffers.items()}


@pytest.mark.parametrize("restores", [False, True])
def test_memory_of_the_first_save_is_prepared_before_it(tmp_path, restores):
    if restores:
        Training(tmp_path).manager.save(1)
    training = Training(tmp_path)
    training.checkpoint._buffers._preparing.wait(60)
    assert training.checkpoint._buffers.num_bytes == (0 if restores else 3 * 4 + 4)
    training.manager.restore_or_initialize()
    training.checkpoint._buffers._preparing.wait(60)
    prepared = addresses(training.checkpoint)
    assert len(prepared) == 2
    training.run(1)
    training.manager.wait()
    assert addresses(training.checkpoint) == prepared
    training.manager.close()
    assert training.checkpoint._buffers.num_bytes == 0


def test_memory_is_not_prepared_without_continuous(tmp_path):
    manager = rx.CheckpointManager(rx.Checkpoint(w=rx.Variable(0.0)), tmp_path)
    manager.restore_or_initialize()
    manager.checkpoint._buffers._preparing.wait(60)
    assert manager.checkpoint._buffers.num_bytes == 0


def test_save_of_the_last_step_waits_for_the_running_one(tmp_path, monkeypatch):
    disk, training = Disk(monkeypatch, is_slow=True), Training(tmp_path)
    training.run(3)
    later = threading.Timer(0.2, lambda: [disk._released.release() for _ in range(2)])
    later.start()
    assert training.run(1, check_interval=False) == [4]
    training.manager.close()
    later.join()
    assert (kept(tmp_path), disk.most_at_once) == ([1, 4], 1)


def test_restore_takes_the_newest_one(tmp_path):
    training = Training(tmp_path, max_to_keep=2)
    last = training.run(30)[-1]
    training.manager.close()
    again = Training(tmp_path)
    assert again.manager.restore_or_initialize() == str(tmp_path / f"ckpt-{last}")
    assert int(again.step) == last
    assert np.array_equal(again.checkpoint.state["w"], np.full(3, float(last)))
    assert again.run(1) == [last + 1]
    again.manager.close()


def test_best_ones_are_kept_too(tmp_path):
    rules = {"keep_best": 1, "best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    training = Training(tmp_path, max_to_keep=1, **rules)
    for loss in (3.0, 1.0, 2.0, 4.0):
        training.run(1, settles=True, metrics={"loss": loss})
    assert kept(tmp_path) == [2, 4]
    assert training.manager.best_checkpoint == str(tmp_path / "ckpt-2")


def test_training_continues_while_the_disk_is_full(tmp_path, monkeypatch, caplog):
    disk, training = Disk(monkeypatch), Training(tmp_path)
    caplog.set_level(logging.INFO, "replicax")
    assert training.run(2, settles=True) == [1, 2]
    disk.failure = errno.ENOSPC
    assert training.run(20, settles=True) == [3, 5, 9, 17], "it tries again, less and less often"
    assert caplog.text.count("its disk is full. Free some space") == 1
    assert "Training continues" in caplog.text
    with pytest.raises(CheckpointWriteError, match=r"'.*ckpt-17' could not be written: its disk is full"):
        training.manager.wait()
    training.manager.wait()
    assert kept(tmp_path) == [1, 2]
    disk.failure = errno.EROFS
    training.run(12, settles=True)
    assert caplog.text.count("its disk is read-only") == 1
    disk.failure = None
    assert training.run(40, settles=True)[-3:] == [72, 73, 74]
    assert caplog.text.count("The disk takes checkpoints again.") == 1
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 2
    assert training.manager.restore_or_initialize() == str(tmp_path / "ckpt-74")
    disk.failure = errno.ENOSPC
    training.run(1, settles=True)
    assert caplog.text.count("its disk is full") == 2, "the disk is in another state than before"


def test_disk_that_is_full_before_anything_is_written(tmp_path, monkeypatch, caplog):
    """``save`` finds that out itself, in the training thread."""
    training = Training(tmp_path)
    training.run(1, settles=True)

    def refuse(path, num_bytes):
        raise CheckpointWriteError(errno.ENOSPC, f"The checkpoint {path!r} needs more room.")

    monkeypatch.setattr("replicax._src.checkpoint.checkpoint.check_space", refuse)
    assert training.run(10) == []
    assert caplog.text.count("needs more room. Training continues") == 1
    assert training.run(1, check_interval=False) == []
    with pytest.raises(CheckpointWriteError, match="ckpt-12' needs more room"):
        training.manager.close()
    assert kept(tmp_path) == [1]


def test_error_of_a_save_that_is_no_failure_of_the_disk_is_raised(tmp_path, monkeypatch):
    training = Training(tmp_path)
    monkeypatch.setattr(training.manager, "_remove_old", lambda: 1 / 0)
    training.run(1)
    training.manager._background._thread.join()
    with pytest.raises(rx.errors.ReplicaxError, match="ZeroDivisionError"):
        training.run(2)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"checkpoint_interval": 5, "step_counter": lambda: 1}, "checkpoint_interval"),
        ({"local_directory": "local", "local_every": 2}, "local_directory"),
        ({"local_every": 2}, "local_every"),
        ({"asynchronous": False}, "asynchronous"),
    ],
)
def test_another_rule_of_when_to_save_is_an_error_that_says_what_to_remove(tmp_path, options, name):
    with pytest.raises(
        InvalidArgumentError, match=f"{name}=.* cannot hold. Remove {name} .* or remove continuous"
    ):
        Training(tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_continuous_is_true_or_false(tmp_path, value):
    with pytest.raises(InvalidArgumentError, match="continuous must be True or False"):
        rx.CheckpointManager(rx.Checkpoint(v=rx.Variable(0.0)), tmp_path, continuous=value)


# --- several processes, of which each is a thread, and its writer another ----------------------------------------


class Saving:
    """The continuous saves of one process: ``write`` ends when all have written."""

    def __init__(self, member, all_wrote, durations, fails):
        self.member, self.all_wrote, self.durations, self.fails = member, all_wrote, durations, fails
        self.saves = ContinuousSaves(self.wait)
        self.thread, self.began = None, []

    def wait(self):
        if self.thread is not None:
            self.thread.join(60)
            assert not self.thread.is_alive()

    def write(self, number):
        self.member.world.here.peers = self.member  # this thread belongs to the process
        save = f"save {number}"

        def write():
            time.sleep(self.durations.random() / 50)
            self.all_wrote.wait(60)
            if number in self.fails:
                raise CheckpointWriteError(errno.ENOSPC, "its disk is full.")

        self.saves.write(write, save, Moment())

    def run(self, num_steps, together):
        """Returns the steps after which saves began."""
        for step in range(num_steps):
            together.wait(60)  # the collective of a step
            time.sleep(self.durations.random() / 200)
            if self.saves.pass_boundary():
                self.wait()
                self.began.append(step)
                self.saves.begin()
                self.thread = threading.Thread(target=self.write, args=(len(self.began),))
                self.thread.start()
        self.wait()
        return self.began


@pytest.mark.parametrize("seed", range(3))
def test_all_processes_begin_saves_at_the_same_boundaries(monkeypatch, seed):
    count = 3
    members = Members(monkeypatch, range(count), count, tolerates_failures=False)
    all_wrote, together = threading.Barrier(count), threading.Barrier(count)

    def run(member):
        durations = random.Random(count * seed + member.number)
        return Saving(member, all_wrote, durations, fails={3}).run(40, together)

    began = members.run(run)
    assert began[0] == began[1] == began[2], began
    assert len(began[0]) > 4


def test_process_passes_no_boundary_until_it_knows_what_the_others_have_passed(monkeypatch):
    told, answered = threading.Event(), threading.Event()

    def gather(topic, value, *, once, since):
        told.set()
        assert answered.wait(60)
        return [value, [5, True]]

    monkeypatch.setattr("replicax._src.checkpoint.agreement.gather", gather)
    saves = ContinuousSaves(lambda: writer.join(60))
    assert saves.pass_boundary()
    saves.begin()
    writer = threading.Thread(target=saves.write, args=(lambda: None, "save 1", Moment()))
    writer.start()
    assert told.wait(60)
    threading.Timer(0.3, answered.set).start()
    assert not saves.pass_boundary()
    assert answered.is_set()
    assert [saves.pass_boundary() for _ in range(4)] == [False, False, False, True]
