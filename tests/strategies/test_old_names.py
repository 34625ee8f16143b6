"""The older method names of tf.distribute work, or raise an error that says what to use instead."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax import errors


@pytest.fixture(params=["default", "one_device", "mirrored", "central_storage"])
def strategy(request):
    return {
        "default": rx.get_strategy,
        "one_device": lambda: rx.OneDeviceStrategy("cpu:0"),
        "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
        "central_storage": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    }[request.param]()


def rows(strategy, value):
    return [
        x for part in strategy.experimental_local_results(value) for x in np.asarray(part).ravel().tolist()
    ]


def test_unwrap_and_group(strategy):
    values = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    assert [int(x) for x in strategy.unwrap(values)] == list(range(strategy.num_replicas_in_sync))
    assert strategy.group(values) is values
    assert strategy.group(values, name="train_op") is values


def test_dataset_iterator_and_experimental_run(strategy):
    iterator = strategy.make_dataset_iterator([np.arange(4.0), np.arange(4.0, 7.0)])
    iterator.initialize()
    doubled = [rows(strategy, strategy.experimental_run(lambda x: x * 2, iterator)) for _ in range(2)]
    assert doubled == [[0, 2, 4, 6], [8, 10, 12]]
    with pytest.raises(LookupError):
        strategy.experimental_run(lambda x: x, iterator)
    iterator.initialize()
    assert rows(strategy, iterator.get_next()) == [0, 1, 2, 3]
    assert strategy.experimental_run(lambda: 5) == 5


def test_input_fn_iterator(strategy):
    def input_fn(context):
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        return [np.full(2, float(i)) for i in range(4)]

    iterator = strategy.make_input_fn_iterator(input_fn)
    n = strategy.num_replicas_in_sync
    assert rows(strategy, strategy.experimental_run(lambda x: x + 1, iterator)) == [
        r + 1.0 for r in range(n) for _ in range(2)
    ]


def test_input_fn_iterator_per_replica(strategy):
    def input_fn(context):
        return [np.full(1, 10.0 * context.input_pipeline_id)]

    iterator = strategy.make_input_fn_iterator(input_fn, rx.InputReplicationMode.PER_REPLICA)
    assert rows(strategy, iterator.get_next()) == [10.0 * r for r in range(strategy.num_replicas_in_sync)]


@pytest.mark.parametrize("name", ["experimental_make_numpy_dataset", "make_experimental_numpy_dataset"])
def test_numpy_dataset(strategy, name):
    dataset = getattr(strategy, name)((np.arange(4.0), [[1, 2], [3, 4], [5, 6], [7, 8]])).batch(2)
    seen = [
        tuple(rows(strategy, part) for part in batch)
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    assert seen == [([0, 1], [1, 2, 3, 4]), ([2, 3], [5, 6, 7, 8])]
    again = strategy.extended.experimental_make_numpy_dataset(np.arange(3)).batch(3)
    assert [rows(strategy, b) for b in strategy.experimental_distribute_dataset(again)] == [[0, 1, 2]]


def test_datasets_from_function_under_its_older_name(strategy):
    dataset = strategy.experimental_distribute_datasets_from_function(lambda context: [np.ones(1)] * 2)
    assert rows(strategy, next(iter(dataset))) == [1.0] * strategy.num_replicas_in_sync


def test_call_for_each_replica(strategy):
    result = strategy.extended.call_for_each_replica(
        lambda x, y: x + y, args=[jnp.float32(1)], kwargs={"y": 2.0}
    )
    assert rows(strategy, result) == [3.0] * strategy.num_replicas_in_sync


def test_colocate_vars_with(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
        with strategy.colocate_vars_with(v), strategy.extended.colocate_vars_with(v):
            w = rx.Variable(2.0)
    assert w.value.devices() == v.value.devices()
    with rx.OneDeviceStrategy("cpu:2").scope():
        of_another = rx.Variable(1.0)
    with pytest.raises(ValueError, match="must only be passed a variable created in this"):
        strategy.colocate_vars_with(of_another).__enter__()


def test_extended_properties_and_small_methods(strategy):
    extended = strategy.extended
    with strategy.scope():
        v = rx.Variable(1.0)
    assert extended.read_var(v) == 1.0
    assert extended.value_container(v) is v
    if strategy is rx.get_strategy():  # which names no devices, as in TensorFlow
        with pytest.raises(RuntimeError, match="default strategy"):
            extended.non_slot_devices([v])
    else:
        assert extended.non_slot_devices([v]) == extended.parameter_devices
    assert (extended.experimental_require_static_shapes, extended.experimental_between_graph) == (
        False,
        False,
    )
    assert (extended.experimental_should_init, extended.should_checkpoint, extended.should_save_summary) == (
        True,
    ) * 3
    calls = []
    assert extended.update_non_slot(None, lambda x: calls.append(x) or x, args=(3,)) == 3
    assert (
        extended.update_non_slot(None, lambda x: x, (3,), group=False) == (3,) * strategy.num_replicas_in_sync
    )
    assert calls == [3]


def test_update_without_grouping(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
    result = strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(2.0,), group=False)
    assert isinstance(result, tuple)
    assert len(result) == strategy.num_replicas_in_sync
    assert float(v.value) == 3.0


def test_logical_devices(strategy):
    x = jnp.ones(2)
    assert strategy.experimental_assign_to_logical_device(x, 0) is x
    with pytest.raises(ValueError, match=r"lower then total number of logical devices per replica, got 1"):
        strategy.experimental_assign_to_logical_device(x, 1)
    assert strategy.experimental_split_to_logical_devices(x, [1]) is x
    with pytest.raises(ValueError, match=r"number of logical devices \(=1\)"):
        strategy.experimental_split_to_logical_devices(x, [2])
    assert strategy.experimental_replicate_to_logical_devices(x) is x
    with strategy.scope():
        v = rx.Variable(x)
    assert strategy.experimental_split_to_logical_devices(v, [1]) is v
    assert strategy.num_logical_devices == 1


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (
            lambda s: s.configure(session_config=None),
            ["TF_CONFIG", "cluster resolver", "set_local_devices(n)"],
        ),
        (lambda s: s.configure(None, {"worker": []}, "worker", 0), ["TF_CONFIG"]),
        (lambda s: s.update_config_proto(None), ["jax.config.update", "experimental_xla_options"]),
    ],
)
def test_unsupported_names_say_what_to_use(strategy, call, instead):
    with pytest.raises(errors.UnsupportedError, match="TensorFlow 1 sessions") as caught:
        call(strategy)
    assert isinstance(caught.value, NotImplementedError)
    for words in instead:
        assert words in str(caught.value)
