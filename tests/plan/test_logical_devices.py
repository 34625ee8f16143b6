"""Plans for strategies whose replicas have several devices, compared with a run. (For TPUs and GPUs:
``test_accelerators_logical_devices.py``.)"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from checks import message
from logical_training import F32, ROWS, WIDE, WIDTH, Training
from replicax import errors

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def training():
    return Training()


@pytest.fixture(scope="module")
def plan(training):
    return training.strategy.plan(training.step, args=(training.described,))


def test_memory_is_that_of_a_run(training, plan):
    strategy = training.strategy
    assert strategy.runner.num_programs == 0
    x = strategy.experimental_distribute_values_from_function(lambda _: np.ones((ROWS, WIDTH), np.float32))
    strategy.run(training.step, args=(x,))
    analysis = strategy.runner.last_launcher.lower([x.stored]).compile().memory_analysis()
    memory = plan.memory
    assert memory.arguments == analysis.argument_size_in_bytes == training.state_bytes + ROWS * WIDTH * F32
    assert memory.temporaries == analysis.temp_size_in_bytes
    assert memory.outputs == analysis.output_size_in_bytes
    assert memory.donated == analysis.alias_size_in_bytes == training.state_bytes


def test_collectives_and_layouts(plan):
    text, facts = str(plan), json.loads(plan.to_json())
    assert "4 × virtual CPU device of this machine, 2 replicas of 2 logical devices" in text
    assert (facts["num_replicas"], facts["num_logical_devices"], facts["num_devices"]) == (2, 2, 4)
    where = {a.name: a.split for a in plan.arrays if a.role == "variable"}
    assert where == {"up": (None, "logical"), "down": ("logical", None), "by hand": (None, "logical")}
    assert "dim 1 over logical" in text
    assert "dim 0 over logical" in plan.to_svg()
    over = {axis: [c for c in plan.compiled if c.axes == (axis,)] for axis in ("replica", "logical")}
    assert sum(map(len, over.values())) == len(plan.compiled)
    assert all(one.group_size == 2 for one in plan.compiled)
    # Gradients of each device's part; activations after the second layer.
    assert sum(c.bytes * c.count for c in over["replica"]) == pytest.approx(
        2 * WIDTH * WIDE * F32 / 2, abs=64
    )
    assert any(c.bytes == ROWS * WIDTH * F32 for c in over["logical"])
    assert "groups of 2 over logical" in text
    # Forward and backward, except for the gradient of the rows; each device computes half.
    assert plan.flops == {"float32": 5 * 2 * ROWS * WIDTH * WIDE / 2}


def test_more_replicas_and_other_logical_devices(training):
    larger = training.strategy.plan(training.step, args=(training.described,), topology="cpu:12")
    assert (larger.num_replicas, larger.num_logical_devices, larger.global_batch) == (6, 2, 6 * ROWS)
    assert larger.memory.arguments == training.state_bytes + ROWS * WIDTH * F32
    assert {(c.axes, c.group_size) for c in larger.compiled} == {(("replica",), 6), (("logical",), 2)}


@pytest.mark.long
def test_the_primes_of_logical_devices():
    training = Training(2, 4)
    found = training.strategy.plan(training.step, args=(training.described,), topology="cpu:12")
    assert (found.num_replicas, found.num_logical_devices) == (3, 4)
    assert found.memory.arguments == training.state_bytes + ROWS * WIDTH * F32
    assert {a.name: a.split for a in found.arrays}["up"] == (None, "logical_0+logical_1")
    assert (("logical_0", "logical_1"), 4) in {(c.axes, c.group_size) for c in found.compiled}


def test_fit(training):
    model, rows = training.model(), np.ones((4 * ROWS, WIDTH), np.float32)
    found = training.strategy.plan(model.fit, (rows, rows), {"batch_size": 2 * ROWS}, topology="cpu:4")
    by_name = {array.name.partition("/")[2]: array for array in found.arrays}
    for name in ("dense/kernel", "sequential_dense_kernel_momentum"):
        assert (by_name[name].split, by_name[name].device_bytes) == (
            (None, "logical"),
            WIDTH * WIDE * F32 // 2,
        )
    assert found.rows == ROWS
    losses = model.fit(rows, rows, batch_size=2 * ROWS, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    kernels = [v for v in [*model.variables, *model.optimizer.variables] if "kernel" in v.path]
    held = sum(v.value.addressable_shards[0].data.nbytes for v in kernels)
    assert (
        held == sum(a.device_bytes for a in found.arrays if "kernel" in a.name) == 6 * WIDTH * WIDE * F32 // 2
    )


# --- what is wrong --------------------------------------------------------------------------------------


def test_devices_that_do_not_form_complete_replicas(training):
    message(
        errors.TopologyError,
        lambda: training.strategy.plan(training.step, args=(training.described,), topology="cpu:5"),
        "'cpu:5' has 5 device(s)",
        "2 logical devices",
        "a multiple of 2",
    )


def test_unsplittable_values_and_ids_out_of_range(training):
    strategy = training.strategy

    def planned(fn):
        return lambda: strategy.plan(fn, args=(training.described,), topology="cpu:4")

    split = planned(lambda x: strategy.experimental_split_to_logical_devices(x[:, :5], [1, 2]))
    message(errors.InvalidArgumentError, split, "must be divisible", "Received: 5", "to 6")
    assign = planned(lambda x: strategy.experimental_assign_to_logical_device(x, 2))
    message(errors.InvalidArgumentError, assign, "got 2", "has 2 (0 to 1)")


def test_a_variable_without_a_value_that_does_not_divide(training):
    import keras

    with training.strategy.scope(), keras.StatelessScope(initialize_variables=False):
        layer = keras.layers.Dense(WIDE - 1)
        layer.build((None, WIDTH))
    try:
        message(
            errors.InvalidArgumentError,
            lambda: training.strategy.plan(lambda x: jnp.sum(layer(x)), args=(training.described,)),
            "dense",
            f"({WIDTH}, {WIDE - 1})",
            "not divisible by its 2 logical devices",
        )
    finally:
        keras.utils.clear_session()
