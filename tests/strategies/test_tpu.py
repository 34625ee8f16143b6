"""``TPUStrategy`` on virtual devices: replicas of several devices compute the numbers of one device."""

import gc
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from checks import message, tpu_strategy
from replicax._src.strategies import tpu_system
from replicax.errors import (
    DivergentCollectiveError,
    InvalidArgumentError,
    MixedStrategiesError,
    VariableError,
)
from split_models import LABELS, ROWS, model_of


@pytest.fixture(scope="module")
def strategy():
    """Two replicas of two devices."""
    return tpu_strategy(num_replicas=2, num_logical_devices=2)


def compiled(strategy, args=()):
    """The program that was traced last, as it is on each device."""
    return strategy.runner.last_launcher.lower(args).compile()


# --- making one -----------------------------------------------------------------------------------------


def test_the_guides_listing():
    tpu_address = "local"
    cluster_resolver = rx.cluster_resolver.TPUClusterResolver(tpu=tpu_address)
    rx.config.experimental_connect_to_cluster(cluster_resolver)
    rx.tpu.experimental.initialize_tpu_system(cluster_resolver)
    tpu_strategy = rx.TPUStrategy(cluster_resolver)
    assert tpu_strategy.num_replicas_in_sync == 8
    assert tpu_strategy.num_logical_devices == 1
    assert tpu_strategy.extended.worker_devices == tuple(jax.devices())
    assert tpu_strategy.cluster_resolver is cluster_resolver


def test_the_listing_of_logical_devices():
    # Initializing TPU system with 2 logical devices and 4 replicas.
    resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    rx.config.experimental_connect_to_cluster(resolver)
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    device_assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    strategy = rx.TPUStrategy(resolver, experimental_device_assignment=device_assignment)
    inputs = strategy.experimental_distribute_dataset([np.arange(6.0, dtype=np.float32)])
    iterator = iter(inputs)

    @rx.function
    def step_fn(inputs):
        output = jnp.add(inputs, inputs)
        output = strategy.experimental_assign_to_logical_device(output, 0)
        return output

    results = strategy.experimental_local_results(strategy.run(step_fn, args=(next(iterator),)))
    assert [r.tolist() for r in results] == [[0, 2], [4, 6], [8], [10]]


def test_the_older_name_and_its_arguments():
    resolver = rx.cluster_resolver.TPUClusterResolver("local")
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    assignment = rx.tpu.experimental.DeviceAssignment.build(topology, [2, 2, 1, 2])
    strategy = rx.experimental.TPUStrategy(resolver, device_assignment=assignment)
    assert isinstance(strategy, rx.TPUStrategy)
    assert (strategy.num_replicas_in_sync, strategy.num_logical_devices) == (1, 8)
    assert repr(strategy).count("+") == 7


def test_wrong_arguments():
    message(InvalidArgumentError, lambda: rx.TPUStrategy("local"), "TPUClusterResolver", "'local'")
    message(InvalidArgumentError, lambda: rx.TPUStrategy(None, [0, 1]), "DeviceAssignment", "[0, 1]")
    small = rx.tpu.experimental.Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
    other = rx.tpu.experimental.DeviceAssignment.build(small)
    resolver = rx.cluster_resolver.TPUClusterResolver("local")
    message(
        InvalidArgumentError,
        lambda: rx.TPUStrategy(resolver, other),
        "is for Topology(mesh_shape=[1, 1, 1, 1]",
    )


# --- what is wrong --------------------------------------------------------------------------------------


def test_assigning_to_a_device_keeps_values_and_warns_once(caplog):
    strategy = tpu_strategy(1, 2)
    with caplog.at_level(logging.WARNING, "replicax"):
        for _ in range(2):
            (result,) = strategy.experimental_local_results(
                strategy.run(lambda x: strategy.experimental_assign_to_logical_device(x, 1), (2.0,))
            )
            assert float(result) == 2
    assert ["has no effect" in record.getMessage() for record in caplog.records] == [True]
    for number in (-1, 2, None):
        message(
            InvalidArgumentError,
            lambda number=number: strategy.experimental_assign_to_logical_device(1.0, number),
            "must be lower then total number of logical devices per replica",
            f"got {number}",
            "has 2 (0 to 1)",
        )
    spmd = tpu_strategy(1, 2, experimental_spmd_xla_partitioning=True)
    message(
        InvalidArgumentError,
        lambda: spmd.experimental_assign_to_logical_device(1.0, 0),
        "Cannot assign a tensor to a logical device in SPMD mode",
        "experimental_spmd_xla_partitioning=False",
    )


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([2], ["must equal to the rank of `tensor.shape` (2: (3, 4))"]),
        ([2, 1], ["`partition_dimensions[0]` must be divisible", "Received: 3", "to 4"]),
        ([1, 1], ["number of logical devices (=2)", "their product is 1"]),
        ([1, 4], ["their product is 4"]),
        ([1, 0], ["of at least 1"]),
        (2, ["a list of whole numbers"]),
        ([1, "a"], ["a list of whole numbers"]),
    ],
)
def test_unsplittable_values(strategy, pieces, says):
    split = strategy.experimental_split_to_logical_devices
    message(InvalidArgumentError, lambda: split(jnp.ones((3, 4)), pieces), *says)
    message(InvalidArgumentError, lambda: strategy.run(lambda: split(jnp.ones((3, 4)), pieces)), *says)


def test_values_outside_a_program_do_not_change(strategy):
    value = strategy.experimental_distribute_values_from_function(lambda context: np.ones((2, 3)))
    for x in (value, np.ones((2, 3)), jnp.ones((2, 3))):
        assert strategy.experimental_split_to_logical_devices(x, [2, 1]) is x
        assert strategy.experimental_replicate_to_logical_devices(x) is x
    says = ["`partition_dimensions[1]`", "Received: 3"]
    message(
        InvalidArgumentError, lambda: strategy.experimental_split_to_logical_devices(value, [1, 2]), *says
    )


def test_variable_is_replicated_again(strategy):
    (w,) = made(strategy, (8, 6))
    strategy.experimental_split_to_logical_devices(w, [2, 1])
    assert strategy.experimental_replicate_to_logical_devices(w) is w
    assert w.value.is_fully_replicated


def test_variables_that_cannot_be_split(strategy):
    split = strategy.experimental_split_to_logical_devices
    with strategy.scope():
        v = rx.Variable(jnp.ones(4))
        counts = rx.Variable(jnp.ones(4), synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: v.assign_add(jnp.ones(4)))
    message(VariableError, lambda: split(v, [2]), "before the first step")
    message(VariableError, lambda: split(counts, [2]), "per replica")
    message(
        MixedStrategiesError,
        lambda: tpu_strategy(1, 2).experimental_split_to_logical_devices(v, [2]),
        "in the scope",
    )


# --- the numbers ----------------------------------------------------------------------------------------


def made(strategy, *shapes):
    """Variables of these shapes."""
    with strategy.scope():
        return [rx.Variable(np.cos(np.arange(np.prod(s), dtype=np.float32)).reshape(s)) for s in shapes]


def test_work_is_split(strategy):
    """Each device multiplies by half of the columns."""
    split = strategy.experimental_split_to_logical_devices
    weights = jnp.ones((8, 64))
    strategy.run(lambda x: jnp.sum(split(jnp.tanh(x @ weights), [1, 2])), (ROWS,))
    assert "f32[22,32]" in compiled(strategy, (ROWS, weights)).as_text()
    strategy.run(lambda x: jnp.sum(jax.vmap(lambda row: split(jnp.tanh(row @ weights), [2]))(x)), (ROWS,))
    assert "f32[22,32]" in compiled(strategy, (ROWS, weights)).as_text()
    strategy.run(lambda x: jnp.sum(jnp.tanh(x @ weights)), (ROWS,))
    assert "f32[22,32]" not in compiled(strategy, (ROWS, weights)).as_text()


def test_results_are_replicated(strategy):
    (v,) = made(strategy, (22, 64))

    def step(x):
        hidden = strategy.experimental_split_to_logical_devices(jnp.tanh(x @ jnp.ones((8, 64))), [1, 2])
        v.assign(hidden)
        return hidden, hidden * rx.get_replica_context().replica_id_in_sync_group

    for result in strategy.run(step, (ROWS,)):
        assert [part.shape for part in result.values] == [(22, 64)] * 2
    assert {shard.data.shape for shard in v.value.addressable_shards} == {(22, 64)}


@pytest.mark.rest
def test_random_numbers_and_the_replicas_number_in_a_loop(strategy):
    def step(x):
        replica = rx.get_replica_context().replica_id_in_sync_group

        def body(carry, key):
            noise = jax.random.normal(jax.random.fold_in(key, jax.lax.axis_index("replica")), (4,))
            return carry + noise * replica, None

        return jax.lax.scan(body, jnp.zeros(4), jax.random.split(jax.random.key(0), 3))[0] + x

    ours = strategy.run(step, args=(1.0,))
    mirrored = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    for a, b in zip(ours.values, mirrored.run(step, args=(1.0,)).values, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("num_rows", [8, 7])
def test_callbacks_and_prints_are_called_once_for_each_replica(strategy, num_rows, capfd):
    """This also holds if the replicas have different numbers of rows, and each evaluates the programs of both."""
    weights, seen = np.ones((8, 6), np.float32), []

    def step(x):
        hidden = strategy.experimental_split_to_logical_devices(jnp.tanh(x @ weights), [1, 2])
        jax.debug.callback(
            lambda rows, value: seen.append((int(rows), float(value))), len(x), jnp.sum(hidden)
        )
        jax.jit(lambda y: jax.debug.print("the sum is {:.3f}", jnp.sum(y)))(hidden)
        return jnp.sum(hidden)

    (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays(ROWS[:num_rows]).batch(num_rows))
    strategy.run(step, (batch,))
    jax.effects_barrier()
    parts = [np.tanh(rows @ weights) for rows in (ROWS[:4], ROWS[4:num_rows])]
    expected = sorted((len(part), float(part.sum())) for part in parts)
    assert [rows for rows, _ in sorted(seen)] == [rows for rows, _ in expected]
    np.testing.assert_allclose([v for _, v in sorted(seen)], [v for _, v in expected], rtol=1e-5)
    printed = [line for line in capfd.readouterr().out.splitlines() if "the sum is" in line]
    assert sorted(printed) == sorted(f"the sum is {value:.3f}" for _, value in expected)


def number():
    return jax.lax.axis_index("replica").astype(jnp.float32)


def in_scan(x):
    return jax.lax.scan(lambda carry, _: (carry + number(), None), x, None, length=2)[0]


def in_while(x):
    return jax.lax.while_loop(
        lambda state: state[0] < 2, lambda state: (state[0] + 1, state[1] + number()), (0, x)
    )[1]


def in_condition(x):
    return jax.lax.cond(x[0] > 0, lambda x: x + 2 * number(), lambda x: x, x)


def in_inner_functions(x):
    return jax.jit(jax.checkpoint(lambda x: x + 2 * number()))(x)


def in_vmap(x):
    return jax.vmap(lambda row: row + 2 * number())(x)


def in_a_gradient(x):
    def loss(x):
        jax.debug.callback(lambda row: None, x[0])
        return jnp.sum(x * x * (1 + number())) / 2

    return jax.grad(loss)(x) + (2 - x) * number()


def in_a_custom_derivative(x):
    @jax.custom_vjp
    def shifted(x):
        return x + 2 * number()

    shifted.defvjp(lambda x: (shifted(x), number()), lambda number, ct: (ct * (1 + number),))
    value, pullback = jax.vjp(shifted, x)
    return value + pullback(jnp.ones_like(x))[0] - 1 - number()


DEPTHS = (
    in_scan,
    in_while,
    in_condition,
    in_inner_functions,
    in_vmap,
    in_a_gradient,
    in_a_custom_derivative,
)


# JAX keeps no program with a callback for the next run. Each depth is tested in a run, and each way with a scan.
@pytest.mark.parametrize(
    ("shift", "via"),
    [
        pytest.param(shift, via, marks=() if via == "run" or shift is in_scan else pytest.mark.rest)
        for shift in DEPTHS
        for via in ("run", "rx.function", "run_steps")
    ],
)
def test_the_replicas_number_and_callbacks_at_any_depth(strategy, shift, via):
    """Each adds twice the replica's number, and is seen with it."""
    seen = []

    def step(x):
        x = shift(x)
        jax.lax.cond(
            jnp.sum(x) > -1,
            lambda x: jax.debug.callback(lambda first: seen.append(float(first)), x[0]),
            lambda x: None,
            x,
        )
        return x

    ones = np.ones(4, np.float32)
    if via == "run_steps":
        results = strategy.run_steps(
            step, iter(strategy.experimental_distribute_dataset([ones] * 2)), steps=2
        )
    else:
        run = rx.function(strategy.run) if via == "rx.function" else strategy.run
        results = run(step, args=(strategy.replicate(ones),))
    jax.effects_barrier()
    for number, value in enumerate(results.values):
        np.testing.assert_allclose(np.asarray(value).reshape(-1)[0], 1 + 2 * number)
    assert set(seen) == {1.0, 3.0}
    assert len(seen) == 2 * (2 if via == "run_steps" else 1)


# --- variables over logical devices -----------------------------------------------------------------------


def test_sharded_variable_stays_sharded(strategy):
    (w,) = made(strategy, (8, 6))
    before = w.numpy()
    assert strategy.experimental_split_to_logical_devices(w, [1, 2]) is w

    def is_sharded():
        return {shard.data.shape for shard in w.value.addressable_shards} == {(8, 3)}

    assert is_sharded()
    assert len(w.values) == 2
    np.testing.assert_array_equal(w.values[1], before)
    w.assign(before + 1)
    assert is_sharded()
    strategy.run(lambda: w.assign_sub(jnp.ones((8, 6))))
    assert is_sharded()
    rx.function(lambda: strategy.run(lambda: w.assign(w * 2)))()
    assert is_sharded()
    strategy.run_steps(lambda x: w.assign_add(0 * jnp.sum(w.value)), _iterator(strategy), steps=3)
    assert is_sharded()
    np.testing.assert_allclose(w.numpy(), before * 2, atol=1e-6)
    strategy.extended.update(w, lambda v: v.assign_add(jnp.ones((8, 6))))
    result = strategy.reduce("MEAN", strategy.run(lambda: w.value), axis=None)
    np.testing.assert_allclose(result, before * 2 + 1, atol=1e-6)


def _iterator(strategy):
    return iter(strategy.experimental_distribute_dataset([ROWS[:4]] * 3))


def test_memory_falls_as_computed():
    """Two matrices of 256 KiB and Adam's bindings, on one replica of 1, 2 and 4 devices."""
    used = {}
    for num_logical in (1, 2, 4):
        strategy = tpu_strategy(1, num_logical)
        variables = made(strategy, *[(256, 256)] * 6)
        for v in variables:
            strategy.experimental_split_to_logical_devices(v, [1, num_logical])

        def step(x, variables=variables):
            for v, m, s in zip(variables[:2], variables[2:4], variables[4:], strict=True):
                m.assign(0.9 * m + 0.1 * jnp.mean(x) * v)
                s.assign(0.9 * s + 0.1 * v * v)
                v.assign_sub(0.01 * m / (jnp.sqrt(s) + 1e-3))

        strategy.run(step, (jnp.float32(2),))
        used[num_logical] = compiled(strategy, (jnp.float32(2),)).memory_analysis().argument_size_in_bytes
    matrices, number = 6 * 256 * 256 * 4, 4
    assert used == {n: matrices // n + number for n in used}


def test_forgotten_variables_leave_nothing_behind(strategy):
    (w,) = made(strategy, (8, 6))
    strategy.experimental_split_to_logical_devices(w, [1, 2])
    assert strategy.bindings.layout_of(w) is not None
    number = id(w)
    del w
    gc.collect()
    assert number not in strategy.variable_placement.layouts._given


# --- Keras ------------------------------------------------------------------------------------------------


@pytest.mark.rest
def test_fit_equals_one_device_with_split_variables():
    one = model_of(rx.OneDeviceStrategy("cpu:0"))
    expected = one.fit(ROWS, LABELS, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    model = model_of(tpu_strategy(num_replicas=2, num_logical_devices=4))
    history = model.fit(ROWS, LABELS, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-6)
    divided = [v for v in [*model.variables, *model.optimizer.variables] if v.shape == (8, 16)]
    assert len(divided) == 3
    for v in divided:
        assert {shard.data.shape for shard in v.value.addressable_shards} == {(8, 4)}
    for ours, theirs in zip(model.weights, one.weights, strict=True):
        np.testing.assert_allclose(np.asarray(ours.value), theirs.value, rtol=1e-5, atol=1e-6)
    # Assigned weights are split again.
    for ours, theirs in zip(model.weights, one.weights, strict=True):
        ours.assign(np.asarray(theirs.value))
    loss, *_ = model.evaluate(ROWS, LABELS, batch_size=8, verbose=0)
    np.testing.assert_allclose(loss, one.evaluate(ROWS, LABELS, batch_size=8, verbose=0)[0], rtol=1e-5)
    assert {shard.data.shape for shard in divided[0].value.addressable_shards} == {(8, 4)}


def test_eager_runs_use_the_first_logical_device(strategy):
    seen = []

    def step(x):
        x = strategy.experimental_split_to_logical_devices(x, [2, 1])
        seen.append((float(x[0, 0]), x.devices()))
        return x + rx.get_replica_context().replica_id_in_sync_group

    result = strategy.run(step, args=(jnp.ones((2, 3)),), options=rx.RunOptions(eager=True))
    assert [float(v[0, 0]) for v in result.values] == [1]
    assert seen == [(1.0, {jax.devices()[0]})]


def test_collectives_of_a_single_replica():
    strategy = tpu_strategy(1, 2)

    def step(x):
        x = strategy.experimental_split_to_logical_devices(x, [1, 2])
        return jax.lax.psum(x * 2, "replica").sum(), jax.lax.all_gather(x, "replica").shape[0]

    total, num_replicas = strategy.run(step, args=(np.ones((4, 8), np.float32),))
    assert (float(total), num_replicas) == (64, 1)


def test_mark_under_a_varying_condition_raises():
    strategy = tpu_strategy(2, 2)
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )

    def step(number):
        rows = jnp.ones((4, 8)) * number
        split = strategy.experimental_split_to_logical_devices
        return jax.lax.cond(number > 0, lambda: split(rows, [1, 2]) @ rows.T, lambda: rows @ rows.T)

    with pytest.raises(DivergentCollectiveError, match=r"test_tpu\.py:\d+.*differs between replicas"):
        strategy.run(step, args=(numbers,))


def test_a_machine_without_tpus_and_virtual_devices_is_reported(monkeypatch, caplog):
    resolver = rx.cluster_resolver.TPUClusterResolver("local")
    rx.TPUStrategy(resolver)
    assert not caplog.text
    monkeypatch.setattr(tpu_system, "local_devices", lambda: jax.devices()[:1])
    assert rx.TPUStrategy(resolver).num_replicas_in_sync == 1
    assert "finds no TPU" in caplog.text
    assert "rx.config.set_local_devices(8)" in caplog.text
