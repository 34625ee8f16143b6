"""The runner of closures, with real stores in this process, whose answers are overwritten by the next one."""

import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from exported import blob, update_program, worker_program
from replicax._ps.client import request_rules
from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.server_contents import NewShard, ServerContents
from replicax._ps.client.server_requests import Ask
from replicax._ps.programs.programs import (
    Input,
    Lookup,
    Operand,
    Push,
    Shard,
    WorkerProgram,
    signature_of,
)
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message
from replicax._ps.worker import pulls as pulls_module
from replicax._ps.worker import runner as runner_module
from replicax._ps.worker.prefetched_elements import ElementQueue, End
from replicax._ps.worker.runner import ClosureCall, Runner
from replicax._src.devices import memory
from replicax._src.vocabulary.errors import InvalidArgumentError, UnavailableError, UnknownProgramError
from store_connections import StoreConnection, server_clients

ME = "me"
NO_ELEMENTS = signature_of([])


class Overwritten:
    """A client of a store whose arrays become invalid with the next answer: a caller that needs them later must copy
    them."""

    def __init__(self, store, task):
        self.store, self.task = store, task

    def open(self):
        return OverwrittenLink(self)

    def close(self):
        pass


class OverwrittenLink:
    def __init__(self, client):
        self.link = StoreConnection(client.store, client.task)
        self.arrays = []

    def send(self, message):
        self.link.send(message)

    def receive(self, timeout_s):
        answer = self.link.receive(timeout_s)
        for array in self.arrays:
            array.reshape(-1).view(np.uint8)[:] = 0x7F
        self.arrays = [np.array(array) for array in answer.arrays]
        return Message(answer.header, self.arrays)

    def close(self):
        pass


class Elements:
    """An iterator over elements of one leaf."""

    def __init__(self, *leaves):
        self.leaves = [np.asarray(leaf, np.float32) for leaf in leaves]
        self.num_taken = 0
        self.is_ready = True

    def next(self):
        if self.num_taken == len(self.leaves):
            return End("no more")
        self.num_taken += 1
        return [self.leaves[self.num_taken - 1]]


@pytest.fixture
def stores():
    made = [Store(), Store()]
    for store in made:
        store.hello(ME)
    return made


@pytest.fixture
def new_clients(stores):
    return lambda: ServerClients([Overwritten(store, f"ps {i}") for i, store in enumerate(stores)], ME)


@pytest.fixture
def servers(new_clients):
    return new_clients()


@pytest.fixture
def runner(new_clients):
    made = Runner(new_clients())
    made.servers = made._servers
    return made


def create(servers, pieces, value):
    value = np.asarray(value, np.float32)
    parts = [value if p.rows is None else value[slice(*p.rows)] for p in pieces]
    ServerContents(servers).create(
        [NewShard(p, part.shape, part.dtype, part) for p, part in zip(pieces, parts, strict=True)]
    )
    return pieces


def call(number, digest, *arguments, epoch=0, low=0, iterators=(), signature=NO_ELEMENTS):
    programs = digest if isinstance(digest, dict) else {signature: digest}
    return ClosureCall((ME, number), low, epoch, programs, list(map(np.asarray, arguments)), iterators)


def add_to(servers, piece, value=0.0):
    """A program that adds an operand to a piece, for ``servers``; returns its digest."""
    value = np.asarray(value, np.float32)
    return ServerContents(servers).send_program(
        piece.ps, update_program(lambda v, delta: (v + delta,), [piece.key], [0], value, value)
    )


@pytest.fixture
def counting(servers, runner):
    """A program that adds its argument to a counter, and returns the old counter and half of it.

    The counter lies beside another variable, which is only read.
    """
    (counter,), (other,) = create(servers, [Shard(0, "n")], 10), create(servers, [Shard(0, "other")], 5)
    push = Push(0, add_to(runner.servers, counter), (Operand(2),))

    def add(n, other, x):
        return n, other * 2, x

    inputs = [Input("variable", 0), Input("variable", 1), Input("argument", 0)]
    scalar = np.float32(0)
    program = worker_program(add, inputs, [scalar] * 3, [[counter], [other]], num_results=2, pushes=(push,))
    return runner.add_program(program)


def test_closure_computes_from_variables_and_pushes(servers, runner, counting):
    results = runner.run(call(0, counting, np.float32(3))).results
    assert [type(result) for result in results] == [np.ndarray, np.ndarray]
    assert [float(result) for result in results] == [10, 10]
    assert servers.read([[Shard(0, "n")]])[0] == 13


def test_values_for_the_next_closure_come_with_the_push(runner, counting):
    first = [float(runner.run(call(i, counting, np.float32(1))).results[0]) for i in range(5)]
    assert first == [10, 11, 12, 13, 14]
    assert runner.statistics()["num_pulls"] == 1
    assert runner.servers.statistics()["ps 0"]["num_messages"] == 1 + 1 + 5  # a pull, the program, five steps


def test_values_of_another_epoch_are_pulled_again(servers, runner, counting):
    runner.run(call(0, counting, np.float32(1)))
    ServerContents(servers).assign([([Shard(0, "n")], np.float32(100)), ([Shard(0, "other")], np.float32(1))])
    assert (
        float(runner.run(call(1, counting, np.float32(1), epoch=0)).results[0]) == 11
    )  # as told: nothing is new
    results = runner.run(call(2, counting, np.float32(1), epoch=1)).results
    assert [float(result) for result in results] == [101, 2]


def test_unwritten_variable_is_not_sent_again(stores, runner, counting):
    for number in range(2):
        runner.run(call(number, counting, np.float32(1)))
    before = stores[0].statistics()["shards_sent"]
    for number in range(2, 7):
        results = runner.run(call(number, counting, np.float32(1))).results
        assert [float(result) for result in results] == [10 + number, 10]
    assert stores[0].statistics()["shards_sent"] == before + 5  # the counter only


def test_a_kept_variable_that_is_written_after_all_is_seen(servers, runner, counting):
    for number in range(4):
        runner.run(call(number, counting, np.float32(1)))
    ServerContents(servers).assign([([Shard(0, "other")], np.float32(50))])
    for number in range(4, 7):
        results = runner.run(call(number, counting, np.float32(1), epoch=1)).results
        assert [float(result) for result in results] == [10 + number, 100]


def test_alternating_programs_see_current_variables(servers, runner, counting):
    (third,) = create(servers, [Shard(0, "third")], 7)
    read = worker_program(lambda x: x, [Input("variable", 0)], [np.float32(0)], [[third]])
    reading = runner.add_program(read)
    for number in range(0, 8, 2):
        assert float(runner.run(call(number, counting, np.float32(1))).results[0]) == 10 + number / 2
        ServerContents(servers).assign([([third], np.float32(number))])
        assert float(runner.run(call(number + 1, reading)).results[0]) == number


def test_another_client_is_seen_by_a_closure_without_pushes(servers, runner):
    (value,) = create(servers, [Shard(1, "v")], 1)
    reading = runner.add_program(
        worker_program(lambda x: x + 1, [Input("variable", 0)], [np.float32(0)], [[value]])
    )
    for number in range(8):
        if number == 5:  # it has come in the same version before, and is kept
            ServerContents(servers).assign([([value], np.float32(30))])
        assert float(runner.run(call(number, reading)).results[0]) == (2 if number < 5 else 31)


def test_a_runner_that_does_not_pull_ahead_pulls_each_time(new_clients, servers, counting, runner):
    rare = Runner(new_clients(), pulls_ahead=False)
    rare.add_program(runner._programs[counting].program)
    runner.run(call(0, counting, np.float32(1)))  # so that the server has the push's program
    for number in range(1, 4):
        ServerContents(servers).assign([([Shard(0, "n")], np.float32(number))])
        assert float(rare.run(call(number, counting, np.float32(1))).results[0]) == number
    assert rare.statistics()["num_pulls"] == 3


def test_staleness_is_measured_by_the_server(stores, servers, runner, counting):
    adding = add_to(servers, Shard(0, "n"))
    runner.run(call(0, counting, np.float32(1)))
    for number in range(3):
        servers.step(("other", number), 0, {0: Ask(adding, [np.float32(1)])})
    before = dict(stores[0].statistics()["staleness"])
    runner.run(call(1, counting, np.float32(1)))
    after = stores[0].statistics()["staleness"]
    assert (before["max"], after["max"]) == (0, 3)


def test_repeated_closure_pushes_once(servers, runner, counting):
    for _ in range(3):
        runner.run(call(4, counting, np.float32(3)))
    assert servers.read([[Shard(0, "n")]])[0] == 13


@pytest.mark.rest
def test_sharded_variable_is_pulled_in_full_and_pushed_in_shards(servers, runner):
    shards = create(servers, [Shard(0, "t/0", (0, 2)), Shard(1, "t/1", (2, 3))], [[1, 2], [3, 4], [5, 6]])
    pushes = [
        Push(p.ps, add_to(runner.servers, p, np.zeros((p.rows[1] - p.rows[0], 2))), (Operand(1, p.rows),))
        for p in shards
    ]
    table = np.zeros((3, 2), np.float32)
    double = worker_program(
        lambda t: (t.sum(), t), [Input("variable", 0)], [table], [shards], pushes=tuple(pushes)
    )
    doubling = runner.add_program(double)
    assert [float(runner.run(call(i, doubling)).results[0]) for i in range(3)] == [21, 42, 84]
    np.testing.assert_array_equal(
        servers.read([shards])[0], np.array([[1, 2], [3, 4], [5, 6]], np.float32) * 8
    )


def test_constants_are_sent_before(runner):
    ones = np.ones(50_000, np.float32)
    inputs = [Input("constant", name="c"), Input("argument", 0)]
    program = worker_program(lambda c, x: (c * x).sum(), inputs, [ones] * 2)
    digest = runner.add_program(program)
    with pytest.raises(UnknownProgramError, match="constant c") as error:
        runner.run(call(0, digest, ones))
    assert error.value.digest == "c"
    constant = memory.empty(ones.shape, ones.dtype)  # as XLA takes it without a copy
    constant[:] = 2
    runner.add_constant("c", constant)
    constant[:] = -1  # what came in a message is overwritten
    assert float(runner.run(call(0, digest, ones)).results[0]) == 100_000


def test_compiling_is_counted_once(runner, counting):
    assert runner.statistics()["compile_s"] == 0
    runner.run(call(0, counting, np.float32(1)))
    once = runner.statistics()["compile_s"]
    runner.run(call(1, counting, np.float32(1)))
    assert 0 < once == runner.statistics()["compile_s"]
    assert runner.statistics()["num_closures"] == 2


# --- elements -----------------------------------------------------------------------------------------


def summing(name, size, counts=(2, 1)):
    """A program over two iterators: the sum of two elements of the first, times one of the second."""
    inputs = [Input("element", 0, call=0), Input("element", 0, call=1), Input("element", 1)]
    if counts == (1, 1):
        inputs = [inputs[0], inputs[0], inputs[2]]

    def total(a, b, c):
        return (a.sum() + 2 * b.sum()) * c

    total.__name__ = name
    avals = [np.zeros(size, np.float32)] * 2 + [np.float32(0)]
    return worker_program(total, inputs, avals, element_counts=counts)


def signature(*shapes):
    """Elements of one leaf; None for a missing one."""
    return signature_of([None if shape is None else [(shape, np.dtype(np.float32))] for shape in shapes])


SMALL = signature((2,), (2,), ())


def test_elements_are_taken_in_the_order_of_the_program(runner):
    digest = runner.add_program(summing("total", 2))
    iterators = [Elements([1, 1], [2, 2], [3, 3], [4, 4]), Elements(10, 100)]
    for number, expected in enumerate([(2 + 8) * 10, (6 + 16) * 100]):
        result = runner.run(call(number, digest, iterators=iterators, signature=SMALL))
        assert float(result.results[0]) == expected


def test_elements_without_a_program_are_held_for_the_closure(runner):
    small = runner.add_program(summing("total", 2))
    iterators = [Elements([1, 1, 1], [2, 2, 2], [3, 3], [4, 4]), Elements(10, 100)]
    first = call(0, small, iterators=iterators, signature=SMALL)
    needed = runner.run(first).need
    assert needed == signature((3,), (3,), ())
    # Another closure runs meanwhile, with its own elements.
    assert float(
        runner.run(call(1, small, iterators=iterators, signature=SMALL)).results[0]
    ) == pytest.approx(2200)
    large = runner.add_program(summing("total", 3))
    again = call(0, {SMALL: small, needed: large}, iterators=iterators)
    assert float(runner.run(again).results[0]) == (3 + 12) * 10
    assert [each.num_taken for each in iterators] == [4, 2]
    assert runner.statistics()["num_held"] == 0
    assert runner.statistics()["examples"] == (2 + 2 + 1) + (3 + 3 + 1)  # an element without dims is one row


def test_waits_for_elements_are_counted(runner, monkeypatch):
    iterators = [Elements([1, 1], [2, 2]), Elements(10)]
    take = iterators[0].next
    monkeypatch.setattr(iterators[0], "next", lambda: (time.sleep(0.05), take())[1])
    runner.run(call(0, runner.add_program(summing("total", 2)), iterators=iterators, signature=SMALL))
    assert runner.statistics()["data_s"] >= 0.1


def test_held_elements_of_a_closure_that_has_ended_are_dropped(runner):
    small = runner.add_program(summing("total", 2))
    iterators = [Elements([1, 1, 1], [2, 2, 2], [3, 3], [4, 4]), Elements(10, 100)]
    assert runner.run(call(0, small, iterators=iterators, signature=SMALL)).need
    assert runner.statistics()["num_held"] == 1
    runner.run(call(1, small, iterators=iterators, low=1, signature=SMALL))
    assert runner.statistics()["num_held"] == 0


def test_unknown_program_is_requested_before_elements_are_taken(runner):
    iterators = [Elements([1, 1], [2, 2]), Elements(10)]
    program = summing("total", 2)
    with pytest.raises(UnknownProgramError) as error:
        runner.run(call(0, program.digest, iterators=iterators, signature=SMALL))
    assert error.value.digest == program.digest
    assert [each.num_taken for each in iterators] == [0, 0]


def test_at_the_end_of_a_dataset_nothing_is_pushed(servers, runner):
    (counter,) = create(servers, [Shard(0, "n")], 0)
    push = Push(0, add_to(runner.servers, counter), (Operand(0),))
    program = worker_program(
        lambda x: x, [Input("element", 0)], [np.float32(0)], pushes=(push,), element_counts=(1,)
    )
    digest = runner.add_program(program)
    iterators = [Elements(1, 2)]
    for number in range(2):
        runner.run(call(number, digest, iterators=iterators, signature=signature(())))
    result = runner.run(call(2, digest, iterators=iterators, signature=signature(())))
    assert result.need == signature(None)
    assert result.end == End("no more")
    assert servers.read([[counter]])[0] == 3


def test_elements_are_held_when_a_server_lacks_the_program_of_the_push(servers, runner):
    (counter,) = create(servers, [Shard(0, "n")], 0)
    adding = update_program(lambda v, delta: (v + delta,), ["n"], [0], np.float32(0), np.float32(0))
    push = Push(0, adding.digest, (Operand(0),))
    program = worker_program(
        lambda x: x, [Input("element", 0)], [np.float32(0)], pushes=(push,), element_counts=(1,)
    )
    digest, iterators = runner.add_program(program), [Elements(1, 2)]
    closure = call(0, digest, iterators=iterators, signature=signature(()))
    with pytest.raises(UnknownProgramError) as error:
        runner.run(closure)
    assert error.value.digest == adding.digest
    ServerContents(runner.servers).send_program(0, adding)
    assert float(runner.run(closure).results[0]) == 1
    assert iterators[0].num_taken == 1
    assert servers.read([[counter]])[0] == 1


def test_elements_unused_by_their_program_are_returned(runner):
    two, one = runner.add_program(summing("two", 2)), runner.add_program(summing("one", 3, (1, 1)))
    iterators = [Elements([1, 1, 1], [2, 2, 2], [3, 3, 3]), Elements(10, 100)]
    large = signature((3,), (3,), ())
    for number, expected in enumerate([(3 + 6) * 10, (6 + 12) * 100]):
        result = runner.run(call(number, {SMALL: two, large: one}, iterators=iterators))
        assert result.signature == large
        assert float(result.results[0]) == expected


def test_program_for_a_missing_element_uses_or_returns_the_others(runner):
    two = runner.add_program(summing("two", 2))
    short = signature((2,), None, ())
    first, none = [Input("element", 0)], []
    for counts, inputs, left in (((2, 0), first, [10]), ((1, 1), first, []), ((0, 0), none, [1, 10])):
        program = worker_program(
            lambda *x: jnp.float32(sum(map(jnp.sum, x))),
            inputs,
            [np.zeros(2, np.float32)] * len(inputs),
            element_counts=counts,
        )
        iterators = [Elements([1, 1]), Elements(10)]
        programs = {SMALL: two, short: runner.add_program(program)}
        result = runner.run(call(0, programs, iterators=iterators))
        assert result.signature == short
        assert float(result.results[0]) == 2 * len(inputs)
        rest = [runner._elements.take([iterator], [2])[0] for iterator in iterators]
        rest = [float(x[0].flat[0]) for taken in rest for x in taken if not isinstance(x, End)]
        assert rest == left


# --- rows of tables -----------------------------------------------------------------------------------

NUM_ROWS, DIM = 7, 3
PLACES = {
    "one piece": [Shard(0, "t")],
    "two shards": [Shard(0, "t/0", (0, 4)), Shard(1, "t/1", (4, 7))],
    "two shards of one server": [Shard(1, "t/0", (0, 4)), Shard(1, "t/1", (4, 7))],
}


def lookup_step(w, first, where_first, second, where_second):
    """A loss of two lookups of one table, and its gradients."""

    def loss(w, first, second):
        a = jnp.take(first, where_first, axis=0, mode="fill", fill_value=0)
        b = jnp.take(second, where_second, axis=0, mode="fill", fill_value=0)
        return (a * w).sum() + (b**2).sum()

    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(w, first, second)
    return value, *gradients


def one_step(w, table, ids, other_ids):
    """The result of ``lookup_step`` on the full table, and the resulting change."""

    def loss(w, table):
        a = jnp.take(table, ids, axis=0, mode="fill", fill_value=0)
        b = jnp.take(table, other_ids, axis=0, mode="fill", fill_value=0)
        return (a * w).sum() + (b**2).sum()

    value, (of_w, of_table) = jax.value_and_grad(loss, (0, 1))(w, table)
    return value, w - 0.5 * of_w, table - 0.5 * of_table


@pytest.fixture(params=PLACES)
def looking_up(request, servers, runner):
    """The program of ``lookup_step``, which looks up [2, 2] ids and 3 more, on a sharded table."""
    pieces = PLACES[request.param]
    table = np.arange(NUM_ROWS * DIM, dtype=np.float32).reshape(NUM_ROWS, DIM)
    create(servers, pieces, table)
    (w,) = create(servers, [Shard(0, "w")], np.ones(DIM))
    pushes: dict[int, list] = {0: [("w", np.ones(DIM, np.float32), [Operand(1)])]}
    for piece in pieces:
        shard = table if piece.rows is None else table[slice(*piece.rows)]
        operands = [Operand(2, piece.rows, 0), Operand(3, piece.rows, 1)]
        pushes.setdefault(piece.ps, []).append((piece.key, shard, operands))
    program = worker_program(
        lookup_step,
        [Input("variable", 0)]
        + [Input(kind, 1, call=number) for number in range(2) for kind in ("rows", "positions")],
        [np.ones(DIM, np.float32), table[:4], np.zeros((2, 2), np.int32), table[:3], np.zeros(3, np.int32)],
        [[w], pieces],
        pushes=tuple(push_of(runner, ps, parts) for ps, parts in pushes.items()),
        lookups=tuple(
            Lookup(
                1,
                blob(lambda x: x - 1, np.zeros(shape, np.int32)),
                (Input("argument", number),),
                size,
                NUM_ROWS,
            )
            for number, (shape, size) in enumerate([((2, 2), 4), ((3,), 3)])
        ),
    )
    return runner.add_program(program), [[w], pieces], table


def push_of(runner, ps, parts):
    """A push of SGD for the values of ``parts``: (key, value, operands)."""
    keys = [key for key, _, _ in parts]

    def update(*arrays):
        values, rest = list(arrays[: len(keys)]), list(arrays[len(keys) :])
        for position, (_, _, operands) in enumerate(parts):
            for operand in operands:
                if operand.lookup is None:
                    values[position] -= 0.5 * rest.pop(0)
                else:
                    numbers, gradients = rest.pop(0), rest.pop(0)
                    values[position] = values[position].at[numbers].add(-0.5 * gradients, mode="drop")
        return values

    inputs = [value for _, value, _ in parts]
    for _, _, operands in parts:
        for operand in operands:
            if operand.lookup is None:
                inputs.append(np.ones(DIM, np.float32))
            else:
                size = (4, 3)[operand.lookup]
                inputs += [np.zeros(size, np.int32), np.zeros((size, DIM), np.float32)]
    digest = ServerContents(runner.servers).send_program(
        ps, update_program(update, keys, range(len(keys)), *inputs)
    )
    return Push(ps, digest, tuple(operand for _, _, operands in parts for operand in operands))


IDS = [
    ([[0, 6], [6, 2]], [3, 3, 3]),
    ([[5, 5], [5, 5]], [0, 1, 2]),
    ([[0, 1], [2, 3]], [6, 5, 4]),
    ([[1, 99], [6, NUM_ROWS]], [-9, 2, 2]),  # what is outside of the table is filled
    ([[9, 9], [9, 9]], [9, 9, 9]),
]


@pytest.mark.rest
def test_rows_are_pulled_and_their_gradients_pushed(servers, runner, looking_up):
    digest, variables, table = looking_up
    w, table = jnp.ones(DIM), jnp.asarray(table)
    for number, (ids, others) in enumerate(IDS):
        ids, others = np.array(ids, np.int32), np.array(others, np.int32)
        loss = runner.run(call(number, digest, ids + 1, others + 1)).results[0]
        # (JAX counts negative ids from the end; a program for a lookup's ids gives NaN for ids out of range.)
        expected, w, table = one_step(w, table, ids, np.where(others < 0, 99, others))
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        values = servers.read(variables)
        np.testing.assert_allclose(values[0], w, rtol=1e-6)
        np.testing.assert_allclose(values[1], table, rtol=1e-6)


@pytest.mark.rest
def test_each_row_is_sent_once_per_lookup(stores, runner, looking_up):
    digest, _variables, _ = looking_up
    runner.run(call(0, digest, np.array([[6, 6], [2, 6]], np.int32) + 1, np.array([6, 6, 6], np.int32) + 1))
    assert sum(store.statistics()["rows_sent"] for store in stores) == 2 + 1
    assert runner.statistics()["num_pulls"] == 1


# --- several devices ----------------------------------------------------------------------------------


def test_a_program_of_several_replicas_runs_on_as_many_devices(servers, runner):
    (w,) = create(servers, [Shard(0, "w")], 2)
    mesh = jax.sharding.AbstractMesh((2,), ("replica",))
    rows = PartitionSpec("replica")

    @jax.shard_map(mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=(PartitionSpec(), rows))
    def step(w, x):
        return jax.lax.psum((w * x).sum(), "replica"), x + jax.lax.axis_index("replica")

    avals = [
        jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, PartitionSpec())),
        jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(mesh, rows)),
    ]
    exported = export.export(jax.jit(step), platforms=["cpu"])(*avals)
    push = Push(0, add_to(runner.servers, w), (Operand(0),))
    inputs = (Input("variable", 0), Input("argument", 0))
    program = WorkerProgram("step", bytes(exported.serialize()), inputs, ((w,),), 2, (push,), num_replicas=2)
    digest = runner.add_program(program)
    results = runner.run(call(0, digest, np.arange(4, dtype=np.float32))).results
    assert float(results[0]) == 12
    np.testing.assert_array_equal(results[1], [0, 1, 3, 4])
    assert servers.read([[w]])[0] == 14


def test_program_with_more_replicas_than_devices_raises(runner):
    program = worker_program(lambda x: x, [Input("argument", 0)], [np.float32(0)], num_replicas=99)
    with pytest.raises(InvalidArgumentError, match=r"99 replicas.*8 devices"):
        runner.add_program(program)


# --- failures -----------------------------------------------------------------------------------------


def test_everything_is_pulled_again_after_a_server_was_gone(stores, servers, runner, counting, monkeypatch):
    monkeypatch.setattr(request_rules, "_PAUSES_S", (0.0,))
    runner.run(call(0, counting, np.float32(1)))
    answer, stores[0].answer = stores[0].answer, gone
    with pytest.raises(UnavailableError):
        runner.run(call(1, counting, np.float32(1)))
    stores[0].answer = answer
    ServerContents(servers).assign([([Shard(0, "n")], np.float32(50))])
    assert float(runner.run(call(1, counting, np.float32(1))).results[0]) == 50


def gone(message):
    raise UnavailableError("gone", "ps 0")


def test_overwritten_values_are_not_used_after_a_failed_closure(servers, runner, new_clients, counting):
    runner.run(call(0, counting, np.float32(1)))  # so that the server has the push's program
    shared = new_clients()
    rare = Runner(shared, pulls_ahead=False)
    rare.add_program(runner._programs[counting].program)
    with pytest.raises(ValueError):
        rare.run(call(1, counting, np.zeros((2, 2), np.float32)))
    shared.read([[Shard(0, "other")]])
    results = rare.run(call(2, counting, np.float32(1))).results
    assert [float(result) for result in results] == [11, 10]


def test_mismatched_arguments_raise_and_the_next_closure_runs(servers, runner, counting):
    with pytest.raises(ValueError):
        runner.run(call(0, counting, np.zeros((2, 2), np.float32)))
    assert float(runner.run(call(1, counting, np.float32(1))).results[0]) == 10
    assert servers.read([[Shard(0, "n")]])[0] == 11


# --- what is kept -------------------------------------------------------------------------------------


def test_least_recently_used_programs_are_forgotten(runner, monkeypatch):
    monkeypatch.setattr(runner_module, "_MOST_PROGRAMS", 2)
    programs = [
        worker_program(lambda x, n=n: x + n, [Input("argument", 0)], [np.float32(0)]) for n in range(3)
    ]
    digests = [runner.add_program(program) for program in programs[:2]]
    runner.run(call(0, digests[0], np.float32(1)))
    digests.append(runner.add_program(programs[2]))
    for number in (0, 2):
        assert float(runner.run(call(1, digests[number], np.float32(1))).results[0]) == 1 + number
    with pytest.raises(UnknownProgramError) as error:
        runner.run(call(2, digests[1], np.float32(1)))
    assert error.value.digest == digests[1]


def test_unused_values_are_dropped(runner, counting, servers, monkeypatch):
    monkeypatch.setattr(pulls_module, "_CLOSURES_PER_SWEEP", 5)
    (third,) = create(servers, [Shard(0, "third")], 7)
    reading = runner.add_program(
        worker_program(lambda x: x, [Input("variable", 0)], [np.float32(0)], [[third]])
    )
    for number in range(4):
        runner.run(call(number, reading))
    assert (0, "third") in runner._pulls._copies
    for number in range(4, 16):
        assert float(runner.run(call(number, counting, np.float32(1))).results[0]) == 6 + number
    assert set(runner._pulls._copies) == {(0, "n"), (0, "other")}
    assert float(runner.run(call(16, reading)).results[0]) == 7


def test_shared_clients_are_locked_while_a_closure_uses_them(new_clients, servers, counting, runner):
    shared = new_clients()
    rare = Runner(shared, pulls_ahead=False)
    program = runner._programs[counting].program
    rare.add_program(program)
    runner.run(call(0, counting, np.float32(1)))  # so that the server has the push's program
    reader = threading.Thread(target=lambda: [shared.read([[Shard(0, "other")]]) for _ in range(300)])
    reader.start()
    for number in range(1, 30):
        results = rare.run(call(number, counting, np.float32(1))).results
        assert [float(result) for result in results] == [10 + number, 10]
    reader.join(timeout=60)
    assert not reader.is_alive()


# --- looking ahead ------------------------------------------------------------------------------------


@pytest.fixture
def bagging(servers, runner):
    """A program that subtracts 1 from the rows of a table at 2 ids, which are its element, and returns their sum."""
    pieces = create(servers, PLACES["two shards"], np.arange(NUM_ROWS * DIM).reshape(NUM_ROWS, DIM))
    (scale,) = create(servers, [Shard(1, "scale")], 1)
    pushes = []
    for piece in pieces:
        shard = np.zeros((piece.rows[1] - piece.rows[0], DIM), np.float32)
        operands = [np.zeros(2, np.int32), np.zeros((2, DIM), np.float32)]
        if piece.ps == 0:
            update = update_program(
                lambda v, numbers, g: (v.at[numbers].add(-g, mode="drop"),),
                [piece.key],
                [0],
                shard,
                *operands,
            )
        else:  # writes the scale, as it is: so it travels each time
            update = update_program(
                lambda v, scale, numbers, g: (v.at[numbers].add(-g, mode="drop"), scale + 0),
                [piece.key, "scale"],
                [0, 1],
                shard,
                np.float32(0),
                *operands,
            )
        operands = (Operand(1, piece.rows, 0),)
        pushes.append(Push(piece.ps, ServerContents(runner.servers).send_program(piece.ps, update), operands))
    program = worker_program(
        lambda rows, positions, scale: (rows[positions].sum() * scale, jnp.ones_like(rows)),
        [Input("rows", 0), Input("positions", 0), Input("variable", 1)],
        [np.zeros((2, DIM), np.float32), np.zeros(2, np.int32), np.float32(0)],
        [pieces, [scale]],
        pushes=tuple(pushes),
        lookups=(
            Lookup(
                0,
                blob(lambda x: x.astype(np.int32), np.zeros(2, np.float32)),
                (Input("element", 0),),
                2,
                NUM_ROWS,
            ),
        ),
        element_counts=(1,),
    )
    return runner.add_program(program), pieces


PAIR = signature((2,))


def sums(batches):
    """The results of ``bagging`` for one batch after the other."""
    table = np.arange(NUM_ROWS * DIM, dtype=np.float32).reshape(NUM_ROWS, DIM)
    for ids in batches:
        yield table[ids].sum()
        table[np.unique(ids)] -= 1


BATCHES = [[0, 6], [6, 6], [2, 3], [3, 0], [0, 1], [6, 5]]


@pytest.mark.rest
def test_rows_for_the_next_elements_come_with_the_push(runner, bagging):
    digest, _ = bagging
    iterators = [Elements(*BATCHES)]
    for number, expected in enumerate(sums(BATCHES)):
        result = runner.run(call(number, digest, iterators=iterators, signature=PAIR))
        assert float(result.results[0]) == expected
        assert iterators[0].num_taken == min(number + 2, len(BATCHES))
    assert runner.statistics()["num_pulls"] == 1
    assert runner.run(call(9, digest, iterators=iterators, signature=PAIR)).need == signature(None)


@pytest.mark.rest
def test_stale_prefetched_rows_are_not_used(servers, runner, bagging):
    digest, pieces = bagging
    iterators = [Elements(*BATCHES)]
    runner.run(call(0, digest, iterators=iterators, signature=PAIR))
    ServerContents(servers).assign(
        [(pieces, np.full((NUM_ROWS, DIM), 50, np.float32)), ([Shard(1, "scale")], np.float32(2))]
    )
    again = runner.run(call(1, digest, iterators=iterators, signature=PAIR, epoch=1))
    assert float(again.results[0]) == 50 * 2 * DIM * 2


@pytest.mark.rest
def test_another_closure_between_two_of_a_table(servers, runner, bagging, counting):
    digest, _ = bagging
    iterators = [Elements(*BATCHES)]
    for number, expected in enumerate(sums(BATCHES)):
        result = runner.run(call(2 * number, digest, iterators=iterators, signature=PAIR))
        assert float(result.results[0]) == expected
        assert float(runner.run(call(2 * number + 1, counting, np.float32(1))).results[0]) == 10 + number


@pytest.mark.rest
def test_peeked_elements_go_to_the_next_closure(runner, bagging):
    digest, _ = bagging
    total = runner.add_program(
        worker_program(
            lambda x: x.sum(), [Input("element", 0)], [np.zeros(2, np.float32)], element_counts=(1,)
        )
    )
    iterators, others = [Elements(*BATCHES)], [Elements([5, 5], [4, 4])]
    runner.run(call(0, digest, iterators=iterators, signature=PAIR))
    assert float(runner.run(call(1, total, iterators=iterators, signature=PAIR)).results[0]) == 12
    assert float(runner.run(call(2, digest, iterators=others, signature=PAIR)).results[0]) == 2 * (
        15 + 16 + 17
    )
    assert float(runner.run(call(3, total, iterators=iterators, signature=PAIR)).results[0]) == 5
    assert float(runner.run(call(4, total, iterators=others, signature=PAIR)).results[0]) == 8


@pytest.mark.rest
def test_elements_other_than_the_peeked_ones(runner, bagging):
    digest, _ = bagging
    iterators, others = [Elements(*BATCHES)], [Elements([5, 1], [1, 5])]
    batches = [BATCHES[0], [5, 1], [1, 5], BATCHES[1]]
    for number, (taken_of, expected) in enumerate(
        zip([iterators, others, others, iterators], sums(batches), strict=True)
    ):
        result = runner.run(call(number, digest, iterators=taken_of, signature=PAIR))
        assert float(result.results[0]) == expected


@pytest.mark.rest
def test_iterator_used_twice_is_not_peeked():
    iterator = Elements(1, 2, 3)
    queue = ElementQueue()
    assert queue.peek([iterator, iterator], [1, 1]) is None
    assert [float(leaves[0]) for (leaves,) in queue.take([iterator, iterator], [1, 1])] == [1, 2]


@pytest.mark.rest
def test_no_wait_for_an_element_of_a_closure_that_may_not_come(runner, bagging):
    digest, _ = bagging
    iterators = [Elements(*BATCHES)]
    iterators[0].is_ready = False
    for number, expected in enumerate(sums(BATCHES[:3])):
        assert (
            float(runner.run(call(number, digest, iterators=iterators, signature=PAIR)).results[0])
            == expected
        )
        assert iterators[0].num_taken == number + 1
    assert runner.statistics()["num_pulls"] == 3


@pytest.mark.rest
def test_an_error_of_the_next_element_is_the_next_closures(runner, bagging):
    digest, _ = bagging
    iterators = [Elements(*BATCHES)]
    following = iterators[0].next

    def fail_once():
        if iterators[0].num_taken == 1 and not failed:
            failed.append(True)
            raise OSError("a broken file")
        return following()

    failed, iterators[0].next = [], fail_once
    expected = list(sums(BATCHES))
    first = runner.run(call(0, digest, iterators=iterators, signature=PAIR))
    assert failed
    assert float(first.results[0]) == expected[0]
    with pytest.raises(OSError, match="a broken file"):
        runner.run(call(1, digest, iterators=iterators, signature=PAIR))
    assert float(runner.run(call(2, digest, iterators=iterators, signature=PAIR)).results[0]) == expected[1]


@pytest.mark.rest
def test_the_next_element_may_have_another_shape(runner, bagging):
    digest, _ = bagging
    iterators = [Elements([0, 6], [1, 2, 3], [6, 6])]
    expected = list(sums(BATCHES))
    assert float(runner.run(call(0, digest, iterators=iterators, signature=PAIR)).results[0]) == expected[0]
    assert runner.run(call(1, digest, iterators=iterators, signature=PAIR)).need == signature((3,))
    assert float(runner.run(call(2, digest, iterators=iterators, signature=PAIR)).results[0]) == expected[1]


def test_pulled_values_are_released_before_a_server_updates_them(stores, monkeypatch):
    servers = server_clients(stores, ME)
    large = np.ones(1_500_000, np.float32)
    (piece,) = create(servers, [Shard(0, "large")], large)
    push = Push(0, add_to(servers, piece, large), (Operand(0),))
    program = worker_program(lambda x: x * 2, [Input("variable", 0)], [large], [[piece]], 0, pushes=(push,))
    given, alive, answer = [], [], stores[0].answer

    def noting(message):
        if message.header.get("program") == push.program:
            deadline = time.monotonic() + 60
            while any(ref() is not None for ref in given) and time.monotonic() < deadline:
                time.sleep(0.01)
                jax.device_put(0)  # JAX lets go at its next call of what its programs took
            alive.append(sum(ref() is not None for ref in given))
        answered = answer(message)
        given.extend(map(weakref.ref, answered.arrays))
        return answered

    monkeypatch.setattr(stores[0], "answer", noting)
    runner = Runner(servers)
    digest = runner.add_program(program)
    for number in range(3):
        runner.run(call(number, digest))
    assert len(given) == 4
    assert alive == [0, 0, 0]  # or it could not be written in place
