"""A worker's answers to its coordinator, message by message."""

from typing import ClassVar

import numpy as np
import pytest

from exported import update_program, worker_program
from replicax._ps.client.server_contents import NewShard, ServerContents
from replicax._ps.client.server_requests import Ask
from replicax._ps.programs.programs import Input, Operand, Push, Shard, signature_of
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message
from replicax._ps.worker import worker as worker_module
from replicax._ps.worker.resources import WorkerPlace, dump
from replicax._ps.worker.worker import Worker
from replicax._src.vocabulary.errors import ClosureAbortedError, MessageError, UnknownProgramError
from store_connections import server_clients

ME = "me"
COUNTER = Shard(0, "n")


@pytest.fixture
def store():
    made = Store()
    made.hello(ME)
    return made


@pytest.fixture
def servers(store):
    """The coordinator's client: it has made a counter, and sent the program that adds to it."""
    made = server_clients([store], ME)
    ServerContents(made).create([NewShard(COUNTER, (), np.float32, np.zeros((), np.float32))])
    return made


@pytest.fixture
def worker(store):
    made = Worker(server_clients([store], ME), WorkerPlace(1, 2))
    yield made
    made.close()


def ask(worker, op, arrays=(), **header):
    return worker.answer(Message({"op": op, **header}, list(arrays)))


def counting(servers):
    """A program that adds to the counter an element of a dataset, times a constant and an argument."""
    update = update_program(lambda n, x: (n + x,), ["n"], [0], np.float32(0), np.float32(0))
    servers.step(None, 0, {0: ask_of(servers, update)})
    inputs = [Input("element", 0), Input("constant", name="c"), Input("argument", 0)]
    return worker_program(
        lambda x, c, y: x.sum() * c * y,
        inputs,
        [np.zeros(2, np.float32), np.float32(0), np.float32(0)],
        pushes=(Push(0, update.digest, (Operand(0),)),),
        element_counts=(1,),
    )


def ask_of(servers, update):
    return Ask(ServerContents(servers).send_program(0, update), [np.float32(0)])


def signature(*shape):
    return signature_of([[(shape, np.dtype(np.float32))]])


def send_program(worker, program):
    blobs = [np.frombuffer(blob, np.uint8) for blob in program.blobs]
    ask(worker, "program", blobs, digest=program.digest, described=program.described())


def run(worker, number, program, argument=1.0, iterators=("d",), shape=(2,)):
    return ask(
        worker,
        "closure",
        [np.float32(argument)],
        closure=[ME, number],
        low=0,
        epoch=0,
        program={signature(*shape): program.digest},
        iterators=list(iterators),
    )


def test_a_closure_of_a_dataset_and_a_constant(worker, servers):
    program = counting(servers)
    spec = ask(
        worker, "resource", [dump(lambda: [np.ones(2), np.ones(2) * 2, np.ones(3)])], name="d", kind="dataset"
    )
    assert spec.header["spec"]["leaves"] == [[[2], "float32"]]
    with pytest.raises(UnknownProgramError) as error:
        run(worker, 0, program)
    assert error.value.digest == program.digest
    send_program(worker, program)
    with pytest.raises(UnknownProgramError):
        run(worker, 0, program)
    ask(worker, "constant", [np.float32(10)], name="c")
    assert [float(run(worker, number, program, 3).arrays[0]) for number in range(2)] == [60, 120]
    needed = run(worker, 2, program)
    assert needed.header == {"need": signature(3), "end": None}
    assert not needed.arrays
    needed = run(worker, 3, program)
    assert needed.header["need"] == signature_of([None])
    assert "it had 3" in needed.header["end"]
    assert servers.read([[COUNTER]])[0] == 180
    assert worker.statistics()["num_closures"] == 2


def test_missing_resource_aborts_the_closure(worker, servers):
    program = counting(servers)
    send_program(worker, program)
    with pytest.raises(ClosureAbortedError, match="resource d"):
        run(worker, 0, program)
    ask(worker, "resource", [dump([np.ones(2)])], name="d", kind="dataset")
    ask(worker, "release", names=["d", "never there"])
    with pytest.raises(ClosureAbortedError, match="resource d"):
        run(worker, 0, program)
    assert worker.statistics()["num_resources"] == 0


def test_recreated_resource_restarts(worker, servers):
    program = counting(servers)
    send_program(worker, program)
    ask(worker, "constant", [np.float32(1)], name="c")
    for number in range(2):
        ask(worker, "resource", [dump([np.ones(2), np.zeros(2)])], name="d", kind="dataset")
        assert float(run(worker, number, program).arrays[0]) == 2


def test_resources_are_closed_when_they_are_replaced_and_released(worker, monkeypatch):
    closed = []

    class Resource:
        spec: ClassVar = {}

        def __init__(self, kind, pickled, place):
            self.pickled = pickled

        def close(self):
            closed.append(int(self.pickled[0]))

    monkeypatch.setattr(worker_module, "make", Resource)
    for number in range(3):
        ask(worker, "resource", [np.array([number])], name="d" if number < 2 else "e", kind="dataset")
    assert closed == [0]
    ask(worker, "release", names=["d"])
    assert closed == [0, 1]
    worker.close()
    assert closed == [0, 1, 2]


def test_worker_answers_these_operations(worker):
    with pytest.raises(MessageError, match=r"'step'.*program, constant, resource"):
        ask(worker, "step")
