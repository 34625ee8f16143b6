"""What a process counts for the status: time in programs, and time waiting for its own data or that of others."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.cluster import counters as counters_module
from replicax._src.cluster.counters import Counters, Span, counters
from replicax._src.cluster.figures import FIGURES, figures, loss_of


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(counters_module, "time", clock)
    return clock


def test_span_counts_what_has_not_ended(clock):
    span = Span()
    span.begin()
    clock.now += 3
    assert span.total_s == 3
    clock.now += 1
    span.end()
    clock.now += 10
    assert span.total_s == 4


def test_wait_for_the_batch_of_another_process_is_no_wait_for_own_data(clock):
    """The loop waits 5 s: the thread that reads ahead reads for 2 s, then waits 3 s for the others."""
    counted = Counters()
    counted.begin_reading()
    clock.now += 2
    counted.agreements.begin()
    clock.now += 3
    assert (counted.waited_for_data_s, counted.waited_for_others_s) == (2, 3)
    counted.agreements.end()
    counted.end_reading()
    counted.agreements.begin()  # of the next batch, for which nobody waits yet
    clock.now += 7
    assert (counted.waited_for_data_s, counted.waited_for_others_s) == (2, 3)
    counted.begin_reading()
    clock.now += 1
    counted.end_reading()
    assert (counted.waited_for_data_s, counted.waited_for_others_s) == (2, 4)


@pytest.mark.parametrize(
    ("logged", "shown"),
    [
        (None, None),
        (0.5, 0.5),
        (jnp.float32(0.25), 0.25),
        (np.nan, "nan"),
        (-jnp.inf, "-inf"),
        ("no number", None),
        (np.ones(2), None),
    ],
    ids=str,
)
def test_loss_is_a_number_that_json_can_hold(logged, shown):
    counted = Counters()
    counted.loss = logged
    assert loss_of(counted) == shown


def test_loss_that_is_not_computed_yet_leaves_the_last_one():
    counted = Counters()
    counted.loss = jnp.float32(2.0)
    assert loss_of(counted) == 2.0
    counted.loss = deleted = jnp.float32(3.0)
    deleted.delete()
    assert loss_of(counted) == 2.0


def test_loops_count_batches_and_rows_and_show_their_loss():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = np.arange(10, dtype=np.float32)
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(rows).batch(4))
    before = figures()
    runs = counters.num_runs
    for batch in dataset:
        loss = strategy.reduce("MEAN", strategy.run(lambda x: x.sum(), args=(batch,)), axis=None)
        assert rx.summary.scalar("loss", loss) is False  # there is no writer
    jax.block_until_ready(loss)
    after = figures()
    assert set(after) == set(FIGURES)
    assert counters.num_batches >= 3
    assert after["examples"] - (before["examples"] or 0) == 10
    assert counters.num_runs - runs == 3
    assert after["loss"] == float(loss)
    assert after["data_s"] >= before["data_s"]
    assert after["device_s"] == before["device_s"], "it does not wait for its programs"


def test_steps_that_run_together_count_one_by_one():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.ones(12, np.float32)).batch(2))
    before = counters.num_batches, counters.num_examples
    strategy.run_steps(lambda x: x.sum(), iter(dataset), 5)
    assert (counters.num_batches - before[0], counters.num_examples - before[1]) == (5, 10)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("is_distributed", [False, True], ids=["arrays", "distributed"])
def test_fit_counts_its_batches_and_shows_its_loss(steps_per_execution, is_distributed):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    rows = np.arange(20, dtype=np.float32)[:, None]
    dataset = rx.data.from_arrays((rows, rows)).batch(4)
    data = strategy.experimental_distribute_dataset(dataset) if is_distributed else dataset
    before = counters.num_batches, counters.num_examples
    history = model.fit(data, epochs=2, verbose=0)
    assert (counters.num_batches - before[0], counters.num_examples - before[1]) == (10, 40)
    assert loss_of(counters) == pytest.approx(history.history["loss"][-1])
    model.evaluate(data, verbose=0)
    assert loss_of(counters) == pytest.approx(history.history["loss"][-1]), "evaluation leaves it"
