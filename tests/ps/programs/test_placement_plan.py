"""Tracing a function for workers sends nothing: it returns a plan, which the session carries out."""

import json
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
import store_connections
from checks import message
from replicax._ps.client.session import Session
from replicax._ps.coordinator.per_worker import PerWorkerIterator, PerWorkerValues
from replicax._ps.placement.placement_plan import ArrayPlace, PlacementNeeds
from replicax._ps.placement.placing_rules import PlacementState, plan_placement
from replicax._ps.placement.server_arrays import ServerArray, Shard
from replicax._ps.programs.iterator_inputs import ElementSpec
from replicax._src.variables.partitioners import FixedShardsPartitioner
from replicax.errors import UnsupportedError
from servers import servers

IMPORTS_WITHOUT_SOCKETS = """
import importlib, pkgutil, socket

class Forbidden(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket is made")

socket.socket = Forbidden
import replicax._ps.placement, replicax._ps.programs
for folder in (replicax._ps.placement, replicax._ps.programs):
    for module in pkgutil.iter_modules(folder.__path__, folder.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
"""


def array(name, size, shards=(), on=None):
    """An array of floats that does not exist; or on the server ``on``."""
    made = ServerArray(None, name, (size,), np.float32, lambda: np.zeros(size), shards)
    if on is not None:
        made.key, made.shards = name, (Shard(on, name),)
    return made


def planned(needs, registered=(), bytes_on=(0, 0)):
    return plan_placement(needs, PlacementState(registered, bytes_on, 7))


def where(plan, *arrays):
    return [[shard.ps for shard in plan.places[each].shards] for each in arrays]


# --- the rules ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_arrays_are_created_in_the_order_of_registration_each_where_the_fewest_bytes_are():
    a, b, c, later = (array(name, size) for name, size in (("a", 4), ("b", 2), ("c", 1), ("later", 1)))
    plan = planned(PlacementNeeds([c, a]), [a, b, c, later])
    assert plan.created == [a, b, c]
    assert where(plan, a, b, c) == [[0], [1], [1]]
    assert [plan.places[each].key for each in (a, b, c)] == ["7:a", "8:b", "9:c"]
    assert not a.is_made
    assert plan.is_current


@pytest.mark.quick
def test_plan_is_not_current_after_one_of_its_arrays_was_placed():
    a, b = array("a", 1), array("b", 1)
    plan = planned(PlacementNeeds([b]), [a, b])
    a.key, a.shards = "a", (Shard(1, "a"),)
    assert not plan.is_current


@pytest.mark.quick
def test_slot_is_created_after_its_variable_on_its_servers():
    v, slot = array("v", 4, [(0, 3), (3, 4)]), array("slot", 4)
    plan = planned(PlacementNeeds([slot], colocated=[(slot, v)]), [slot, v], bytes_on=(9, 0))
    assert plan.created == [v, slot]
    assert where(plan, v, slot) == [[1, 0], [1, 0]]
    assert plan.places[slot].row_ranges == ((0, 3), (3, 4))
    assert plan.beside == {slot: v}


@pytest.mark.quick
def test_existing_slot_moves_to_its_variable_once():
    v, slot = array("v", 4, on=0), array("slot", 4, on=1)
    needs = PlacementNeeds([v, slot], colocated=[(slot, v)])
    plan = planned(needs, bytes_on=(16, 16))
    assert plan.moved == [slot]
    assert (where(plan, slot), plan.before[slot]) == ([[0]], ArrayPlace("slot", (Shard(1, "slot"),), {}))
    slot.key, slot.shards = plan.places[slot].key, plan.places[slot].shards
    assert not planned(needs).moved


@pytest.mark.quick
def test_copies_are_made_where_they_are_needed_and_missing():
    v, rate, count = array("v", 4, on=1), array("rate", 1, on=0), array("count", 1, on=0)
    count.copies[2] = "count@2"
    needs = PlacementNeeds([v, rate, count], copied=[(rate, [v]), (count, None)])
    plan = planned(needs, bytes_on=(0, 0, 0))
    assert plan.copied == [(rate, 1), (count, 1)]
    assert plan.places[count].copies == {1: "count@1", 2: "count@2"}
    assert plan.places[rate].key_on(1) == "rate@1"


@pytest.mark.quick
def test_array_that_is_kept_whole_has_one_shard_and_is_refused_if_it_exists_in_more():
    v = array("v", 4, [(0, 3), (3, 4)])
    needs = PlacementNeeds([v], kept_whole=[v])
    assert planned(needs, [v]).places[v].shards == (Shard(0, "7:v"),)
    v.shards = planned(PlacementNeeds([v]), [v]).places[v].shards
    message(UnsupportedError, lambda: planned(needs), "without shards", "in 2 shards")


# --- tracing ------------------------------------------------------------------------------------------


def test_programs_and_placement_are_imported_without_sockets():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_WITHOUT_SOCKETS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "replicax._ps.programs.closure" in done.stdout


class Forbidden(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket is made")


def refuse(*args, **kwargs):
    raise AssertionError("tracing asks a server")


class Traced:
    """A function that was traced while no server could be asked, and the plan that came of it."""

    def __init__(self, monkeypatch, strategy, fn, *args):
        plans = []
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", Forbidden)
            patch.setattr(store_connections.StoreConnector, "open", refuse)
            patch.setattr(store_connections.StoreConnection, "send", refuse)
            patch.setattr(Session, "carry_out", lambda self, plan: plans.append(plan) or True)
            patch.setattr(Session, "keep_programs", lambda *args: None)
            self.prepared = strategy.closures.prepare(fn, args)
        (self.plan,) = plans
        self._session = strategy.session

    def carry_out(self):
        assert self._session.carry_out(self.plan)
        closure = self.prepared.traced.first
        self._session.keep_programs(closure, closure.updates)


def embedding_model(strategy):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(20, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adagrad(0.1)
        optimizer.build(model.trainable_variables)
        total = rx.Variable(np.float32(0))

    def step(ids):
        def replica_fn(ids):
            with rx.GradientTape() as tape:
                loss = jnp.mean(model(ids, training=True) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            total.assign_add(loss)
            return loss

        return strategy.run(replica_fn, args=(ids,))

    return step, lambda: [np.asarray(v.value) for v in [*model.variables, *optimizer.variables, total]]


def test_training_step_is_traced_without_servers_and_runs_when_its_plan_was_carried_out(monkeypatch):
    strategy, one_device = servers(2, FixedShardsPartitioner(2)), rx.OneDeviceStrategy("cpu:0")
    ids = np.int32([[1, 2, 3], [3, 0, 19]])
    step, values = embedding_model(strategy)
    traced = Traced(monkeypatch, strategy, step, ids)
    assert {each.name.split("/")[-1] for each in traced.plan.created} >= {"embeddings", "kernel", "bias"}
    assert not any(each.is_made for each in traced.plan.created)
    (program,) = [traced.prepared.program(digest) for digest in traced.prepared.programs.values()]
    assert sorted(push.ps for push in program.pushes) == [0, 1]
    assert len(program.lookups) == 1
    traced.carry_out()
    losses = [strategy.run_here(step, ids) for _ in range(3)]
    assert strategy.closures.prepare(step, [ids]).traced is traced.prepared.traced, "nothing was traced again"
    step, expected = embedding_model(one_device)
    np.testing.assert_allclose(losses, [step(ids) for _ in range(3)], rtol=1e-6)
    for one, other in zip(expected(), values(), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


def per_worker(kind, name, *shapes):
    leaves = [jax.ShapeDtypeStruct(shape, np.dtype(np.float32)) for shape in shapes]
    return kind(name, lambda: ElementSpec(jax.tree.structure(leaves[0]), tuple(leaves)))


def test_function_of_per_worker_values_is_traced_without_servers(monkeypatch):
    strategy = servers(2)
    with strategy.scope():
        v = rx.Variable(np.zeros(2, np.float32))

    def fn(value, iterator):
        v.assign_add(next(iterator) * value)
        return v.value

    scale, elements = (
        per_worker(PerWorkerValues, "scale", ()),
        per_worker(PerWorkerIterator, "elements", (2,)),
    )
    traced = Traced(monkeypatch, strategy, fn, scale, elements)
    assert traced.prepared.iterators == ["scale", "elements"]
    assert traced.plan.created == [v._value]


@pytest.mark.quick
def test_another_plan_is_made_if_a_variable_is_created_in_the_meantime(monkeypatch):
    strategy = servers(2)
    with strategy.scope():
        v = rx.Variable(np.float32(3))
    carry_out, plans = Session.carry_out, []

    def carry_out_late(session, plan):
        plans.append(plan)
        if len(plans) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(Session, "carry_out", carry_out)
                assert v.numpy() == 3
        return carry_out(session, plan)

    monkeypatch.setattr(Session, "carry_out", carry_out_late)
    assert strategy.run_here(lambda: v.value * 2) == 6
    assert [len(plan.created) for plan in plans] == [1, 0]


def adam_on_three_servers():
    strategy = servers(3)
    with strategy.scope():
        kept = [keras.Variable(np.zeros(n, np.float32)) for n in (5, 4, 3)]
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(kept)
    return strategy, optimizer, lambda: optimizer.apply([np.ones(n, np.float32) for n in (5, 4, 3)], kept)


@pytest.fixture
def requests(monkeypatch):
    """The operations that are sent to each server, in order; and those that fail, as (server, operation, how many
    before)."""
    sent, failing, send = {}, [], store_connections.StoreConnection.send

    def recording(connection, message, timeout_s=60.0):
        ops = sent.setdefault(connection._task, [])
        ops.append(message.header["op"])
        if (connection._task, ops[-1], ops.count(ops[-1])) in failing:
            raise ValueError(f"{connection._task} fails")
        send(connection, message, timeout_s)

    monkeypatch.setattr(store_connections.StoreConnection, "send", recording)
    return sent, failing


@pytest.mark.quick
def test_all_variables_of_a_server_are_created_in_one_request_and_all_copies_in_another(requests):
    strategy, _, step = adam_on_three_servers()
    prepared = strategy.closures.prepare(step)
    assert prepared.traced.is_valid()
    ops = {ps: [op for op in sent if op != "program"] for ps, sent in requests[0].items()}
    assert set(ops) == {"ps 0", "ps 1", "ps 2"}
    assert all(
        each in (["create", "create"], ["create", "step", "create"], ["create", "step"])
        for each in ops.values()
    )


@pytest.mark.quick
def test_function_runs_after_a_copy_of_its_variables_failed(requests):
    strategy, optimizer, step = adam_on_three_servers()
    requests[1].append(("ps 1", "create", 2))
    with pytest.raises(ValueError, match="ps 1 fails"):
        strategy.run_here(step)
    strategy.run_here(step)
    clients, iterations = strategy.session.servers, optimizer.iterations._value
    copies = [Shard(ps, key) for ps, key in iterations.copies.items()]
    assert len(copies) == 2
    assert [value.tolist() for value in clients.read([[copy] for copy in copies])] == [1, 1]


# --- after a move -------------------------------------------------------------------------------------


class WithOwnState(keras.optimizers.SGD):
    """Its sum of gradients is not known to belong to a variable, until an update is traced."""

    def build(self, variables):
        super().build(variables)
        self.sum = self.add_variable((4,), initializer="ones", name="sum")

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(self.sum, gradient)
        self.assign_sub(variable, learning_rate * self.sum)


def own_state(strategy):
    with strategy.scope():
        v = keras.Variable(np.zeros(4, np.float32))
        optimizer = WithOwnState(0.5)
        optimizer.build([v])
    return v, optimizer


def run_around_a_move(strategy, run):
    v, optimizer = own_state(strategy)
    places = []

    def uses(x):
        optimizer.sum.assign(optimizer.sum.value * x)
        optimizer.learning_rate.assign(optimizer.learning_rate.value * x)
        return jnp.sum(optimizer.sum.value)

    def step(gradient):
        optimizer.apply([gradient], [v])

    seen = []
    for fn, argument in [(uses, np.float32(2)), (step, np.ones(4, np.float32)), (uses, np.float32(3))] * 2:
        seen.append(run(fn, argument))
        places.append(getattr(optimizer.sum._value, "shards", None))
    return [seen[0], seen[2], v.value, optimizer.sum.value, optimizer.learning_rate.value], places


@pytest.mark.quick
def test_function_that_was_traced_before_a_variable_moved_uses_its_new_place():
    strategy = servers(2)
    expected, _ = run_around_a_move(rx.OneDeviceStrategy("cpu:0"), lambda fn, *args: fn(*args))
    values, places = run_around_a_move(strategy, strategy.run_here)
    assert places[0] != places[1] == places[5], "the first update moves it"
    for one, other in zip(expected, values, strict=True):
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-6)


@pytest.mark.quick
def test_function_is_traced_again_if_its_own_trace_for_other_elements_moved_a_variable():
    strategy = servers(2)
    v, optimizer = own_state(strategy)
    elements = per_worker(PerWorkerIterator, "elements", (1,))

    def fn(iterator):
        x = next(iterator)
        optimizer.sum.assign_add(jnp.ones(4))
        if len(x) > 1:
            optimizer.apply([jnp.ones(4)], [v])

    prepared = strategy.closures.prepare(fn, [elements])
    before = optimizer.sum._value.shards
    assert prepared.traced.is_valid()
    prepared.make(json.dumps([[[[2], "float32"]]]))
    assert optimizer.sum._value.shards != before
    assert not prepared.traced.is_valid()
    assert strategy.closures.prepare(fn, [elements]).traced.is_valid()
