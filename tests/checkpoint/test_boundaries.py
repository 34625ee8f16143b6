"""What is kept at a boundary, and when: arrays by reference, Python state by copy, and never between two boundaries."""

import errno
import json
import os
import pathlib
import random
import shutil
import time
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.checkpoint import boundary_keeper
from replicax._src.checkpoint.boundary import StateReader
from replicax._src.checkpoint.boundary_keeper import MOST_PROGRAMS_WITHOUT
from replicax._src.checkpoint.errors import NoBoundaryError
from replicax._src.checkpoint.trees import HostRandomState
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.keras import internals
from replicax._src.keras.fit_progress import FitProgress
from replicax._src.lowering.spmd import StatePrograms
from replicax.errors import DonatedError, InvalidArgumentError, PeerFailureError, UnsupportedError

SOURCES = pathlib.Path(__file__).parents[2] / "src/replicax/_src"


class OtherProcesses:
    """Stands for the other processes. ``answers`` are what they offer to an all-gather."""

    names, number, is_cut_off = ("worker 0", "worker 1"), 0, False
    tolerates_failures = False

    def __init__(self):
        self.listeners, self.told, self.gathered = [], [], []
        self.is_failed = False
        self.answer = lambda topic, value: value

    def listen_for_saving(self, listener):
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def send_about_saving(self, message):
        self.told.append(message)

    def check_reached(self):
        if self.is_failed:
            raise PeerFailureError("worker 1 died")

    def wait_for_failure(self, timeout_s):
        pass

    def hold_end(self, is_saving):
        self.is_saving = is_saving

    def gather(self, topic, value, what):
        self.gathered.append(topic)
        return GatheredValues([value, self.answer(topic, value)], (0, 1), self.names, 0)

    def fail(self):
        """A process dies, and this one is chosen. Returns its version."""
        (answer,) = [answer for listener in self.listeners if (answer := listener({"kind": "freeze"}))]
        for listener in self.listeners:
            listener({"kind": "save_boundary"})
        return answer["version"]

    def wait_for_save(self):
        deadline = time.monotonic() + 60
        while not any(message["kind"] == "boundary_saved" for message in self.told):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for listener in self.listeners:
            listener({"kind": "boundaries_over", "version": 1, "saver": 0})
        return self.told[-1]["is_saved"]


@pytest.fixture
def others(monkeypatch):
    processes = OtherProcesses()
    monkeypatch.setattr(boundary_keeper, "joined_peers", lambda: processes)
    yield processes
    assert StatePrograms.keeper() is None, "a manager was not closed"


def saved_by(others):
    """Where a failure now makes this process save."""
    assert others.fail() is not None
    assert others.wait_for_save()


@pytest.fixture
def managed(tmp_path, others):
    """``managed(checkpoint)``: a manager that saves on failure; closed at the end."""
    managers = []

    def make(checkpoint, **options):
        managers.append(rx.CheckpointManager(checkpoint, tmp_path / "saved", save_on_failure=True, **options))
        return managers[-1]

    yield make
    for manager in managers:
        manager._keeper._is_frozen = False
        manager.close()


def often(step):
    return {"step_counter": step, "checkpoint_interval": 1000}


class Counted:
    def __init__(self):
        self.values = []

    def get_state(self):
        return self.values

    def set_state(self, state):
        self.values = state


def test_state_of_the_last_boundary_is_saved_and_not_what_came_after(managed, others, tmp_path):
    """Programs, assignments, Python objects and arrays in place."""
    strategy = rx.MirroredStrategy(jax.local_devices()[:2])
    with strategy.scope():
        v, step = rx.Variable(jnp.zeros(3)), rx.Variable(0)
    counted, seen = Counted(), np.zeros(4, np.int32)
    checkpoint = rx.Checkpoint(v=v, step=step, counted=counted, seen=seen, progress={"epoch": 0})
    manager = managed(checkpoint, **often(step))

    def iterate(number):
        strategy.run(lambda: v.assign_add(jnp.ones(3)))
        counted.values.append(number)
        seen[number] += 1
        checkpoint.progress = {"epoch": number}
        step.assign_add(1)

    for number in range(3):
        iterate(number)
        manager.save()
    iterate(3)  # and dies before its boundary
    saved_by(others)
    restored = rx.Checkpoint(
        v=rx.Variable(jnp.zeros(3)),
        step=rx.Variable(0),
        counted=Counted(),
        seen=np.zeros(4, np.int32),
        progress={"epoch": 0},
    )
    path = rx.CheckpointManager(restored, tmp_path / "saved").restore_or_initialize()
    assert path is not None
    assert restored.v.numpy().tolist() == [3, 3, 3]
    assert int(restored.step) == 3
    assert restored.counted.values == [0, 1, 2]
    assert restored.seen.tolist() == [1, 1, 1, 0]
    assert restored.progress == {"epoch": 2}


@pytest.mark.parametrize("way", ["run", "function", "run_steps"])
def test_programs_leave_kept_state_unchanged_and_overwrite_it_later(managed, others, way):
    strategy = rx.MirroredStrategy(jax.local_devices()[:2])
    with strategy.scope():
        v, step = rx.Variable(jnp.zeros(1000)), rx.Variable(0)
    data = iter(
        strategy.experimental_distribute_dataset(rx.data.from_arrays(np.ones((64, 1), np.float32)).batch(2))
    )

    def add(batch):
        v.assign_add(jnp.ones(1000))

    @rx.function
    def whole(batch):
        strategy.run(add, args=(batch,))

    def once():
        if way == "run":
            strategy.run(add, args=(next(data),))
        elif way == "function":
            whole(next(data))
        else:
            strategy.run_steps(add, data, 2)

    once()
    manager = managed(rx.Checkpoint(v=v, step=step), **often(step))
    manager.save()
    keeper = manager._keeper
    for _ in range(3):
        kept = keeper._boundary.held["v"].value
        expected = np.array(kept)
        once()
        assert not kept.is_deleted()
        np.testing.assert_array_equal(np.asarray(kept), expected)
        assert (v.numpy() != expected).all()
        del kept
        manager.save()
    manager.close()


def test_a_boundary_of_fit_has_the_state_of_the_loop(others, tmp_path):
    """Also where a callback takes the state out of the loop, which the other batches leave there."""

    def boundaries(takes_state):
        keras.utils.set_random_seed(0)
        strategy = rx.MirroredStrategy(jax.local_devices()[:2])
        with strategy.scope():
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.Adam(0.1), "mse")
        weights, seen = [], []

        class Look(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                boundary = StatePrograms.keeper()._boundary
                if boundary is not None:
                    kernels = {key: now.value for key, now in boundary.held.items() if key.endswith("kernel")}
                    seen.append([np.array(kernels[key]) for key in sorted(kernels)])

            def on_train_batch_end(self, batch, logs=None):
                if takes_state and batch % 2:
                    internals.sync(model)
                    weights.append([np.array(layers[n].kernel.value) for n in (0, 2)])

        callback = rx.keras.callbacks.CheckpointCallback(
            tmp_path / str(takes_state), save_freq=1000, save_on_failure=True
        )
        rows = np.random.default_rng(0).standard_normal((48, 4)).astype(np.float32)
        fit = {"batch_size": 8, "epochs": 2, "verbose": 0, "callbacks": [Look(), callback]}
        model.fit(rows, rows[:, :1], **fit)
        return seen, weights

    (seen, _), (seen_too, weights) = boundaries(False), boundaries(True)
    assert len(seen) == 11
    for one, other in zip(seen, seen_too, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
    for now, then in zip(seen_too[1::2], weights, strict=False):
        np.testing.assert_array_equal(now[0], then[0])
        np.testing.assert_array_equal(now[1], then[1])


def test_programs_of_fit_are_the_same_to_the_bit_with_and_without(tmp_path, others):
    def trained(**options):
        keras.utils.set_random_seed(1)
        strategy = rx.MirroredStrategy(jax.local_devices()[:2])
        with strategy.scope():
            model = keras.Sequential(
                [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
            )
            model.compile(keras.optimizers.Adam(0.05), "mse")
        rows = np.random.default_rng(0).standard_normal((33, 4)).astype(np.float32)
        callback = rx.keras.callbacks.CheckpointCallback(tmp_path / str(options), save_freq=1000, **options)
        model.fit(rows, rows[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[callback])
        return [np.asarray(variable.value) for variable in model.variables]

    for one, other in zip(trained(), trained(save_on_failure=True), strict=True):
        np.testing.assert_array_equal(one, other)


def test_reader_sees_objects_that_are_added_replaced_and_built_later():
    strategy = rx.MirroredStrategy(jax.local_devices()[:2])
    checkpoint = rx.Checkpoint(state={"a": jnp.zeros(2)}, number=1)
    reader = StateReader(checkpoint)
    assert set(reader.read()[2]) == {"state/a"}
    checkpoint.state = {"a": jnp.ones(2), "b": jnp.ones(1)}
    _, _, held, states = reader.read()
    assert set(held) == {"state/a", "state/b"}
    assert set(states) == {"number"}
    checkpoint.number = 2
    assert reader.read()[3]["number"].as_json() == [2]
    checkpoint.v = rx.Variable(1.0)
    assert "v" in reader.read()[2]
    checkpoint.v = rx.Variable(2.0)
    assert float(reader.read()[2]["v"].value) == 2.0
    with strategy.scope():
        checkpoint.layer = keras.layers.Dense(2)
        assert not any(key.startswith("layer") for key in reader.read()[2])
        checkpoint.layer.build((None, 3))
    assert {key for key in reader.read()[2] if key.startswith("layer")} == {"layer/kernel", "layer/bias"}
    checkpoint.items = [rx.Variable(1.0)]
    assert "items/0" in reader.read()[2]
    checkpoint.items.append(rx.Variable(1.0))
    assert "items/1" in reader.read()[2]


def test_reader_keeps_no_old_array_alive():
    checkpoint = rx.Checkpoint(state={"a": jnp.zeros(2)}, v=rx.Variable(jnp.zeros(3)))
    reader = StateReader(checkpoint)
    old = [weakref.ref(checkpoint.state["a"]), weakref.ref(checkpoint.v.value)]
    reader.read()
    checkpoint.state = {"a": jnp.ones(2)}
    checkpoint.v.assign(jnp.ones(3))
    reader.read()
    assert [one() for one in old] == [None, None]


def test_array_that_the_program_donates_itself_is_an_error(managed):
    step = rx.Variable(0)
    checkpoint = rx.Checkpoint(state=jnp.zeros(4))
    manager = managed(checkpoint, **often(step))
    manager.save()
    checkpoint.state = jax.jit(lambda x: x + 1, donate_argnums=0)(checkpoint.state)
    with pytest.raises(DonatedError, match="save_on_failure keeps 'state'"):
        manager.save()


def test_python_states_that_differ_are_exchanged_and_saved_for_each_process(managed, others, tmp_path):
    counted = Counted()
    step = rx.Variable(0)
    manager = managed(rx.Checkpoint(counted=counted, step=step), **often(step))
    manager.save()
    assert others.gathered == ["boundary digests"]
    others.answer = lambda topic, value: (
        {**value, "states": {"counted": "other"}} if "digests" in topic else {"counted": [[7, 7]]}
    )
    counted.values.append(1)
    manager.save()
    counted.values.append(2)
    manager.save()
    assert others.gathered == ["boundary digests", "boundary digests", "boundary states", "boundary states"]
    saved_by(others)
    manifest = json.loads((tmp_path / "saved" / "ckpt-2" / "manifest.json").read_text())
    assert manifest["contents"]["states"]["counted"] == [[[1, 2]], [[7, 7]]]


def test_object_that_only_another_process_keeps_is_an_error(managed, others):
    step = rx.Variable(0)
    manager = managed(rx.Checkpoint(step=step), **often(step))
    manager.save()
    others.answer = lambda topic, value: (
        {**value, "objects": "other"} if "digests" in topic else {**value, "extra": "float32[3]"}
    )
    with pytest.raises(InvalidArgumentError, match=r"'extra' is the first that differs \(.*float32\[3\]\)"):
        manager.save()


def test_processes_compare_rarely(managed, others):
    step = rx.Variable(0)
    manager = managed(rx.Checkpoint(step=step, counted=Counted()), **often(step))
    for _ in range(20):
        manager.save()
    assert others.gathered == ["boundary digests"] * 5  # the 1st, 2nd, 4th, 8th and 16th


def test_program_that_marks_no_boundary_is_an_error(managed, others):
    strategy = rx.MirroredStrategy(jax.local_devices()[:2])
    with strategy.scope():
        v = rx.Variable(0.0)
    manager = managed(rx.Checkpoint(v=v))
    for _ in range(MOST_PROGRAMS_WITHOUT):
        strategy.run(lambda: v.assign_add(1.0))
    with pytest.raises(NoBoundaryError, match=r"100 training programs .*manager\.save\(\)"):
        strategy.run(lambda: v.assign_add(1.0))
    manager.save()
    strategy.run(lambda: v.assign_add(1.0))
    assert float(v) == MOST_PROGRAMS_WITHOUT + 1


def test_fit_without_the_callback_is_such_a_program(managed, others):
    strategy = rx.MirroredStrategy(jax.local_devices()[:2])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    managed(rx.Checkpoint(model=model))
    rows = np.ones((2 * MOST_PROGRAMS_WITHOUT, 2), np.float32)
    with pytest.raises(NoBoundaryError, match="CheckpointCallback"):
        model.fit(rows, rows[:, :1], batch_size=1, verbose=0)


def test_divided_state_is_an_error_when_the_manager_is_made(managed, others, monkeypatch):
    monkeypatch.setattr("replicax._src.checkpoint.agreement.names", lambda: others.names)
    strategy = rx.MirroredStrategy(jax.local_devices()[:2])
    with strategy.scope():
        total = rx.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
    with pytest.raises(UnsupportedError, match="divided over the processes"):
        managed(rx.Checkpoint(total=total))


def test_second_manager_is_an_error_until_the_first_is_closed(managed, others):
    step = rx.Variable(0)
    first = managed(rx.Checkpoint(step=step))
    with pytest.raises(InvalidArgumentError, match="is not closed"):
        managed(rx.Checkpoint(step=step))
    first.close()
    second = managed(rx.Checkpoint(step=step))
    second.save()
    assert [message["kind"] for message in others.told] == ["keeps", "keeps_none", "keeps"]


def test_save_after_close_saves_with_one_warning_and_keeps_no_boundary(managed, others, tmp_path, caplog):
    strategy = rx.MirroredStrategy(jax.local_devices()[:2])
    with strategy.scope():
        v = rx.Variable(jnp.zeros(1000))
    manager = managed(rx.Checkpoint(v=v))
    manager.save()
    manager.close()
    assert caplog.text == ""
    for _ in range(2):
        strategy.run(lambda: v.assign_add(jnp.ones(1000)))
        assert manager.save() is not None
        manager.mark_boundary()
    assert caplog.text.count("save_on_failure has ended") == 1
    assert [message["kind"] for message in others.told] == ["keeps", "keeps_none"]
    assert StatePrograms.keeper() is None  # so programs may overwrite the state
    manager.wait()
    assert sorted(os.listdir(tmp_path / "saved")) == ["ckpt-1", "ckpt-2", "ckpt-3"]


def test_another_fit_with_the_same_manager_keeps_boundaries_again(others, tmp_path, caplog):
    strategy = rx.MirroredStrategy(jax.local_devices()[:2])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    manager = rx.CheckpointManager(rx.Checkpoint(model=model), tmp_path, save_on_failure=True)
    rows = np.ones((4, 2), np.float32)
    for epochs in (1, 2):
        callback = rx.keras.callbacks.CheckpointCallback(manager)
        model.fit(rows, rows[:, :1], epochs=epochs, verbose=0, callbacks=[callback])
    assert [message["kind"] for message in others.told] == ["keeps", "keeps_none"] * 2
    assert "has ended" not in caplog.text


@pytest.mark.parametrize("has_boundary", [False, True])
def test_only_a_process_with_a_boundary_logs_that_nobody_saved(managed, others, caplog, has_boundary):
    step = rx.Variable(0)
    manager = managed(rx.Checkpoint(step=step), **often(step))
    if has_boundary:
        manager.save()
    (listener,) = others.listeners
    listener({"kind": "freeze"})
    listener({"kind": "boundaries_over", "version": None, "saver": None})
    manager._keeper.wait_until_saved()
    assert ("No task saved" in caplog.text) == has_boundary


def test_a_process_that_has_said_its_version_keeps_that_boundary(managed, others, tmp_path):
    """Its step may have ended meanwhile; otherwise the others would wait for a state that it no longer has."""
    step = rx.Variable(0)
    manager = managed(rx.Checkpoint(step=step), **often(step))
    for _ in range(2):
        step.assign_add(1)
        manager.save()
    (listener,) = others.listeners
    assert listener({"kind": "freeze"}) == {"kind": "frozen", "version": 2}
    assert others.is_saving()
    others.is_failed = True
    step.assign_add(1)
    with pytest.raises(PeerFailureError, match="worker 1 died"):
        manager.save()
    listener({"kind": "save_boundary"})
    assert others.wait_for_save()
    restored = rx.Checkpoint(step=rx.Variable(0))
    rx.CheckpointManager(restored, tmp_path / "saved").restore_or_initialize()
    assert int(restored.step) == 2


def test_a_process_that_could_not_save_says_so(managed, others, tmp_path, monkeypatch):
    step = rx.Variable(0)
    manager = managed(rx.Checkpoint(step=step), **often(step))
    manager.save()
    step.assign_add(1)
    manager.save()
    manager.wait()
    before = sorted(os.listdir(tmp_path / "saved"))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("replicax._src.checkpoint.writing.write_pieces", full)
    assert others.fail() == 2
    assert not others.wait_for_save()
    assert sorted(os.listdir(tmp_path / "saved")) == before


def test_a_boundary_is_saved_into_a_directory_that_was_removed(managed, others, tmp_path):
    step = rx.Variable(0)
    manager = managed(rx.Checkpoint(step=step), **often(step))
    manager.save()
    step.assign_add(1)
    manager.save()
    manager.wait()
    shutil.rmtree(tmp_path / "saved")
    assert others.fail() == 2
    assert others.wait_for_save()
    restored = rx.Checkpoint(step=rx.Variable(0))
    restored.restore(rx.checkpoint.latest_checkpoint(tmp_path / "saved"))
    assert int(restored.step) == 1


def test_a_boundary_that_a_regular_save_has_written_is_not_written_again(managed, others, tmp_path):
    step = rx.Variable(0)
    manager = managed(rx.Checkpoint(step=step))
    path = manager.save()
    manager.wait()
    written_at = os.stat(path).st_mtime_ns
    saved_by(others)
    assert os.stat(path).st_mtime_ns == written_at
    assert os.listdir(tmp_path / "saved") == ["ckpt-1"]


def test_there_are_two_copies_of_the_state_and_no_third(managed, others):
    strategy = rx.MirroredStrategy(jax.local_devices()[:1])
    with strategy.scope():
        v, step = rx.Variable(jnp.zeros(100_000)), rx.Variable(0)

    def num_copies():
        return sum(array.size == 100_000 for array in jax.live_arrays())

    manager = managed(rx.Checkpoint(v=v, step=step), **often(step))
    manager.save()
    manager.wait()
    for _ in range(3):
        strategy.run(lambda: v.assign_add(jnp.ones(100_000)))
        assert num_copies() == 2
        manager.save()
        assert num_copies() == 1


def test_every_program_that_may_overwrite_state_asks_whether_it_is_kept():
    decided_by_its_caller = "round_programs.py"  # no strategy runs local programs yet
    files = [path for path in SOURCES.rglob("*.py") if "donate_argnums=" in path.read_text()]
    files = [path for path in files if path.name != decided_by_its_caller]
    assert len(files) >= 3
    assert [path.name for path in files if "StatePrograms" not in path.read_text()] == []


@pytest.mark.parametrize("change", ["epoch", "batch", "random"])
def test_noted_state_of_fit_is_that_of_the_moment(change):
    progress = FitProgress(2, 1, 5, {"loss": 0.5}, [0, 1], {"loss": [1.0, 0.7]})
    state = HostRandomState() if change == "random" else progress
    now, noted = state.get_state(), state.note_state()
    if change == "epoch":
        progress.end_epoch(2, {"loss": 0.4, "mae": 1.0}, has_stopped=True)
    elif change == "batch":
        progress.batch, progress.logs = 2, {"loss": 0.1}
    else:
        np.random.standard_normal(3)
        random.random()
    assert state.get_state() != now
    assert noted() == now


def test_alone_it_costs_nothing(tmp_path):
    v = rx.Variable(1.0)
    manager = rx.CheckpointManager(rx.Checkpoint(v=v), tmp_path, save_on_failure=True)
    manager.save()
    assert StatePrograms.keeper() is None
    manager.close()
