"""Donation copies an array that somebody else holds, once, and no other array."""

import gc
import weakref
from pathlib import Path

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.lowering import held_state, spmd
from replicax._src.strategies import running
from replicax._src.tracing.bindings import LateValues


@pytest.fixture(params=["one_device", "mirrored_2"])
def strategy(request):
    return (
        rx.OneDeviceStrategy("cpu:0")
        if request.param == "one_device"
        else rx.MirroredStrategy(["cpu:0", "cpu:1"])
    )


@pytest.fixture
def copies(monkeypatch):
    """A list that gets an entry for each array that is copied because somebody else holds it."""
    found = []

    def counting(original):
        def copy(value, sharding):
            found.append(value)
            return original(value, sharding)

        return copy

    for module, name in ((spmd, "own_copy"), (running, "own_copy"), (held_state, "own_copy")):
        monkeypatch.setattr(module, name, counting(getattr(module, name)))
    return found


def training(strategy):
    """A step of a Keras model with an ``rx.Variable``, and its variables."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        count = rx.Variable(0.0)
    x = strategy.replicate(np.ones((2, 3), np.float32))

    def step(x):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(jnp.sum(model(x) ** 2, axis=-1))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        count.assign_add(1.0)
        return loss

    def run():
        return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    run()  # which takes the variables over
    return run, [count, *model.variables, *optimizer.variables]


def test_a_training_loop_that_prints_losses_copies_nothing(strategy, copies):
    run, _ = training(strategy)
    copies.clear()
    for number in range(5):
        print(number, float(run()))
    assert copies == []


def test_values_that_are_read_and_released_are_not_copied(strategy, copies):
    run, variables = training(strategy)
    copies.clear()
    for _ in range(3):
        for variable in variables:
            float(jnp.sum(variable.value))
            str(variable)
        run()
    assert copies == []


def test_each_value_that_is_kept_is_copied_once(strategy, copies):
    run, variables = training(strategy)
    copies.clear()
    count, kernel, *_ = variables
    kept = [count.value, kernel.value, kernel.value]  # one array, read twice
    before = [np.array(value) for value in kept]
    run()
    assert len(copies) == 2
    for _ in range(3):
        run()
    assert len(copies) == 2
    for value, expected in zip(kept, before, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.fixture
def adoptions(monkeypatch):
    """A list that gets an entry for each value of which a program does not know that a program wrote it."""
    found = []
    original = spmd.adopt
    monkeypatch.setattr(spmd, "adopt", lambda *args: [found.append(args), original(*args)][1])
    return found


def taking_turns(strategy):
    """Two functions that run programs over common variables: one adds 1 to both, the other doubles the first."""
    with strategy.scope():
        first, second = rx.Variable(np.ones(3, np.float32)), rx.Variable(np.zeros(3, np.float32))

    def add():
        first.assign_add(jnp.ones(3))
        second.assign_add(jnp.ones(3))

    def double():
        first.assign(2 * first + 0 * second)

    runs = [lambda: strategy.run(add), lambda: strategy.run(double)]
    for run in runs:
        run()
    return runs, first, second


def test_programs_that_take_turns_copy_nothing(strategy, copies, adoptions):
    (add, double), first, second = taking_turns(strategy)
    copies.clear()
    adoptions.clear()
    for run in (add, double, add, add, double, double, add):
        run()
    assert copies == adoptions == []
    np.testing.assert_array_equal(first, np.full(3, 4 * (2 * (4 + 1) + 2) + 1))
    np.testing.assert_array_equal(second, np.full(3, 5.0))


def test_arrays_that_programs_replaced_are_let_go(strategy):
    (add, double), first, second = taking_turns(strategy)
    for run in (add, double, double, add, add):
        before = [weakref.ref(variable.value) for variable in (first, second)]
        run()
        run()
        assert before[0]() is None
        assert run is double or before[1]() is None


def test_variables_outlive_the_program_that_wrote_them(strategy):
    with strategy.scope():
        variable = rx.Variable(np.zeros(3, np.float32))

    def run_once(amount):
        strategy.run(lambda: variable.assign_add(amount * jnp.ones(3)) * 0)

    for amount in (1, 2, 3):
        run_once(amount)
        gc.collect()
    np.testing.assert_array_equal(variable, np.full(3, 6.0))


def test_train_on_batch_copies_only_kept_values(strategy, copies):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    rows = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    for _ in range(2):
        model.train_on_batch(*rows)

    def copied_weights():
        return [value.shape for value in copies if value.ndim]  # Keras resets metrics to new scalars

    copies.clear()
    for _ in range(3):
        print(float(model.train_on_batch(*rows)))
    assert copied_weights() == []
    kept = model.layers[0].kernel.value
    before = np.array(kept)
    for _ in range(3):
        model.train_on_batch(*rows)
    assert copied_weights() == [(3, 4)]
    np.testing.assert_array_equal(kept, before)


def test_donated_state_is_copied_if_it_is_kept(strategy, copies):
    options = rx.RunOptions(donate_args=(0,))

    def step(state):
        return {"w": state["w"] + 1}

    state = strategy.run(step, args=(strategy.replicate({"w": np.zeros(3, np.float32)}),), options=options)
    copies.clear()
    for _ in range(3):
        state = strategy.run(step, args=(state,), options=options)
    assert copies == []
    (kept,) = strategy.experimental_local_results(state["w"])[:1]
    state = strategy.run(step, args=(state,), options=options)
    assert len(copies) == 1
    assert kept.tolist() == [4, 4, 4]


def test_references_are_counted_in_one_place():
    folder = Path(rx.__file__).parent
    users = [file.name for file in folder.rglob("*.py") if "getrefcount" in file.read_text()]
    assert users == ["holders.py"]


def test_metrics_on_one_device_are_spread_once(monkeypatch):
    """Under CentralStorage the sum that a metric shows is on one device, and its components stay on the replicas."""
    spread = []
    original = spmd.spread_sum
    monkeypatch.setattr(spmd, "spread_sum", lambda *args: [spread.append(args), original(*args)][1])
    strategy = rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    with strategy.scope():
        metric = keras.metrics.Sum()

    def step():
        metric.update_state(jnp.ones(3))

    strategy.run(step)
    spread.clear()
    for _ in range(3):
        strategy.run(step)
    assert spread == []
    assert float(metric.result()) == 4 * 2 * 3


# --- values that variables get late ---------------------------------------------------------------------


class Amount:
    def __init__(self, value):
        self.value = value


def adding(strategy, variable, amount):
    """A step that adds an amount, whose end deletes the program."""
    one = strategy.replicate(np.float32(1))

    def step(x):
        variable.assign_add(x * amount.value)

    return lambda: strategy.run(step, args=(one,))


@pytest.fixture
def counted(monkeypatch):
    """The number of times that variables got late values."""
    times = []
    give = LateValues.give

    def counting():
        if LateValues._pending is not None:
            times.append(1)
        give()

    monkeypatch.setattr(LateValues, "give", counting)
    return times


def test_loop_gives_variables_their_values_when_one_is_read(strategy, counted):
    with strategy.scope():
        variable, other = rx.Variable(0.0), rx.Variable(5.0)
    run = adding(strategy, variable, Amount(2.0))
    for _ in range(3):
        run()
    counted.clear()
    run()
    assert LateValues._pending is not None
    assert len(counted) == 0
    assert (float(other), float(variable)) == (5, 8)
    assert len(counted) == 1


def test_assigned_value_replaces_a_late_one(strategy):
    with strategy.scope():
        variable = rx.Variable(0.0)
    run = adding(strategy, variable, Amount(2.0))
    for _ in range(3):
        run()
    variable.assign(1.0)
    run()
    assert float(variable) == 3


def test_two_programs_share_a_variable_with_late_values(strategy):
    with strategy.scope():
        variable = rx.Variable(0.0)
    first = adding(strategy, variable, Amount(1.0))
    second = adding(strategy, variable, Amount(10.0))
    for run in (first, first, second, second, first):
        run()
    assert float(variable) == 23


def test_variables_keep_their_late_values_when_the_program_is_deleted(strategy):
    with strategy.scope():
        variable = rx.Variable(0.0)
    amount = Amount(2.0)
    run = adding(strategy, variable, amount)
    for _ in range(3):
        run()
    assert LateValues._pending is not None
    del run, amount
    strategy.run(lambda: np.float32(0))  # the strategy holds its newest program
    gc.collect()
    assert LateValues._pending is None
    assert float(variable) == 6


def test_deleted_variables_free_their_late_values(strategy):
    with strategy.scope():
        variable = rx.Variable(np.zeros(3, np.float32))
    amount = Amount(2.0)
    run = adding(strategy, variable, amount)
    for _ in range(3):
        run()
    array = weakref.ref(LateValues._pending.values[0])
    del variable, run, amount
    strategy.run(lambda: np.float32(0))
    gc.collect()
    assert array() is None
