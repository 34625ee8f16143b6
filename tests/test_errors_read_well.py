"""Bad input raises an error of the right type that says what it got, what is allowed and what to do.

Each test reads the message, and checks that nothing was lost: the contexts are clean, the state is unchanged, and the
next call works.
"""

import os
import pickle
import subprocess
import sys
import traceback

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax import errors
from replicax._src.strategies.strategy import Strategy


@pytest.fixture(params=["mirrored", "central_storage"])
def strategy(request):
    if request.param == "mirrored":
        return rx.MirroredStrategy(["cpu:0", "cpu:1"])
    return rx.CentralStorageStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(autouse=True)
def contexts_are_clean_afterwards(request):
    yield
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()
    assert rx.get_replica_context() is not None


def test_error_of_an_unbatched_dataset_is_the_same_in_another_process():
    with pytest.raises(errors.UnbatchedDatasetError) as found:
        iter(rx.MirroredStrategy(2).experimental_distribute_dataset([np.float32(1)])).get_next()
    assert str(found.value).count("Call the `batch` method") == 1
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)


def values_of(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.arange(2.0, dtype=np.float32) + context.replica_id_in_sync_group
    )


# --- devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: rx.MirroredStrategy(["cpu:0", "cpu:9"]),
        lambda: rx.OneDeviceStrategy("cpu:9"),
        lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:9"]),
        lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:9"),
    ],
    ids=["mirrored", "one_device", "central_storage", "parameter_device"],
)
def test_device_that_does_not_exist(make):
    message(
        errors.DeviceError,
        make,
        "'cpu:9' does not exist",
        "8 cpu device(s)",
        "cpu:0, cpu:1",
        "set_local_devices(n)",
    )


def test_device_of_another_kind():
    message(
        errors.DeviceError,
        lambda: rx.OneDeviceStrategy("/gpu:0"),
        "'/gpu:0' does not exist",
        "0 gpu device(s)",
    )
    message(
        errors.DeviceError, lambda: rx.OneDeviceStrategy("cpu zero"), "'cpu zero' is not a device", "'cpu:0'"
    )
    message(errors.DeviceError, lambda: rx.MirroredStrategy([0, 1]), "0 is not a device", "jax.Device")


@pytest.mark.parametrize("devices", [["cpu:1", "cpu:1"], ["/cpu:1", "/device:CPU:1"], ["cpu:1", "jax"]])
def test_device_that_repeats(devices):
    devices = [jax.devices()[1] if device == "jax" else device for device in devices]
    for kind in (rx.MirroredStrategy, rx.CentralStorageStrategy):
        message(
            errors.DeviceError,
            lambda kind=kind: kind(devices),
            "No duplicates allowed",
            "cpu:1",
            "set_local_devices(n)",
        )


def test_no_devices():
    message(errors.DeviceError, lambda: rx.MirroredStrategy([]), "`devices` is empty", "at least one")


def test_a_device_of_a_kind_that_this_jax_does_not_have_names_the_package_to_install():
    for device, package in (("gpu:0", "jax[cuda13]"), ("/device:TPU:0", "jax[tpu]")):
        message(
            errors.DeviceError,
            lambda device=device: rx.MirroredStrategy([device]),
            f'pip install "{package}"',
        )


@pytest.mark.parametrize("number", [0, -1, 9])
def test_unavailable_numbers_of_devices(number):
    for make in (
        lambda: rx.MirroredStrategy(number),
        lambda: rx.MirroredStrategy(num_devices=number),
        lambda: rx.CentralStorageStrategy(number),
    ):
        message(errors.DeviceError, make, repr(number), "this process has 8", "set_local_devices(n)")


def test_devices_that_are_neither_names_nor_a_number():
    for wrong in (2.0, True):
        message(
            errors.DeviceError,
            lambda wrong=wrong: rx.MirroredStrategy(wrong),
            f"a number of devices, got {wrong}",
        )
    both = lambda: rx.MirroredStrategy(["cpu:0"], num_devices=1)  # noqa: E731
    message(errors.InvalidArgumentError, both, "devices=['cpu:0'] and num_devices=1")


# --- arguments of run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [3, "x", {"x": 1}, None], ids=repr)
def test_args_must_be_a_list(strategy, args):
    message(
        errors.InvalidArgumentError,
        lambda: strategy.run(lambda x: x, args=args),
        "positional args must be a list or tuple",
        str(type(args)),
        "args=(value,)",
    )
    assert issubclass(errors.InvalidArgumentError, ValueError)  # TensorFlow's type


@pytest.mark.parametrize("how", ["run", "eager", "in a function"])
def test_a_batch_in_place_of_a_tuple_of_arguments(strategy, how):
    batch = (values_of(strategy), values_of(strategy))
    options = rx.RunOptions(eager=how == "eager")

    def step(batch):
        return batch[0] + batch[1]

    def call(args):
        if how == "in a function":
            return rx.function(lambda: strategy.run(step, args=args))()
        return strategy.run(step, args=args, options=options)

    message(errors.InvalidArgumentError, lambda: call(batch), "step(batch)", "length 2", "args=(value,)")
    components = [x.tolist() for x in strategy.experimental_local_results(call((batch,)))]
    assert components == ([[0, 2, 2, 4]] if how == "eager" else [[0, 2], [2, 4]])


@pytest.mark.parametrize("wrap", [lambda fn: fn, rx.function], ids=["plain", "function"])
def test_arguments_that_do_not_fit_the_function(strategy, wrap):
    @wrap
    def step(x, y, *, z=0):
        return x

    for args, kwargs in (((1,), {}), ((1, 2), {"w": 3}), ((1, 2, 3), {})):
        call = lambda args=args, kwargs=kwargs: strategy.run(step, args, kwargs)  # noqa: E731
        text = message(errors.InvalidArgumentError, call, "step(x, y, *, z=0)", f"length {len(args)}")
        assert "(value,)" not in text
    with pytest.raises(TypeError, match="unsupported operand"):  # the function's own
        strategy.run(lambda x: x + "text", args=(jnp.ones(2),))


def test_unknown_axis_name(strategy):
    with pytest.raises(NameError, match="batch") as caught:
        strategy.run(lambda x: jax.lax.psum(x, "batch"), args=(jnp.ones(2),))
    assert "named 'replica'" in str(caught.value)
    with pytest.raises(NameError) as caught:
        strategy.run(lambda x: no_such_name, args=(jnp.ones(2),))  # noqa: F821
    assert "replica" not in str(caught.value)


def test_reduce_without_an_axis(strategy):
    for value in (values_of(strategy), jnp.ones(2)):
        message(
            errors.InvalidArgumentError,
            lambda value=value: strategy.reduce("SUM", value),
            "axis=None",
            "axis=0",
        )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rnu", "strategy.run"),
        ("num_replicas", "strategy.num_replicas_in_sync"),
        ("distribute_dataset", "strategy.experimental_distribute_dataset"),
        ("worker_devices", "strategy.extended.worker_devices"),
    ],
)
def test_unknown_name_on_a_strategy(strategy, name, meant):
    message(AttributeError, lambda: getattr(strategy, name), repr(name), f"Did you mean {meant}")
    assert not hasattr(strategy, name)


def test_a_name_of_older_tensorflow_on_a_strategy(strategy):
    name = "experimental_run_v2"
    message(AttributeError, lambda: getattr(strategy, name), repr(name), "Write strategy.run(fn, args=args")


def test_names_that_are_like_no_other_and_private_ones_get_no_suggestion(strategy):
    for name in ("qwertz", "_run"):
        assert "Did you mean" not in message(AttributeError, lambda name=name: getattr(strategy, name), name)


def test_names_of_other_objects_of_tensorflow_get_no_replacement_on_a_strategy(strategy):
    for name in ("lr", "numpy", "reset_states"):
        assert "Write" not in message(AttributeError, lambda name=name: getattr(strategy, name), name)


def test_a_name_that_arrays_have_and_variables_do_not():
    variable = rx.Variable(np.ones(3, np.float32))
    message(AttributeError, lambda: variable.sum(), "variable.value.sum", "jnp.sum(variable)")
    assert not hasattr(variable, "sum")
    assert float(variable.value.sum()) == 3
    assert "variable.value" not in message(AttributeError, lambda: variable.valuse, "valuse")


def test_a_misspelt_name_of_the_package_gets_a_suggestion():
    program = "import replicax as rx; rx.MirorredStrategy"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert "Did you mean: 'MirroredStrategy'?" in done.stderr  # Python's, where it prints a traceback


def test_an_attribute_error_inside_a_property_is_not_hidden():
    def make_topology():
        raise AttributeError("of its own")

    with pytest.raises(AttributeError, match="of its own"):
        Strategy(make_topology).num_replicas_in_sync


def test_args_is_an_array(strategy):
    message(
        errors.InvalidArgumentError,
        lambda: strategy.run(lambda x: x, args=jnp.ones(2)),
        "positional args must be a list or tuple",
        "args=(value,)",
    )


def test_other_arguments_of_run(strategy):
    invalid = errors.InvalidArgumentError
    message(invalid, lambda: strategy.run(3), "needs a function", "3")
    message(invalid, lambda: strategy.run(lambda: None, kwargs=[1]), "kwargs must be a dict", "list")
    message(invalid, lambda: strategy.run(lambda: None, options={"eager": True}), "rx.RunOptions", "dict")
    message(
        invalid,
        lambda: strategy.experimental_distribute_values_from_function(lambda _: "text"),
        "'text'",
        "array or a number",
    )
    message(
        invalid,
        lambda: strategy.experimental_distribute_values_from_function(
            lambda c: [1.0] * (1 + c.replica_id_in_sync_group)
        ),
        "differ in structure",
        "same pytree",
    )
    message(
        invalid,
        lambda: strategy.experimental_distribute_values_from_function(
            lambda c: np.zeros((1,) * (1 + c.replica_id_in_sync_group))
        ),
        "one rank and one dtype",
        "(1,)",
        "(1, 1)",
    )


def ragged(strategy, *sizes):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(sizes[context.replica_id_in_sync_group], np.float32)
    )


def test_replicas_that_return_different_structures(strategy):
    message(
        errors.StructureError,
        lambda: strategy.run(lambda x: [x] * x.shape[0], (ragged(strategy, 1, 2),)),
        "different structures on different replicas",
        "Return the same structure on all",
    )
    message(
        errors.StructureError,
        lambda: strategy.run(lambda x: "short" if x.shape[0] < 2 else "long", (ragged(strategy, 1, 2),)),
        "'short'",
        "'long'",
        "Return arrays where replicas differ",
    )


def test_replicas_that_do_not_communicate_alike(strategy):
    def step(x):
        return rx.get_replica_context().all_reduce("SUM", jnp.sum(x)) if x.shape[0] > 1 else jnp.sum(x)

    with pytest.raises(errors.StructureError) as caught:
        strategy.run(step, (ragged(strategy, 1, 2),))
    assert "collectives" in str(caught.value) or "exchanges" in str(caught.value)


# --- reduce and gather --------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0])
def test_reduce_of_a_plain_value(strategy, axis):
    message(
        errors.ReductionError,
        lambda: strategy.reduce("SUM", jnp.array([3.0, 4.0]), axis=axis),
        "non-DistributedValues value",
        "3.",
        "cannot be reduced with the given reduce op ReduceOp.SUM",
        "strategy.run",
    )
    assert float(strategy.reduce("MEAN", 3.0, axis=None)) == 3.0


def test_reduce_of_a_mirrored_variable(strategy):
    with strategy.scope():
        v = rx.Variable(2.0, name="weights")
    message(
        errors.ReductionError, lambda: strategy.reduce("SUM", v, axis=None), "'weights'", "mirrored", "MEAN"
    )
    assert float(strategy.reduce("MEAN", v, axis=None)) == 2.0


def test_reduce_of_a_replicated_value(strategy):
    text = message(
        errors.ReductionError,
        lambda: strategy.reduce("SUM", strategy.replicate(jnp.ones(2)), axis=None),
        "Mirrored",
        "cannot be reduced",
    )
    assert "ReduceOp.SUM" in text


def test_reduce_of_other_things(strategy):
    values = values_of(strategy)
    reduction = errors.ReductionError
    flags = strategy.run(lambda x: x > 1, (values,))
    message(
        reduction, lambda: strategy.reduce("SUM", flags, axis=None), "bool", "sums and means need numbers"
    )
    message(
        reduction,
        lambda: strategy.reduce("SUM", ragged(strategy, 1, 2), axis=None),
        "different shapes",
        "(1,)",
        "(2,)",
        "axis=0",
    )
    message(
        reduction, lambda: strategy.reduce("SUM", values, axis=1), "Invalid reduction dimension 1", "1 dim(s)"
    )
    message(reduction, lambda: strategy.reduce("SUM", values, axis=-2), "Invalid reduction dimension -2")
    message(reduction, lambda: strategy.reduce("SUM", "text", axis=None), "cannot be reduced", "'text'")
    message(TypeError, lambda: strategy.reduce("SUM", values, axis=0.5), "axis must be None, an int", "0.5")
    invalid = errors.InvalidArgumentError
    message(
        invalid,
        lambda: strategy.reduce("MAX", values, axis=None),
        "'MAX' is not a valid ReduceOp",
        "SUM, MEAN",
    )


def test_gather_of_incompatible_values(strategy):
    reduction = errors.ReductionError
    values = values_of(strategy)
    scalars = strategy.run(lambda x: x[0], (values,))
    message(reduction, lambda: strategy.gather(scalars, axis=0), "Cannot gather scalars", "value[None]")
    message(reduction, lambda: strategy.gather(values, axis=1), "axis of gather is 1", "1 dim(s)")
    message(reduction, lambda: strategy.gather(values, axis=None), "axis of gather must be an int", "None")
    shapes = strategy.experimental_distribute_values_from_function(
        lambda c: np.ones((2, 1 + c.replica_id_in_sync_group))
    )
    message(reduction, lambda: strategy.gather(shapes, axis=0), "Dimension 1", "[1, 2]", "axis 0")
    slices = rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (3, 2))
    message(
        errors.UnsupportedError,
        lambda: strategy.gather(slices, axis=0),
        "IndexedSlices",
        ".values and .indices",
    )


def test_collectives_of_irreducible_values(strategy):
    def all_reduce(value):
        return lambda: strategy.run(lambda: rx.get_replica_context().all_reduce("SUM", value))

    message(errors.ReductionError, all_reduce("text"), "Cannot reduce str", "numbers")
    message(errors.ReductionError, all_reduce(jnp.array([True])), "bool", "astype")
    message(
        errors.InvalidArgumentError,
        lambda: strategy.run(lambda: rx.get_replica_context().all_reduce("MIN", 1.0)),
        "'MIN' is not a valid ReduceOp",
    )


# --- PerReplica is not a number -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        float,
        int,
        bool,
        len,
        list,
        np.asarray,
        jnp.asarray,
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: -x,
        lambda x: x @ x,
        lambda x: x > 0,
        lambda x: x[0],
        lambda x: f"{x:.3f}",
    ],
)
def test_per_replica_used_as_a_number(strategy, use):
    values = strategy.run(lambda x: jnp.sum(x), (values_of(strategy),))
    message(
        errors.PerReplicaUseError,
        lambda: use(values),
        "PerReplica object while not inside a replica context",
        "strategy.reduce(",
        "experimental_local_results",
        "strategy.run(fn, args=(value,))",
        "array(1., dtype=float32)",  # it shows what it holds
        "array(3., dtype=float32)",
    )


@pytest.mark.parametrize("use", [jnp.sum, jnp.sqrt, lambda x: jnp.where(x > 0, x, 0)])
def test_per_replica_given_to_jax(strategy, use):
    values = strategy.run(lambda x: jnp.sum(x), (values_of(strategy),))
    message(errors.PerReplicaUseError, lambda: use(values), "strategy.reduce(", "experimental_local_results")


@pytest.mark.parametrize(
    "give",
    [
        lambda optimizer, gradient, variable: optimizer.apply_gradients([(gradient, variable)]),
        lambda optimizer, gradient, variable: optimizer.apply([gradient], [variable]),
    ],
)
@pytest.mark.parametrize(
    "kind", [keras.optimizers.SGD, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())]
)
def test_gradients_of_replicas_given_to_an_optimizer_outside_run(strategy, kind, give):
    with strategy.scope():
        variable, optimizer = keras.Variable(np.ones(1000, "float32")), kind()
    gradient = strategy.run(lambda x: jnp.sum(x) * jnp.ones(1000), (values_of(strategy),))
    text = message(
        errors.PerReplicaUseError,
        lambda: give(optimizer, gradient, variable),
        "float32[1000]",
        f"{__file__}:",
        "Call the optimizer in the step",
    )
    assert "array(" not in text
    assert np.asarray(variable.value).tolist() == [1.0] * 1000


def test_large_values_are_described_not_printed(strategy):
    values = strategy.run(lambda x: jnp.sum(x) * jnp.ones(1000), (values_of(strategy),))
    text = message(errors.PerReplicaUseError, lambda: values + 1, "float32[1000]")
    assert "array(" not in text


def test_unreplicate_of_varying_values(strategy):
    message(
        errors.PerReplicaUseError, lambda: strategy.unreplicate({"x": values_of(strategy)}), "2 components"
    )


# --- the right call in the wrong context --------------------------------------------------------------


def test_cross_replica_calls_in_a_replica_function(strategy):
    values = values_of(strategy)
    cross = errors.CrossReplicaContextError
    for call in (
        lambda: strategy.reduce("SUM", values, axis=None),
        lambda: strategy.run(lambda: None),
        lambda: strategy.scope().__enter__(),
        lambda: strategy.experimental_distribute_values_from_function(lambda c: 1),
    ):
        message(
            cross,
            lambda call=call: strategy.run(call),
            "Method requires being in cross-replica context",
            "get_replica_context().merge_call()",
            "all_reduce",
        )
    message(cross, lambda: strategy.run(lambda: strategy.gather(values, axis=0)), "all_gather()")
    message(
        cross,
        lambda: strategy.run(lambda: strategy.extended.reduce_to("SUM", values, "cpu:0")),
        "reduce_to requires cross-replica context",
        "all_reduce()",
    )
    assert issubclass(cross, RuntimeError)


def test_iterating_a_dataset_in_a_replica_function(strategy):
    dataset = strategy.experimental_distribute_dataset([np.ones(4, np.float32)])
    text = "next(iterator) should be called from outside of replica_fn"
    message(
        errors.IterationContextError,
        lambda: strategy.run(lambda: next(iter(dataset))),
        text,
        "args=(batch,)",
    )


def test_collectives_outside_a_replica_function(strategy):
    with strategy.scope():
        assert rx.get_replica_context() is None  # so that calling all_reduce on it cannot be missed
    message(
        errors.ReplicaContextError,
        lambda: in_scope(strategy, lambda: rx.nn.compute_average_loss(jnp.ones(2))),
        "cross replica context",
        "strategy.run",
        "global_batch_size",
    )
    message(
        errors.ReplicaContextError,
        lambda: in_scope(strategy, lambda: rx.nn.scale_regularization_loss(1.0)),
        "cross replica context",
        "strategy.run",
    )


def in_scope(strategy, call):
    with strategy.scope():
        return call()


def test_a_kept_replica_context(strategy):
    kept = []
    strategy.run(lambda: kept.append(rx.get_replica_context()))
    context = kept[0]
    for call in (
        lambda: context.all_reduce("SUM", jnp.ones(2)),
        lambda: context.all_gather(jnp.ones(2), axis=0),
        lambda: context.merge_call(lambda strategy: None),
        lambda: context.replica_id_in_sync_group,
    ):
        for where in (call, lambda call=call: in_scope(strategy, call), lambda call=call: strategy.run(call)):
            message(
                errors.ReplicaContextError,
                where,
                "outside of its replica function",
                "rx.get_replica_context() again",
                "in merge_call use strategy.reduce",
            )


def test_collectives_in_merge_call(strategy):
    def step():
        context = rx.get_replica_context()
        return context.merge_call(lambda strategy: context.all_reduce("SUM", jnp.ones(2)))

    message(
        errors.ReplicaContextError,
        lambda: strategy.run(step),
        "`all_reduce`",
        "in merge_call use strategy.reduce",
    )


def test_run_in_merge_call(strategy):
    def merge(strategy):
        strategy.run(lambda: None)

    message(
        errors.CrossReplicaContextError,
        lambda: strategy.run(lambda: rx.get_replica_context().merge_call(merge)),
        "strategy.run was called in merge_call",
        "after run",
    )


# --- mixing strategies --------------------------------------------------------------------------------


def test_scope_of_another_strategy(strategy):
    other = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    for call in (
        other.scope().__enter__,
        lambda: other.run(lambda: None),
        lambda: other.reduce("MEAN", 1.0, axis=None),
    ):
        message(
            errors.MixedStrategiesError,
            lambda call=call: in_scope(strategy, call),
            "Mixing different tf.distribute.Strategy objects",
            repr(strategy),
            repr(other),
            "Leave the scope",
        )
    message(
        errors.MixedStrategiesError, lambda: strategy.run(lambda: other.run(lambda: None)), "Mixing different"
    )


def test_default_scope_in_another(strategy):
    default = rx.get_strategy()
    message(
        errors.ScopeNestingError, lambda: in_scope(strategy, default.scope), "Must not nest", repr(strategy)
    )


def test_variable_under_two_strategies(strategy):
    def nested():
        with rx.get_strategy().scope(), strategy.scope():
            rx.Variable(1.0)

    message(errors.MixedStrategiesError, nested, "Mixing different", repr(strategy))


def test_set_strategy_in_a_scope(strategy):
    text = "Must not be called inside a `tf.distribute.Strategy` scope"
    for value in (strategy, None):
        message(
            errors.ScopeNestingError,
            lambda value=value: in_scope(strategy, lambda: rx.experimental_set_strategy(value)),
            text,
            "leave",
        )


def test_values_of_another_strategy(strategy):
    other = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    mixed = errors.MixedStrategiesError
    message(
        mixed,
        lambda: strategy.run(lambda x: x, (values_of(other),)),
        "PerReplica of 3 components",
        "2 replicas",
    )
    message(
        mixed,
        lambda: strategy.run(lambda x: x, (other.replicate(jnp.ones(2)),)),
        "Mirrored value over 3 devices",
        "2 replicas",
    )


# --- variables made in another scope ------------------------------------------------------------------


def make_variable(kind, strategy):
    with strategy.scope():
        if kind == "rx":
            return rx.Variable(1.0, name="weights")
        return keras.Variable(1.0, name="weights")


@pytest.mark.parametrize("kind", ["rx", "keras"])
def test_variable_of_another_strategy_in_run(strategy, kind):
    other = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    v = make_variable(kind, other)
    for use in (lambda: v + 1.0, lambda: v.assign_add(1.0), lambda: v.value):
        message(
            errors.MixedStrategiesError,
            lambda use=use: strategy.run(use),
            "weights",
            "was made in the scope of",
            repr(other),
            repr(strategy),
            "Make it in that strategy's scope",
        )
    assert float(v.value) == 1.0
    other.run(lambda: v.assign_add(1.0))
    assert float(v.value) == 2.0


def test_variable_of_another_strategy_in_scope(strategy):
    other = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    v = make_variable("rx", other)
    message(errors.MixedStrategiesError, lambda: in_scope(strategy, v.read_value), "'weights'", repr(other))
    message(errors.MixedStrategiesError, lambda: in_scope(strategy, lambda: v.assign(2.0)), "'weights'")
    message(
        errors.VariableError,
        lambda: strategy.extended.update(v, lambda v: v.assign(1.0)),
        "'weights' is not a variable made in the scope of",
        "with strategy.scope()",
    )
    message(
        errors.VariableError,
        lambda: in_scope(strategy, lambda: strategy.extended.colocate_vars_with(v).__enter__()),
        "`colocate_vars_with`",
        "'weights'",
    )
    assert float(v.value) == 1.0


ASSIGNMENTS = {
    "assign": lambda v: v.assign(v + 1.0),
    "assign_add": lambda v: v.assign_add(jnp.ones(2)),
    "assign_sub": lambda v: v.assign_sub(jnp.ones(2)),
    "scatter_add": lambda v: v.scatter_add(rx.IndexedSlices(jnp.ones(1), jnp.zeros(1, int))),
}


@pytest.mark.parametrize("way", ["run", "function"])
@pytest.mark.parametrize("method", ASSIGNMENTS)
def test_a_variable_made_outside_every_scope_is_not_assigned_by_replicas(strategy, method, way):
    v = rx.Variable([1.0, 1.0], name="counter", aggregation="SUM" if method == "assign_sub" else "NONE")

    def step():
        return ASSIGNMENTS[method](v)

    calls = {
        "run": lambda: strategy.run(step),
        "function": rx.function(lambda: strategy.run(step)),
    }
    text = message(
        errors.VariableError,
        calls[way],
        f"'counter' was made outside of every scope, and {method} at {__file__}:",
        "TensorFlow would assign it 2 times",
        "Make it in `with strategy.scope():`",
        "aggregation=rx.VariableAggregation.SUM",
    )
    assert "replicas may read it" in text
    assert v.numpy().tolist() == [1, 1]


def test_a_variable_made_outside_every_scope_can_be_read_and_assigned_between_steps(strategy):
    v, k = rx.Variable(1.0), keras.Variable(1.0)

    @rx.function
    def step():
        v.assign_add(1.0)  # once, as in TensorFlow
        return strategy.run(lambda: v + 0.0)

    def in_merge_call(_):
        v.assign_add(1.0)

    def merged():
        rx.get_replica_context().merge_call(in_merge_call)

    assert [float(x) for x in strategy.experimental_local_results(step())] == [2.0, 2.0]
    strategy.run(merged)
    strategy.run(lambda: k.assign_add(1.0))  # Keras's own are mirrored wherever they are made
    rx.OneDeviceStrategy("cpu:1").run(lambda: v.assign_add(1.0))
    rx.get_strategy().run(lambda: v.assign_add(1.0))
    assert (float(v.value), float(k.value)) == (5.0, 2.0)


# --- tracers ------------------------------------------------------------------------------------------


def test_a_value_that_leaked_out_of_run(strategy):
    kept = []
    strategy.run(lambda x: kept.append(x * 2), (jnp.ones(2),))

    def use():
        return kept[0] + 1

    text = message(
        errors.TraceError,
        lambda: strategy.run(use),
        "another trace, which has ended",
        "Return it",
        "rx.Variable",
    )
    assert f"{__file__}:{use.__code__.co_firstlineno + 1} in use" in text
    message(
        errors.TraceError, lambda: strategy.run(lambda x: x, (kept[0],)), "tracer as an argument", "Return it"
    )


def test_run_inside_jax_jit(strategy):
    message(
        errors.TraceError,
        lambda: jax.jit(lambda x: strategy.run(lambda y: y, (x,)))(jnp.ones(2)),
        "inside jax.jit",
        "leave jax.jit out",
        "rx.function",
    )


@pytest.mark.parametrize("kind", ["rx", "keras"])
def test_variable_assigned_inside_jax_jit(strategy, kind):
    v = make_variable(kind, strategy)

    @jax.jit
    def outside_of_replicax(x):
        v.assign(x)
        return x

    def use():
        outside_of_replicax(jnp.float32(3))  # ours refuse here; Keras's notices nothing
        strategy.run(lambda: v.assign_add(1.0))

    message(errors.TraceError, use, "weights", "strategy.run, rx.function or plain Python")
    v.assign(1.0)
    strategy.run(lambda: v.assign_add(1.0))
    assert float(v.value) == 2.0


def test_variable_assigned_inside_a_scan(strategy):
    v = make_variable("rx", strategy)

    def body(carry, _):
        v.assign_add(1.0)
        return carry, None

    text = message(
        errors.TraceError,
        lambda: strategy.run(lambda: jax.lax.scan(body, 0.0, None, length=3)[0]),
        "'weights'",
        "scan",
        "assign it outside",
        "rx.cond",
    )
    assert f"{__file__}:{body.__code__.co_firstlineno + 1} in body" in text
    assert float(v.value) == 1.0


# --- Python conditions on traced values ---------------------------------------------------------------


def on_replica_id(x):
    if rx.get_replica_context().replica_id_in_sync_group == 0:
        return x
    return -x


def on_argument(x):
    while jnp.sum(x) > 0:
        x = x - 1
    return x


def convert(x):
    return float(x[0])


def to_numpy(x):
    return np.asarray(x)


@pytest.mark.parametrize("fn", [on_replica_id, on_argument, convert, to_numpy])
def test_condition_on_a_traced_value(strategy, fn):
    text = message(
        errors.TracedConditionError,
        lambda: strategy.run(fn, (jnp.ones(2),)),
        "traced once",
        "jnp.where",
        "rx.cond",
        "RunOptions(eager=True)",
    )
    assert f"{__file__}:{fn.__code__.co_firstlineno + 1} in {fn.__name__}" in text


# --- divergence ---------------------------------------------------------------------------------------


def test_mirrored_variable_that_would_diverge(strategy):
    v = make_variable("rx", strategy)

    def step():
        v.assign_add(rx.get_replica_context().replica_id_in_sync_group.astype(jnp.float32))

    text = message(
        errors.DivergenceError,
        lambda: strategy.run(step),
        "'weights'",
        "mirrored",
        "all_reduce",
        "aggregation=",
    )
    assert f"{__file__}:{step.__code__.co_firstlineno + 1} in step" in text
    assert float(v.value) == 1.0


def test_collective_under_a_condition_that_differs(strategy):
    def branch(x):
        return rx.get_replica_context().all_reduce("SUM", x)

    def step(x):
        replica_id = rx.get_replica_context().replica_id_in_sync_group
        return jax.lax.cond(replica_id == 0, branch, lambda x: x, x)

    text = message(errors.DivergentCollectiveError, lambda: strategy.run(step, (jnp.ones(2),)), "differs")
    assert os.path.basename(__file__) in text


# --- an exception inside the replica function ---------------------------------------------------------


class Mine(Exception):
    pass


def deep_inside():
    raise Mine("from deep inside")


@pytest.mark.parametrize(
    "how",
    [
        "run",
        "function",
        "merge_call",
        *(pytest.param(how, marks=pytest.mark.rest) for how in ("scan", "method")),
    ],
)
def test_exception_in_the_replica_function(strategy, how):
    with strategy.scope():
        v = rx.Variable(1.0)
        on_read = rx.Variable(1.0, synchronization="ON_READ", aggregation="MEAN")
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(2), keras.layers.BatchNormalization()]
        )
        optimizer = keras.optimizers.Adam(0.1)
        metric = keras.metrics.Mean()
    optimizer.build(model.trainable_variables)
    fail = []

    def step(x):
        v.assign_add(1.0)
        on_read.assign_add(1.0)
        with rx.GradientTape() as tape:
            loss = jnp.sum(model(x, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(loss)
        if fail and how == "merge_call":
            rx.get_replica_context().merge_call(lambda strategy: deep_inside())
        elif fail and how == "scan":
            jax.lax.scan(lambda c, _: deep_inside(), 0.0, None, length=2)
        elif fail:
            deep_inside()
        return loss

    class Trainer:
        def step(self, x):
            return step(x)

    batch = strategy.experimental_distribute_values_from_function(lambda c: np.ones((2, 2), np.float32))
    trainer = Trainer()
    target = trainer.step if how == "method" else step
    traced = rx.function(lambda x: strategy.run(step, (x,)))

    def run():
        return traced(batch) if how == "function" else strategy.run(target, (batch,))

    run()
    everything = [*model.variables, *optimizer.variables, *metric.variables]

    def held():
        return [np.array(x.value) for x in (v, on_read, *everything)]

    before = held()
    fail.append(True)
    # Another signature, so that it is traced again.
    batch = strategy.experimental_distribute_values_from_function(lambda c: np.ones((3, 2), np.float32))
    with pytest.raises(Mine, match="from deep inside") as caught:
        run()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "deep_inside"
    assert frames[-1].filename == __file__
    assert "step" in [frame.name for frame in frames]
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()
    for old, new in zip(before, held(), strict=True):
        np.testing.assert_array_equal(old, new)
    fail.clear()
    run()
    assert float(v.value) == 3.0
    assert float(on_read.value) == 3.0
    assert int(optimizer.iterations.value) == 2


def test_exception_while_a_lazy_model_is_built(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(2)])
    fail = [True]

    def step(x):
        out = model(x)
        if fail:
            deep_inside()
        return out

    with pytest.raises(Mine):
        strategy.run(step, (jnp.ones((2, 2)),))
    fail.clear()
    result = strategy.run(step, (jnp.ones((2, 2)),))
    expected = np.ones((2, 2)) @ np.asarray(model.layers[0].kernel.value)
    for component in strategy.experimental_local_results(result):
        np.testing.assert_allclose(component, expected, rtol=1e-6)


def test_base_exceptions_leave_contexts_clean(strategy):
    def step():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    assert not rx.in_cross_replica_context()
    assert float(strategy.reduce("SUM", strategy.run(lambda: jnp.float32(1)), axis=None)) == 2.0


# --- in separate processes ----------------------------------------------------------------------------


def in_process(program, **environment):
    clean = {
        k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**clean, **environment},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_device_count_set_after_the_backend_started():
    program = """
import jax.numpy as jnp, replicax as rx
jnp.ones(3).block_until_ready()
try:
    rx.config.set_local_devices(4)
except rx.errors.BackendStartedError as error:
    print(error)
rx.config.set_local_devices(1)  # what it has is no error
print(rx.MirroredStrategy().num_replicas_in_sync)
"""
    text, count = in_process(program, JAX_PLATFORMS="cpu").splitlines()
    for words in ("set_local_devices(4)", "already started with 1 CPU device", "before anything uses JAX"):
        assert words in text
    assert "JAX_NUM_CPU_DEVICES=4" in text
    assert count == "1"


def test_invalid_device_count():
    for value in (0, -1, 2.0, True, "2"):
        message(
            errors.DeviceError,
            lambda value=value: rx.config.set_local_devices(value),
            repr(value),
            "at least 1",
        )


KERAS_PROGRAM = """
import keras, replicax as rx
strategy = rx.OneDeviceStrategy("cpu:0")
try:
    with strategy.scope():
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
except rx.errors.KerasBackendError as error:
    print(error)
    print(rx.has_strategy())
"""


@pytest.mark.rest
def test_keras_on_another_backend():
    text, left = in_process(KERAS_PROGRAM, KERAS_BACKEND="numpy").splitlines()
    for words in ("Keras runs on the 'numpy' backend", "replicax needs 'jax'", "KERAS_BACKEND=jax", "before"):
        assert words in text
    assert left == "False"
    assert in_process(KERAS_PROGRAM, KERAS_BACKEND="jax") == ""


# --- data ---------------------------------------------------------------------------------------------


ROWS_OF_DIFFERENT_LENGTHS = np.array([np.arange(2), np.arange(3)], dtype=object)


@pytest.mark.parametrize(
    ("dataset", "error_type", "says"),
    [
        ([np.float32(1.5)], errors.UnbatchedDatasetError, ("Call the `batch` method", "across 2 replicas")),
        ([{"x": np.ones((4, 2)), "y": 3.0}], errors.UnbatchedDatasetError, ("['x']: (4, 2), ['y']: ()",)),
        ([np.array([b"a", "b"], object)], errors.UnsupportedElementError, ("which holds bytes",)),
        ([(np.ones(4), np.ones(5))], errors.InconsistentRowsError, ("[0]: (4,), [1]: (5,)",)),
        (
            [np.array(["a", "b"])],
            errors.UnsupportedElementError,
            ("dtype <U1", "no device holds text", "token ids"),
        ),
        (
            [ROWS_OF_DIFFERENT_LENGTHS],
            errors.UnsupportedElementError,
            ("rows of different lengths", "pad them"),
        ),
        (
            [jax.experimental.sparse.BCOO((np.ones(1), np.zeros((1, 2), np.int32)), shape=(3, 3))],
            errors.UnsupportedElementError,
            ("a sparse BCOO of shape (3, 3)", ".todense()"),
        ),
        ([{"x": None}], errors.UnsupportedElementError, ("no arrays",)),
    ],
)
def test_bad_batches(strategy, dataset, error_type, says):
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    message(error_type, lambda: next(iterator), *says)


def test_unbatched_arrays(strategy):
    rows = rx.data.from_arrays(np.ones((4, 2)))
    message(
        errors.UnbatchedDatasetError,
        lambda: strategy.experimental_distribute_dataset(rows),
        "Call the `batch` method",
    )


@pytest.mark.parametrize("dataset", [np.ones(4), {"x": np.ones(4)}, "rows", 3, None, lambda: [np.ones(4)]])
def test_invalid_datasets(strategy, dataset):
    message(
        errors.UnsupportedSourceError,
        lambda: strategy.experimental_distribute_dataset(dataset),
        "not a dataset",
    )


def test_already_distributed_dataset(strategy):
    dataset = strategy.experimental_distribute_dataset([np.ones(4)])
    for given in (dataset, iter(dataset)):
        message(
            errors.UnsupportedSourceError,
            lambda given=given: strategy.experimental_distribute_dataset(given),
            "is distributed already",
        )
    message(
        errors.InvalidArgumentError,
        lambda: strategy.distribute_datasets_from_function([np.ones(4)]),
        "experimental_distribute_dataset",
    )
    three = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    (batch,) = three.experimental_distribute_dataset([np.ones(6)])
    for call in (lambda: strategy.reduce("SUM", batch, axis=0), lambda: strategy.gather(batch, axis=0)):
        message(
            errors.MixedStrategiesError, call, "PerReplica over 3 replicas", "Use the strategy that made it"
        )


def test_a_generator_that_raises(strategy):
    def batches():
        yield np.ones(4)
        raise OSError("shard 7 is gone")

    iterator = iter(strategy.experimental_distribute_dataset(batches()))
    assert strategy.reduce("SUM", next(iterator), axis=0) == 4
    with pytest.raises(OSError, match="shard 7 is gone") as caught:
        next(iterator)
    assert "in batches\n" in "".join(traceback.format_exception(caught.value))
    assert caught.value.__notes__ == ["(raised while the dataset was read ahead: a one-shot generator)"]


def test_a_closed_iterator(strategy):
    iterator = iter(strategy.experimental_distribute_dataset([np.ones(4)]))
    iterator.close()
    message(errors.ClosedIteratorError, lambda: next(iterator), "was closed", "iter(dataset)")


def test_workers_that_do_not_exist():
    message(
        errors.InvalidArgumentError,
        lambda: rx.InputContext(num_input_pipelines=2, input_pipeline_id=2),
        "input_pipeline_id must be at least 0 and less than num_input_pipelines=2, got 2",
    )
    message(
        errors.InvalidArgumentError,
        lambda: rx.data.from_arrays(np.ones(4)).shard(2, 2),
        "index must be at least 0 and less than num_shards=2, got 2",
        "numbered from 0",
    )


def test_modes_and_policies(strategy):
    rows = rx.data.from_arrays(np.ones(4)).batch(2)
    options = rx.InputOptions(experimental_replication_mode="PER_REPLICA")
    message(
        errors.UnsupportedError,
        lambda: strategy.experimental_distribute_dataset(rows, options),
        "only supported in distribute_datasets_from_function",
    )
    message(
        errors.InvalidArgumentError,
        lambda: rx.data.DistributeOptions("SOMEHOW"),
        "allowed are AUTO, FILE, DATA, HINT, OFF",
    )
    message(
        errors.InvalidArgumentError,
        lambda: strategy.experimental_distribute_dataset(rows, distribute_options="SOMEHOW"),
        "allowed are AUTO, FILE, DATA, HINT, OFF",
    )
    message(
        errors.InvalidArgumentError,
        lambda: strategy.experimental_distribute_dataset(rows, rx.data.DistributeOptions("DATA")),
        "options must be an rx.InputOptions",
        "distribute_options=",
    )
    assert len(strategy.experimental_distribute_dataset(rows, distribute_options="FILE")) == 2


# --- words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_replicax_error_with_a_docstring(name):
    error = getattr(errors, name)
    assert issubclass(error, errors.ReplicaxError)
    assert error.__doc__


# --- numbers and structures ---------------------------------------------------------------------------------


def test_global_batch_size_is_text():
    message(
        errors.InvalidArgumentError,
        lambda: rx.nn.compute_average_loss(jnp.ones(4), global_batch_size="16"),
        "'16'",
    )


def test_shuffle_takes_no_switch():
    dataset = rx.data.from_arrays(np.ones((4, 1)))
    message(errors.InvalidArgumentError, lambda: dataset.shuffle(True), "got True", "Call shuffle()")


def test_a_batch_of_another_structure_than_before(strategy):
    def step(batch):
        x, y = batch
        return jnp.sum(x) + jnp.sum(y)

    strategy.run(step, args=((values_of(strategy), 1.0),))
    with pytest.raises(ValueError, match="too many values to unpack") as found:
        strategy.run(step, args=((values_of(strategy), 1.0, 2.0),))
    assert any("args was ((*, *),), and is ((*, *, *),)" in note for note in found.value.__notes__)


@pytest.mark.parametrize("strategy", ["mirrored"], indirect=True)
def test_nan_found_by_jax_says_how_to_get_its_line(strategy):
    def step(x):
        return jnp.log(-1 - x)

    with jax.debug_nans(True), pytest.raises(FloatingPointError) as found:
        strategy.run(step, args=(values_of(strategy),))
    assert any("check_finite=True" in note for note in found.value.__notes__)
    with pytest.raises(errors.NotFiniteError) as named:
        strategy.run(step, args=(values_of(strategy),), options=rx.RunOptions(check_finite=True))
    assert not hasattr(named.value, "__notes__")


@pytest.mark.parametrize("strategy", ["mirrored"], indirect=True)
def test_gradient_of_losses_that_were_not_averaged_warns_once(strategy, caplog):
    with strategy.scope():
        variable = rx.Variable(1.0)

    def step(x, is_averaged):
        with rx.GradientTape() as tape:
            losses = x * variable
            loss = rx.nn.compute_average_loss(losses) if is_averaged else losses
        return tape.gradient(loss, variable)

    strategy.run(step, args=(values_of(strategy), True))
    assert not caplog.messages
    strategy.run(step, args=(values_of(strategy), False))
    strategy.run(lambda x: step(x, False), args=(values_of(strategy),))  # another program, the same line
    (text,) = caplog.messages
    assert "test_errors_read_well.py" in text
    assert "shape [2]" in text
    assert "compute_average_loss" in text


@pytest.mark.parametrize("strategy", ["mirrored"], indirect=True)
def test_mean_over_the_rows_of_one_replica_warns_once(strategy, caplog):
    with strategy.scope():
        variable = keras.Variable(np.ones(1, np.float32))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([variable])

    def step_with(loss_of, is_reduced=False):
        def step(x):
            with rx.GradientTape() as tape:
                loss = loss_of(x * variable)
            gradients = tape.gradient(loss, [variable])
            if is_reduced:
                gradients = rx.get_replica_context().all_reduce("MEAN", gradients)
            optimizer.apply_gradients(zip(gradients, [variable], strict=True))

        strategy.run(step, args=(values_of(strategy),))

    step_with(rx.nn.compute_average_loss)
    step_with(lambda losses: jnp.sum(losses) / 4)
    step_with(jnp.mean, is_reduced=True)
    assert not caplog.messages
    for _ in range(2):
        step_with(lambda losses: jnp.mean(losses) + 0.1 * jnp.sum(variable.value))
    (text,) = caplog.messages
    assert "test_errors_read_well.py" in text
    assert "2 times too large" in text
    assert "compute_average_loss" in text
