"""Programs that are cut at their sums: the results of one device, one order of locks, and none that never runs."""

import contextlib
import dataclasses

import jax
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.collectives.host_sums.ordered_addition import HostOp, can_add, combine
from replicax._src.devices.topology import REPLICA_AXIS, Topology
from replicax._src.lowering import global_view
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.lowering.cut_step import CutStep
from replicax._src.lowering.global_view import GlobalStep
from replicax._src.lowering.held_state import HeldState
from replicax._src.lowering.round_programs import ReplicaOperand
from replicax._src.tracing.bindings import state_lock
from replicax._src.tracing.replica_rounds import cut_at_sums
from replicax._src.tracing.rounds import segments_of


class SumsInAProcess:
    """Adds the arrays of one process, as the hosts of several do."""

    transport = "memory"

    def __init__(self):
        self.num_programs = 0
        self.is_locked = []

    @contextlib.contextmanager
    def program(self, name, text):
        self.is_locked.append(state_lock._is_owned())
        self.num_programs += 1
        yield

    def all_reduce(self, op, arrays):
        result = np.empty_like(arrays[0])
        combine(HostOp(op), [array.reshape(-1) for array in arrays], result.reshape(-1))
        return result

    def can_add(self, dtype):
        return can_add(dtype)


def descending(state, batch):
    """A step of gradient descent, with a value of the state that stays, and one that another one had."""
    ((weights, fixed), (_previous,)) = state
    x, y = batch["x"], batch["y"]
    error = x @ weights - y
    gradient = x.T @ error / x.shape[0]
    return {"loss": (error * error).mean()}, ([weights - 0.1 * gradient, fixed], [weights])


def after(topology, batches, capacity=1):
    """Returns the losses of calls with one batch each, or of one call, and the state."""
    step = GlobalStep(descending, "step", topology, donates=True, keeps_all=False)
    held = HeldState(topology)
    groups = held.hold(([jax.numpy.ones(3), jax.numpy.ones(2)], [jax.numpy.zeros(3)]))
    outputs = []
    calls = [batches] if capacity > 1 else [[batch] for batch in batches]
    for call in calls:
        of_call = [DatasetBatch(batch) for batch in call]
        program = step.program(held, of_call[0], capacity)
        held.adopt(program.written, lambda: [None] * sum(map(len, groups)))
        outputs += program(held, of_call)
    return np.asarray(outputs[-1]["loss"]), [np.asarray(value) for group in groups for value in group]


def batches_of(rows, count):
    random = np.random.default_rng(rows)
    return [
        {
            "x": random.normal(size=(rows, 3)).astype("float32"),
            "y": random.normal(size=rows).astype("float32"),
        }
        for _ in range(count)
    ]


@pytest.fixture
def sums():
    return SumsInAProcess()


def cut_topology(sums, num_replicas=2):
    return dataclasses.replace(Topology.of(jax.devices()[:num_replicas]), host_sums=sums)


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_cut_step_is_that_of_one_device(sums, rows):
    loss, state = after(cut_topology(sums, 3), batches_of(rows, 3))
    expected_loss, expected = after(Topology.of(jax.devices()[:1]), batches_of(rows, 3))
    assert sums.num_programs == 3
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for value, expected_value in zip(state, expected, strict=True):
        np.testing.assert_allclose(value, expected_value, rtol=1e-4, atol=1e-6)


def test_a_cut_step_takes_the_lock_of_the_state_first(sums):
    """As ``strategy.run`` does: in two orders, two threads would wait for each other."""
    after(cut_topology(sums), batches_of(4, 2))
    assert sums.is_locked == [True, True]


def test_several_steps_of_a_call_compile_one_cut_step(sums, monkeypatch):
    made = []
    monkeypatch.setattr(
        global_view, "CutStep", lambda *args, **kwargs: made.append(1) or CutStep(*args, **kwargs)
    )
    after(cut_topology(sums), batches_of(4, 3), capacity=3)
    assert made == [1]
    assert sums.num_programs == 3


def test_a_cut_run_computes_its_loss_once():
    """The last program takes the outputs of the model, not the rows: it does not repeat the model's work."""

    def step(weights, rows):
        outputs = rows @ weights
        gradient = jax.lax.psum(rows.T @ outputs, REPLICA_AXIS)
        return weights - 0.1 * gradient, (outputs**2).mean()

    operands = [jax.ShapeDtypeStruct((3,), np.float32), jax.ShapeDtypeStruct((4, 3), np.float32)]
    jaxpr = jax.make_jaxpr(step, axis_env=[(REPLICA_AXIS, 2)])(*operands).jaxpr
    program = cut_at_sums(jaxpr, ReplicaOperand(), 2, takes_first=False)
    first, last = segments_of(program)
    weights, rows = program.inputs
    assert set(first.takes) == {weights, rows}
    assert set(last.takes) == {weights, *first.passes, program.rounds[0][0].result}
    assert len(first.passes) == 1


def descended(strategy):
    """Returns the weights after steps of a custom loop with an optimizer."""
    with strategy.scope():
        weights = keras.Variable(np.ones((8, 4), np.float32))
        optimizer = keras.optimizers.Adam(0.1)

    def step(x):
        with rx.GradientTape() as tape:
            loss = ((x @ weights.value) ** 2).mean()
        optimizer.apply(tape.gradient(loss, [weights]), [weights])

    rows = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
    x = strategy.experimental_distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group :][:1]
    )
    for _ in range(3):
        strategy.run(step, args=(x,))
    return np.asarray(weights.value)


@pytest.mark.parametrize("shard_state", [None, "optimizer"])
def test_a_cut_run_updates_all_variables(sums, monkeypatch, shard_state):
    """A program whose updates run on shards is not cut: the sums are only in its first part."""
    expected = descended(rx.MirroredStrategy(["cpu:0", "cpu:1"]))
    of = Topology.of
    monkeypatch.setattr(
        Topology, "of", lambda *args, **how: dataclasses.replace(of(*args, **how), host_sums=sums)
    )
    shards = {} if shard_state is None else {"shard_state": shard_state, "shard_size": 2}
    value = descended(rx.MirroredStrategy(["cpu:0", "cpu:1"], **shards))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert sums.num_programs == (3 if shard_state is None else 0)
