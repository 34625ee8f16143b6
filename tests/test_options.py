"""Enums and options: they accept what TensorFlow's do, and check themselves when they are made."""

import dataclasses

import pytest

import replicax as rx
from replicax.errors import InvalidArgumentError

ENUMS = [rx.ReduceOp, rx.VariableAggregation, rx.VariableSynchronization, rx.CommunicationImplementation]


@pytest.mark.parametrize("enum", ENUMS)
def test_members_are_known_by_name_in_any_case(enum):
    for name, member in enum.__members__.items():
        for given in (member, name, name.lower(), name.title()):
            assert enum.parse(given) is member
        assert enum(name.lower()) is member


@pytest.mark.parametrize("enum", ENUMS)
@pytest.mark.parametrize("value", ["MAX", "", None, 0, 1.5])
def test_other_values_raise_with_the_allowed_ones(enum, value):
    with pytest.raises(InvalidArgumentError) as caught:
        enum.parse(value)
    assert f"{value!r} is not a valid {enum.__name__}" in str(caught.value)
    for name in enum.__members__:
        assert name in str(caught.value)


def test_members_are_tensorflows():
    assert list(rx.ReduceOp.__members__) == ["SUM", "MEAN"]
    assert list(rx.VariableAggregation.__members__) == ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
    assert list(rx.VariableSynchronization.__members__) == ["AUTO", "NONE", "ON_WRITE", "ON_READ"]
    assert list(rx.CommunicationImplementation.__members__) == ["AUTO", "RING", "NCCL"]


def test_run_options():
    options = rx.RunOptions()
    assert (
        options.experimental_enable_dynamic_batch_size,
        options.experimental_bucketizing_dynamic_shape,
    ) == (
        True,
        False,
    )
    assert (options.experimental_xla_options, options.eager, options.donate_args) == (None, False, ())
    assert rx.RunOptions(donate_args=[0, 2]).donate_args == (0, 2)
    assert rx.RunOptions(donate_args=1).donate_args == (1,)
    for wrong in ("state", (True,), ("x",), (0.0,)):
        with pytest.raises(InvalidArgumentError, match=r"takes positions in args, such as \(0,\)"):
            rx.RunOptions(donate_args=wrong)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.eager = True
    with pytest.raises(InvalidArgumentError, match="does not pad to powers of two"):
        rx.RunOptions(experimental_bucketizing_dynamic_shape=True)
    with pytest.raises(InvalidArgumentError, match="XLA compiler options"):
        rx.RunOptions(experimental_xla_options="fast")


def test_xla_options_reach_the_compiler_also_of_a_function_that_ran_without_them():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    good = rx.RunOptions(experimental_xla_options={"xla_cpu_enable_fast_math": False})
    bad = rx.RunOptions(experimental_xla_options={"no_such_option": True})

    def three():
        return 3

    assert strategy.run(three) == strategy.run(three, options=good) == 3
    with pytest.raises(Exception, match="no_such_option"):
        strategy.run(three, options=bad)
    assert not rx.in_cross_replica_context()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack must be at least 0, got -1"),
        ({"timeout_seconds": 0}, "timeout_seconds must be positive, got 0"),
        ({"timeout_seconds": -2.5}, "timeout_seconds must be positive, got -2.5"),
        ({"implementation": "MPI"}, "'MPI' is not a valid CommunicationImplementation"),
    ],
)
def test_communication_options_check_themselves(options, says):
    with pytest.raises(InvalidArgumentError) as caught:
        rx.CommunicationOptions(**options)
    assert says in str(caught.value)


def test_communication_options():
    options = rx.CommunicationOptions(bytes_per_pack=1 << 20, timeout_seconds=5.0, implementation="nccl")
    assert options.implementation is rx.CommunicationImplementation.NCCL
    assert rx.CommunicationOptions().implementation is rx.CommunicationImplementation.AUTO
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.bytes_per_pack = 2


def test_value_context():
    context = rx.ValueContext()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert rx.ValueContext(3, 4) == rx.ValueContext(replica_id_in_sync_group=3, num_replicas_in_sync=4)


def test_input_context():
    context = rx.InputContext(2, 1, 6)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError):
        context.get_per_replica_batch_size(13)
    assert str(rx.InputContext(3, 1, 42)) == "tf.distribute.InputContext(input pipeline id 1, total: 3)"


def test_enums_are_accepted_as_strings_where_they_are_used():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    values = strategy.experimental_distribute_values_from_function(
        lambda c: float(c.replica_id_in_sync_group)
    )
    for op in ("sum", "Sum", "SUM", rx.ReduceOp.SUM):
        assert float(strategy.reduce(op, values, axis=None)) == 1.0
    with strategy.scope():
        v = rx.Variable(0.0, synchronization="on_read", aggregation="mean")
    assert v.synchronization is rx.VariableSynchronization.ON_READ
    assert v.aggregation is rx.VariableAggregation.MEAN
