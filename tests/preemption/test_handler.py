"""A training in one process that gets SIGTERM: what is saved when, and how its next run resumes."""

import itertools
import os
import queue
import signal
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax import errors
from replicax._src.preemption.guarded_steps import _Clock, _Countdown

pytestmark = pytest.mark.timeout(120)
PATIENCE_S = 60
Config = rx.experimental.TerminationConfig


class Training:
    """A program that can run repeatedly on one directory."""

    def __init__(self, folder, config=None, strategy=None, **more):
        self.strategy = strategy or rx.MirroredStrategy(["cpu:0", "cpu:1"])
        with self.strategy.scope():
            self.state = rx.Variable(jnp.zeros(()))
        data = np.arange(40, dtype=np.float32)
        self.dataset = self.strategy.experimental_distribute_dataset(rx.data.from_arrays(data).batch(2))
        self.iterator = iter(self.dataset)
        self.checkpoint = rx.Checkpoint(state=self.state, iterator=self.iterator, **more)
        self.handler = rx.experimental.PreemptionCheckpointHandler(
            self.strategy.cluster_resolver, self.checkpoint, folder, config
        )
        self.watcher = rx.experimental.PreemptionWatcher()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.handler.close()
        self.watcher.close()
        self.iterator.close()

    def update(self, batch):
        total = rx.get_replica_context().all_reduce("SUM", jnp.sum(batch))
        self.state.assign(self.state * 0.5 + total)

    def read(self):
        self.step(next(self.iterator))

    def step(self, batch):
        self.strategy.run(self.update, args=(batch,))

    def told(self):
        """Sends SIGTERM, and waits until it has been noticed."""
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while self.watcher.preemption_message is None:  # it is told after the handler
            assert time.monotonic() < deadline
            time.sleep(0.001)


def expected(num_steps):
    state = np.float32(0)
    for step in range(num_steps):
        state = state * np.float32(0.5) + np.float32(4 * step + 1)
    return float(state)


def exit_code(call, *args):
    with pytest.raises(SystemExit) as raised:
        call(*args)
    return raised.value.code


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], "cpu:0"])
def test_training_resumes_where_it_was(tmp_path, devices):
    """The batch that was read for a step that has not started is not lost."""
    make = rx.OneDeviceStrategy if devices == "cpu:0" else rx.MirroredStrategy
    with Training(tmp_path, strategy=make(devices)) as first:
        for step in range(5):
            assert first.handler.total_run_calls == step
            first.handler.run(first.step, next(first.iterator))
        first.told()
        assert exit_code(first.handler.run, first.step, next(first.iterator)) == 42
        assert os.listdir(tmp_path) == ["ckpt-1"]
    with Training(tmp_path, strategy=make(devices)) as second:
        assert second.handler.total_run_calls == 6
        assert float(second.state) == expected(6)
        for _ in range(6, 20):
            second.handler.run(second.step, next(second.iterator))
        assert float(second.state) == expected(20)


def test_step_that_reads_its_own_data(tmp_path):
    """Then it is saved before the step, as in TensorFlow, so that work between two steps is included."""
    with Training(tmp_path) as first:
        for _ in range(5):
            first.handler.run(first.read)
        first.told()
        first.state.assign(100.0)
        assert exit_code(first.handler.run, first.read) == 42
    with Training(tmp_path) as second:
        assert second.handler.total_run_calls == 5
        assert float(second.state) == 100
        second.handler.run(second.read)
        assert float(second.state) == 50 + 4 * 5 + 1


def test_without_a_function(tmp_path):
    with Training(tmp_path) as first:
        for _ in range(4):
            first.step(next(first.iterator))
            first.handler.save_checkpoint_if_preempted()
        first.told()
        first.step(next(first.iterator))
        assert exit_code(first.handler.save_checkpoint_if_preempted, 77) == 42
        assert os.listdir(tmp_path) == ["ckpt-77"]
    with Training(tmp_path) as second:
        assert second.handler.total_run_calls == 5
        assert float(second.state) == expected(5)


def test_loop_whose_progress_is_saved_state(tmp_path):
    class Counted(Training):
        def update(self, batch):
            super().update(batch)
            self.number.assign_add(1)

    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        number = rx.Variable(jnp.zeros((), int))
    Counted.number = number
    compiled = []

    def loop(training, is_told):
        step = rx.function(training.step)
        compiled.append(step)
        with training.handler.watch_preemption_scope():
            while int(number) < 12:
                if int(number) == 7 and is_told:
                    training.told()
                step(next(training.iterator))

    with Counted(tmp_path, strategy=strategy, number=number) as first:
        assert exit_code(loop, first, True) == 42
        first.step(next(first.iterator))  # outside nothing is watched
    number.assign(0)
    with Counted(tmp_path, strategy=strategy, number=number) as second:
        assert int(number) == 8  # the step whose batch had been read
        loop(second, False)
        assert float(second.state) == expected(12)


def test_the_last_save_begins_so_early_that_it_can_end_within_the_grace_period():
    signals = queue.Queue()
    barrier = SimpleNamespace(signal=lambda text, *, is_final: signals.put(is_final))
    _Countdown(barrier, SimpleNamespace(margin_s=3600.0), grace_s=3600.0).begin("SIGTERM")
    assert [signals.get(timeout=30) for _ in range(2)] == [False, True]


def test_time_for_six_steps_and_two_saves_is_kept_before_the_end_of_the_grace_period():
    clock = _Clock()
    for step_s in (100.0, 1.0, 4.0, 2.0):  # the first includes compilation
        clock.note_step(step_s)
    assert clock.margin_s == 6 * 2.0
    for save_s in (5.0, 3.0):
        clock.note_save(save_s)
    assert clock.margin_s == 6 * 2.0 + 2 * 5.0


@pytest.mark.rest
def test_a_grace_period(tmp_path):
    """It is saved at once, and again before the time is over."""
    with Training(tmp_path, Config(grace_period=4.0)) as training:
        training.handler.run(training.read)
        training.told()
        told_at = time.monotonic()
        training.handler.run(training.read)
        assert os.listdir(tmp_path) == ["ckpt-1"]

        at = [time.monotonic()]

        def go_on():
            while time.monotonic() < told_at + PATIENCE_S:
                at.append(time.monotonic())
                training.handler.run(lambda: time.sleep(0.01))

        assert exit_code(go_on) == 42
        at.append(time.monotonic())
        longest_s = max(
            after - before for before, after in itertools.pairwise(at)
        )  # or others had their turn
        assert 1 < time.monotonic() - told_at < 4 + longest_s
        assert "ckpt-2" in os.listdir(tmp_path)


def test_state_without_new_steps_is_not_saved_again(tmp_path):
    saves = []
    with Training(tmp_path) as first:
        first.handler.run(first.step, next(first.iterator))
        first.told()
        exit_code(first.handler.run, lambda: None)
    with Training(tmp_path) as second:  # restored, and told again before it has run anything
        second.told()
        assert exit_code(second.handler.run, lambda: saves.append(1)) == 42
        assert not saves
        assert os.listdir(tmp_path) == ["ckpt-1"]


def test_own_functions(tmp_path):
    """A watcher in place of SIGTERM, ``save_fn`` in place of the checkpoint, and an ``exit_fn`` that continues."""
    must_end, calls = threading.Event(), []
    config = Config(must_end.is_set, lambda: calls.append("exit"), None, lambda *args: calls.append(args))
    with Training(tmp_path, config) as training:
        training.handler.run(calls.append, 1)
        must_end.set()
        deadline = time.monotonic() + PATIENCE_S
        while "exit" not in calls and time.monotonic() < deadline:
            training.handler.run(time.sleep, 0.01)
        assert calls == [1, (), "exit"]
        training.handler.run(calls.append, 2)  # it is not saved again
        assert calls == [1, (), "exit", 2]
        assert os.listdir(tmp_path) == []


def test_error_of_the_watcher_is_raised(tmp_path):
    def watch():
        raise ConnectionError("no metadata")

    def train(training):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            training.handler.run(time.sleep, 0.01)

    with Training(tmp_path, Config(watch)) as training, pytest.raises(ConnectionError, match="no metadata"):
        train(training)


def test_an_error_of_a_step_changes_nothing(tmp_path):
    with Training(tmp_path) as training:
        with pytest.raises(ZeroDivisionError):
            training.handler.run(lambda: 1 / 0)
        assert training.handler.total_run_calls == 0
        assert training.handler.run(lambda x: x + 1, 4) == 5
        assert training.handler.total_run_calls == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"step_counter": lambda: 1, "checkpoint_interval": 100}],
    ids=["alone", "with an interval"],
)
def test_manager_is_used_unchanged(tmp_path, options):
    """On preemption it saves, also before ``checkpoint_interval`` has passed."""
    strategy = rx.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        v = rx.Variable(0.0)
    manager = rx.CheckpointManager(rx.Checkpoint(v=v), tmp_path, 2, checkpoint_name="mine", **options)
    manager.save(checkpoint_number=3)  # by a program without a handler
    manager.wait()
    with rx.experimental.PreemptionCheckpointHandler(None, manager) as handler:
        assert handler.total_run_calls == 0
        watcher = rx.experimental.PreemptionWatcher()
        handler.run(strategy.run, lambda: v.assign_add(1.0))
        os.kill(os.getpid(), signal.SIGTERM)
        while watcher.preemption_message is None:
            time.sleep(0.001)
        assert watcher.preemption_message == "this process: SIGTERM"
        watcher.block_until_worker_exit()  # that is not another task
        exit_code(handler.run, lambda: None)
        watcher.close()
    assert sorted(os.listdir(tmp_path)) == ["mine-3", "mine-4"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda handler, checkpoint, folder: handler(None, checkpoint), "needs `checkpoint_dir`"),
        (lambda handler, checkpoint, folder: handler(None, "ckpt", folder), "takes an rx.Checkpoint or"),
        (
            lambda handler, checkpoint, folder: handler(
                None, rx.CheckpointManager(checkpoint, folder), folder / "other"
            ),
            "Leave checkpoint_dir out",
        ),
        (
            lambda handler, checkpoint, folder: handler(None, checkpoint, folder, {"grace_period": 3}),
            "must be an rx.experimental.TerminationConfig",
        ),
        (
            lambda handler, checkpoint, folder: handler("worker", checkpoint, folder),
            "strategy.cluster_resolver",
        ),
        (lambda *_: Config(grace_period=-1), "grace_period must be a number of seconds"),
        (lambda *_: Config(exit_fn=42), "exit_fn must be a function"),
    ],
)
def test_bad_arguments(tmp_path, make, text):
    checkpoint = rx.Checkpoint(v=rx.Variable(0.0))
    before = signal.getsignal(signal.SIGTERM)
    message(
        errors.InvalidArgumentError,
        lambda: make(rx.experimental.PreemptionCheckpointHandler, checkpoint, tmp_path),
        text,
    )
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_grace_period_may_be_a_number_of_numpy():
    assert Config(grace_period=np.float32(2.5)).grace_s == 2.5
    assert Config(grace_period=np.int64(3)).grace_s == 3.0


def test_invalid_steps_raise(tmp_path):
    handler = rx.experimental.PreemptionCheckpointHandler(None, rx.Checkpoint(v=rx.Variable(0.0)), tmp_path)
    message(errors.InvalidArgumentError, lambda: handler.run(3.5), "the function of a step", "3.5")
    assert handler.total_run_calls == 0
    handler.close()


def test_deleted_handler_restores_sigterm(tmp_path):
    """The program after the training can be ended as before."""
    before = signal.getsignal(signal.SIGTERM)
    handler = rx.experimental.PreemptionCheckpointHandler(None, rx.Checkpoint(v=rx.Variable(0.0)), tmp_path)
    assert signal.getsignal(signal.SIGTERM) != before
    handler.close()
    handler.close()
    assert signal.getsignal(signal.SIGTERM) == before
