"""Saves over the live tasks, of which one may die at any moment. The tasks are threads; a task that dies cleans nothing
up."""

import errno
import os
import random
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from live_members import Died, Members, dying_in
from replicax._src.checkpoint import agreement, boundary_keeper, checkpoint, saved, writing
from replicax._src.keras import workers
from replicax.errors import CheckpointWriteError

pytestmark = pytest.mark.timeout(120)
COUNT = 4


class Counted:
    """A Python state."""

    def __init__(self, value=0):
        self.value = value

    def get_state(self):
        return self.value

    def set_state(self, state):
        self.value = state


def state_of(step, number=0, differs=False):
    own = 10 * number if differs else 0
    return rx.Checkpoint(v=jnp.arange(6.0) + step, counted=Counted(step + own))


def restored(path):
    """What one process, of no cluster, reads."""
    read = state_of(0)
    read.read(path).assert_consumed()
    return read.v[0], read.counted.value


def saved_by(monkeypatch, path, step, live, **dying):
    """Saves one step in these tasks. Returns the results by task."""
    return Members(monkeypatch, live, COUNT).run(lambda member: save(member, path, step, **dying))


def save(member, path, step, dies_at=None, dies_after=None, victim=None):
    if member.number == victim:
        member.dies_at, member.dies_after = dies_at, dies_after
    state_of(step).write(path)
    return "saved"


@pytest.mark.parametrize("live", [(0, 1, 2, 3), (0, 2, 3), (2, 3), (3,)], ids=str)
def test_live_tasks_save_a_checkpoint_that_one_process_reads(monkeypatch, tmp_path, live):
    path = tmp_path / "exact"
    assert saved_by(monkeypatch, path, 5, live) == dict.fromkeys(live, "saved")
    assert restored(path) == (5.0, 5)
    assert os.listdir(tmp_path) == ["exact"]
    assert saved.SavedCheckpoint(path).contents.processes == tuple(f"worker {n}" for n in range(COUNT))


EXCHANGES = [
    f"{when} {what}"
    for what in ("copying", "written", "committed", "directory 0", "mark", "see the directory")
    for when in ("before", "after")
]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("moment", EXCHANGES)
def test_save_is_complete_though_a_task_dies_at_an_exchange(monkeypatch, tmp_path, moment, victim):
    path, live = tmp_path / "exact", (0, 2, 3)
    saved_by(monkeypatch, path, 1, live)
    when, _, key = moment.partition(" ")
    results = saved_by(
        monkeypatch, path, 2, live, victim=victim, **{"dies_at" if when == "before" else "dies_after": key}
    )
    assert results == {**dict.fromkeys(live, "saved"), victim: Died}
    assert restored(path) == (2.0, 2)
    assert saved_by(monkeypatch, path, 3, set(live) - {victim})[3] == "saved"
    assert restored(path) == (3.0, 3)


MOMENTS = {
    "before it copies": (checkpoint, "copy_to_host"),
    "before it makes a directory": (checkpoint, "new_part"),
    "before it writes": (writing, "write_metadata"),
    "while it writes": (writing, "write_pieces"),
    "before it names it": (writing, "_take_place"),
    "after it has named it": (writing, "sync"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("has_older", [True, False], ids=["replaces another", "is the first"])
def test_save_is_complete_though_its_writer_dies(monkeypatch, tmp_path, moment, has_older):
    path, live = tmp_path / "exact", (0, 2, 3)
    if has_older:
        saved_by(monkeypatch, path, 1, live)
    older_s = saved.SavedCheckpoint(path).contents.time_s if has_older else 1.0
    with dying_in(monkeypatch, *MOMENTS[moment], number=0):
        results = saved_by(monkeypatch, path, 2, live)
    assert results == {0: Died, 2: "saved", 3: "saved"}
    assert restored(path) == (2.0, 2)
    assert saved.SavedCheckpoint(path).contents.time_s > older_s, "it counts as the older one"
    if moment not in ("before it copies", "before it makes a directory", "after it has named it"):
        assert os.listdir(tmp_path) == ["exact"], "the next writer left files of the first one"


def test_older_checkpoint_stays_if_its_writer_dies_between_two_names(monkeypatch, tmp_path):
    path, live = tmp_path / "exact", (0, 2)
    saved_by(monkeypatch, path, 1, live)
    found = []
    rename, write_pieces = os.rename, writing.write_pieces

    def rename_or_die(old, new):
        peers = agreement.joined_peers()
        if peers is not None and peers.number == 0 and str(new) == str(path):
            peers.die()
        rename(old, new)

    def write_or_fail(*args):
        if agreement.joined_peers().number == 0:
            return write_pieces(*args)
        found.extend(os.listdir(tmp_path))
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_or_die)
        patch.setattr(writing, "write_pieces", write_or_fail)
        results = saved_by(monkeypatch, path, 2, live)
    assert results[0] is Died
    assert isinstance(results[2], CheckpointWriteError)
    assert "exact" in found, "the older one had no name while the next task wrote"
    assert restored(path) == (1.0, 1)


def test_two_writers_die_one_after_the_other(monkeypatch, tmp_path):
    path = tmp_path / "exact"
    with (
        dying_in(monkeypatch, writing, "write_pieces", number=0),
        dying_in(monkeypatch, writing, "_take_place", number=2),
    ):
        assert saved_by(monkeypatch, path, 2, (0, 2, 3)) == {0: Died, 2: Died, 3: "saved"}
    assert restored(path) == (2.0, 2)
    assert os.listdir(tmp_path) == ["exact"]


def test_failure_of_the_disk_is_raised_in_all_live_tasks(monkeypatch, tmp_path):
    def full(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(writing, "write_pieces", full)
    results = saved_by(monkeypatch, tmp_path / "exact", 2, (0, 2, 3))
    assert {type(result).__name__ for result in results.values()} == {"CheckpointWriteError"}
    assert "full" in str(results[3])


def test_manager_counts_and_removes_over_the_live_tasks(monkeypatch, tmp_path):
    def train(member):
        tracked = state_of(0)
        with rx.CheckpointManager(
            tracked, tmp_path / "training", max_to_keep=2, asynchronous=False
        ) as manager:
            for step in range(1, 6):
                if (member.number, step) in ((0, 3), (2, 5)):
                    member.die()
                tracked.v, tracked.counted.value = jnp.arange(6.0) + step, step
                manager.save()
            return [os.path.basename(path) for path in manager.checkpoints]

    results = Members(monkeypatch, (0, 2, 3), COUNT).run(train)
    assert results == {0: Died, 2: Died, 3: ["ckpt-4", "ckpt-5"]}
    assert restored(tmp_path / "training/ckpt-5") == (5.0, 5)


def test_save_on_failure_does_nothing_where_the_live_tasks_continue(monkeypatch, tmp_path):
    def train(member):
        tracked = state_of(1)
        with rx.CheckpointManager(
            tracked, tmp_path / "training", asynchronous=False, save_on_failure=True
        ) as manager:
            manager.save()
        return "saved"

    members = Members(monkeypatch, (0, 2, 3), COUNT)
    monkeypatch.setattr(boundary_keeper, "joined_peers", agreement.joined_peers)
    assert members.run(train) == dict.fromkeys((0, 2, 3), "saved")


# --- states ---------------------------------------------------------------------------------------------------


def test_dead_task_gets_the_state_of_the_first_live_one(monkeypatch, tmp_path):
    """So the number of states is that of the tasks, and a restart of all restores them."""
    path = tmp_path / "exact"

    def write(member):
        state_of(1, member.number, differs=True).write(path)

    Members(monkeypatch, (1, 2, 3), COUNT).run(write)

    def read(member):
        tracked = state_of(0)
        tracked.read(path)
        return tracked.counted.value

    for tolerates in (True, False):
        members = Members(monkeypatch, range(COUNT), COUNT, tolerates_failures=tolerates)
        assert members.run(read) == {0: 11, 1: 11, 2: 21, 3: 31}


def test_checkpoint_of_all_tasks_is_read_by_the_live_ones(monkeypatch, tmp_path):
    path = tmp_path / "exact"
    all_tasks = Members(monkeypatch, range(COUNT), COUNT, tolerates_failures=False)
    all_tasks.run(lambda member: state_of(1, member.number, differs=True).write(path))

    def read(member):
        tracked = state_of(0)
        tracked.read(path)
        return tracked.counted.value

    assert Members(monkeypatch, (0, 2, 3), COUNT).run(read) == {0: 1, 2: 21, 3: 31}


# --- the leader -----------------------------------------------------------------------------------------------


def test_all_live_tasks_take_the_random_state_of_the_first_one_that_lives(monkeypatch):
    seeds = {0: 10, 2: 12, 3: 13}
    states = {}

    class OwnRandom:
        """``numpy.random`` or ``random`` of one task."""

        def __init__(self, member):
            self.state = ["MT", np.full(2, seeds[member.number])]

    def share(member):
        member.dies_at = "keras random 0" if member.number == 0 else None
        own.random = OwnRandom(member)
        workers._share_random_state(member, "fit")
        states[member.number] = own.random.state[1].tolist()

    own = threading.local()
    monkeypatch.setattr(np.random, "get_state", lambda: (*own.random.state, 0))
    monkeypatch.setattr(np.random, "set_state", lambda state: setattr(own.random, "state", list(state)))
    monkeypatch.setattr(random, "setstate", lambda state: None)
    assert Members(monkeypatch, (0, 2, 3), COUNT).run(share)[0] is Died
    assert states == {2: [12, 12], 3: [12, 12]}


@pytest.mark.parametrize(
    "moment", ["before opening the local directories 0", "after opening the local directories 0"]
)
def test_local_directories_have_one_token_though_the_chief_dies(monkeypatch, tmp_path, moment):
    when, _, key = moment.partition(" ")

    def train(member):
        if member.number == 0:
            member.dies_at, member.dies_after = (key, None) if when == "before" else (None, key)
        tracked = rx.Checkpoint(v=jnp.arange(6.0), step=Counted())
        manager = rx.CheckpointManager(
            tracked,
            tmp_path / "training",
            step_counter=lambda: tracked.step.value,
            checkpoint_interval=4,
            asynchronous=False,
            local_directory=tmp_path / f"local-{member.number}",
            local_every=1,
        )
        paths = []
        for tracked.step.value in range(3):
            paths.append(manager.save())
        return [os.path.relpath(path, tmp_path) for path in paths]

    results = Members(monkeypatch, (0, 2, 3), COUNT).run(train)
    assert results[0] is Died
    (token,) = {os.listdir(tmp_path / f"local-{n}")[0] for n in (2, 3)}
    assert results[2] == ["training/ckpt-1", f"local-2/{token}/2/ckpt-2", f"local-2/{token}/2/ckpt-3"]
