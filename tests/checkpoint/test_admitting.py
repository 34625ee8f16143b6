"""A replacement gets the whole state of a manager from memory, and does not disturb the files of the others."""

import logging
import os

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replacements import Admission, strategy_as
from replicax.errors import CheckpointMismatchError


class Noted:
    """A Python state."""

    def __init__(self, value):
        self.value = value

    def get_state(self):
        return self.value

    def set_state(self, state):
        self.value = state


def state_of(value, **more):
    return rx.Checkpoint(
        v=jnp.full((3, 2), value, jnp.bfloat16),
        empty=np.zeros((0, 4)),
        nested={"n": 3 * int(value), "text": f"at {value:g}", "f": float(value) / 3},
        noted=Noted({"value": value}),
        **more,
    )


def live(monkeypatch, *, is_asked=True):
    admission = Admission(is_asked=is_asked)
    strategy_as(monkeypatch, admission, number=0, num_tasks=2)
    return admission


def replacement(monkeypatch, admission, at=-1, number=1):
    """The peers of a replacement that gets one of the states that were given."""
    entering = Admission(admission.gifts[at], is_asked=False)
    version = admission.versions[at]
    _, peers = strategy_as(monkeypatch, entering, number=number, num_tasks=2, version=version)
    peers.last_entry, peers.counts_of_others = None, None
    return peers


def saving(directory, value=5.0, **options):
    checkpoint = state_of(value)
    return rx.CheckpointManager(checkpoint, directory, **options)


def is_state(checkpoint, value):
    expected = state_of(value)
    np.testing.assert_array_equal(checkpoint.v, expected.v)
    assert checkpoint.v.dtype == jnp.bfloat16
    assert checkpoint.nested == expected.nested
    assert checkpoint.noted.value == expected.noted.value


def test_replacement_gets_the_state_of_the_boundary_and_not_that_of_the_disk(monkeypatch, tmp_path):
    admission = live(monkeypatch)
    manager = saving(tmp_path, max_to_keep=1, step_counter=lambda: 12, checkpoint_interval=10)
    assert manager.restore_or_initialize() is None
    saved = manager.save()
    manager.checkpoint.v = manager.checkpoint.v + 1
    manager.checkpoint.noted.value = {"value": 6.0}
    manager.checkpoint.nested = state_of(6.0).nested
    assert manager.save() is None, "the interval is not over"
    assert len(admission.gifts) == 2

    replacement(monkeypatch, admission, 0)
    other = saving(tmp_path, 0.0, max_to_keep=1, step_counter=lambda: 12, checkpoint_interval=10)
    assert other.restore_or_initialize() == saved
    is_state(other.checkpoint, 5.0)
    assert other._counts() == manager._counts()

    replacement(monkeypatch, admission, 1)
    other = saving(tmp_path, 0.0, max_to_keep=1, step_counter=lambda: 12, checkpoint_interval=10)
    path = other.restore_or_initialize()
    assert path == os.path.join(tmp_path, "ckpt-2")
    assert not os.path.exists(path), "the state is from memory"
    is_state(other.checkpoint, 6.0)


def test_values_of_objects_that_are_made_later_are_restored_then(monkeypatch, tmp_path):
    admission = live(monkeypatch)
    manager = rx.CheckpointManager(state_of(2.0, later=jnp.arange(3)), tmp_path)
    manager.restore_or_initialize()
    manager.save()
    replacement(monkeypatch, admission)
    other = saving(tmp_path, 0.0)
    other.restore_or_initialize()
    other.checkpoint.later = jnp.zeros(3, int)
    np.testing.assert_array_equal(other.checkpoint.later, [0, 1, 2])


def test_replacement_saves_nothing_and_leaves_the_files_of_others(monkeypatch, tmp_path):
    """Also those of a save that runs meanwhile."""
    admission = live(monkeypatch)
    manager = saving(tmp_path)
    manager.restore_or_initialize()
    manager.save()
    manager.wait()
    peers = replacement(monkeypatch, admission)
    part = tmp_path / f".part-elsewhere-1-{'0' * 8}"
    part.mkdir()
    before = sorted(os.listdir(tmp_path))
    other = saving(tmp_path, 0.0)
    other.restore_or_initialize()
    assert other.save() is None
    other.mark_boundary()
    state_of(1.0).save(tmp_path / "more")
    assert sorted(os.listdir(tmp_path)) == before
    peers.admission.is_solo = False
    assert os.path.basename(other.save()) == "ckpt-2"
    other.wait()


def test_replacement_takes_the_counts_of_the_others_at_its_first_save(monkeypatch, tmp_path):
    admission = live(monkeypatch)
    manager = saving(tmp_path)
    manager.restore_or_initialize()
    manager.save()
    manager.wait()
    peers = replacement(monkeypatch, admission)
    other = saving(tmp_path, 0.0)
    other.restore_or_initialize()
    peers.admission.is_solo, peers.last_entry = False, 0
    peers.counts_of_others = lambda version: {**manager._counts(), "counter": 4}
    assert os.path.basename(other.save()) == "ckpt-5"
    assert [topic for _, topic, _ in peers.keys].count("checkpoint counts") == 1
    assert os.path.basename(other.save()) == "ckpt-6"
    assert [topic for _, topic, _ in peers.keys].count("checkpoint counts") == 1
    other.wait()


@pytest.mark.parametrize("other", ["directory", "name"])
def test_replacement_with_another_manager_is_refused_with_both_names(monkeypatch, tmp_path, other):
    admission = live(monkeypatch)
    manager = saving(tmp_path / "one")
    manager.restore_or_initialize()
    manager.save()
    replacement(monkeypatch, admission)
    is_directory = other == "directory"
    options = {} if is_directory else {"checkpoint_name": "model"}
    other = saving(tmp_path / ("two" if is_directory else "one"), 0.0, **options)
    with pytest.raises(CheckpointMismatchError, match="worker 1 is a replacement") as raised:
        other.restore_or_initialize()
    assert all(
        text in str(raised.value) for text in ("worker 0", "/one'", "two'" if is_directory else "'model'")
    )


def test_replacement_with_other_objects_is_refused_with_both_names(monkeypatch, tmp_path):
    admission = live(monkeypatch)
    manager = rx.CheckpointManager(rx.Checkpoint(a=jnp.zeros(3)), tmp_path)
    manager.restore_or_initialize()
    manager.save()
    replacement(monkeypatch, admission)
    other = rx.CheckpointManager(rx.Checkpoint(a=jnp.zeros(4)), tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"worker 1 is a replacement.*worker 0"):
        other.restore_or_initialize()


def test_manager_that_only_restores_reads_the_disk_and_the_other_one_gets_the_state(monkeypatch, tmp_path):
    admission = live(monkeypatch)
    rx.Checkpoint(a=jnp.arange(3)).save(tmp_path / "teacher" / "ckpt")
    managers = teacher, manager = teacher_and_student(tmp_path, 5.0)
    for each in managers:
        each.restore_or_initialize()
    manager.save()
    replacement(monkeypatch, admission)
    teacher, student = teacher_and_student(tmp_path, 0.0)
    assert os.path.basename(teacher.restore_or_initialize()) == "ckpt-1"
    np.testing.assert_array_equal(teacher.checkpoint.a, [0, 1, 2])
    student.restore_or_initialize()
    is_state(student.checkpoint, 5.0)


def teacher_and_student(folder, value):
    teacher = rx.CheckpointManager(rx.Checkpoint(a=jnp.zeros(3, int)), folder / "teacher")
    return teacher, saving(folder / "student", value)


def test_two_managers_that_save_admit_nobody_and_one_warning_names_them(monkeypatch, tmp_path, caplog):
    admission = live(monkeypatch)
    managers = [saving(tmp_path / name) for name in ("one", "two")]
    for manager in managers:
        manager.restore_or_initialize()
    with caplog.at_level(logging.WARNING, "replicax"):
        for manager in 2 * managers:
            manager.save(check_interval=False)
    assert len(admission.gifts) == 1, "the first one admits until the second one saves"
    (warning,) = [r.getMessage() for r in caplog.records if "Replacements" in r.getMessage()]
    assert "/one'" in warning
    assert "/two'" in warning
    managers[0].close()
    managers[1].save()
    assert len(admission.gifts) == 2
    managers[1].close()


def test_manager_that_has_not_restored_admits_nobody(monkeypatch, tmp_path):
    admission = live(monkeypatch)
    with saving(tmp_path) as manager:
        manager.save()
    assert not admission.gifts


def test_worker_with_a_directory_of_its_own_is_replaced(monkeypatch, tmp_path):
    """As in programs of TensorFlow, where only the chief's directory has checkpoints."""
    admission = live(monkeypatch)
    manager = saving(tmp_path / "chief")
    manager.restore_or_initialize()
    shared = os.fspath(tmp_path / "chief")
    monkeypatch.setattr(rx._src.checkpoint.agreement, "_given", {shared: {"1": os.fspath(tmp_path / "own")}})
    manager.save()
    replacement(monkeypatch, admission)
    other = saving(tmp_path / "own", 0.0)
    other.restore_or_initialize()
    assert other.directory == shared
    is_state(other.checkpoint, 5.0)
