"""Closures whose parameter servers are behind the transport, in this process."""

import jax
import numpy as np
import pytest

from exported import update_program, worker_program
from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.server_contents import NewShard, ServerContents
from replicax._ps.programs.programs import Input, Operand, Push, Shard, signature_of
from replicax._ps.store.store import Store
from replicax._ps.transport.transport import TaskClient, TaskServer
from replicax._ps.worker.runner import ClosureCall, Runner
from replicax._src.cluster.credentials import Credentials
from replicax._src.vocabulary.errors import UnavailableError

ME = "me"
SECRET = Credentials(token="a secret of this test")
SHARDS = [Shard(0, "w/0", (0, 60_000)), Shard(1, "w/1", (60_000, 100_000))]
FROZEN = Shard(1, "frozen")
WHOLE = np.arange(100_000, dtype=np.float32)


class OneStore:
    """Answers with a store."""

    def __init__(self):
        self.store = Store()
        self.store.hello(ME)

    def answer(self, message):
        return self.store.answer(message)


@pytest.fixture
def servers():
    made = [TaskServer("localhost:0", OneStore().answer, SECRET) for _ in range(2)]
    for server in made:
        server.start()
    yield made
    for server in made:
        server.shutdown()


@pytest.fixture
def new_clients(servers):
    opened = []

    def open_clients():
        clients = [TaskClient(server.address, SECRET, f"ps {index}") for index, server in enumerate(servers)]
        opened.append(ServerClients(clients, ME, timeout_s=60))
        return opened[-1]

    yield open_clients
    for servers in opened:
        servers.close()


@pytest.fixture
def halving(new_clients):
    """A runner, and a program that halves a variable in two shards, and returns its sum times a frozen one."""
    servers = new_clients()
    contents = ServerContents(servers)
    contents.create(
        [NewShard(p, (p.rows[1] - p.rows[0],), np.float32, WHOLE[slice(*p.rows)]) for p in SHARDS]
    )
    contents.create([NewShard(FROZEN, (3,), np.float32, np.ones(3, np.float32))])
    pushes = []
    for piece in SHARDS:
        part = WHOLE[slice(*piece.rows)]
        update = update_program(lambda w, g: (w - g,), [piece.key], [0], part, part)
        pushes.append(Push(piece.ps, contents.send_program(piece.ps, update), (Operand(1, piece.rows),)))
    program = worker_program(
        lambda w, frozen: (w.sum() * frozen[0], w / 2),
        [Input("variable", 0), Input("variable", 1)],
        [WHOLE, np.ones(3, np.float32)],
        [SHARDS, [FROZEN]],
        pushes=tuple(pushes),
    )
    runner = Runner(servers)
    return runner, runner.add_program(program)


def run(halving, number):
    runner, digest = halving
    call = ClosureCall((ME, number), 0, 0, {signature_of([]): digest})
    return float(runner.run(call).results[0])


@pytest.mark.timeout(120)
def test_closures_and_reads_by_another_client(halving, new_clients):
    total = float(jax.numpy.sum(WHOLE))
    reader = new_clients()
    for number in range(6):
        assert run(halving, number) == pytest.approx(total / 2**number, rel=1e-5)
        np.testing.assert_array_equal(reader.read([SHARDS])[0], WHOLE / 2 ** (number + 1))


@pytest.mark.rest
@pytest.mark.timeout(120)
def test_ended_server_is_named_and_a_returning_one_is_used(halving, new_clients, servers):
    run(halving, 0)
    service, address = servers[1]._make_answer, servers[1].address
    servers[1].shutdown()
    with pytest.raises(UnavailableError) as error:
        run(halving, 1)
    assert error.value.task == "ps 1"
    servers[1] = TaskServer(address, service, SECRET)
    servers[1].start()
    run(halving, 1)  # the first server has its part of it, and does not take it again
    np.testing.assert_array_equal(new_clients().read([SHARDS])[0], WHOLE / 4)


@pytest.mark.timeout(120)
def test_a_connection_that_was_cut_is_opened_again(halving, new_clients, servers):
    run(halving, 0)
    service, address = servers[0]._make_answer, servers[0].address
    servers[0].shutdown()
    servers[0] = TaskServer(address, service, SECRET)
    servers[0].start()
    for number in range(1, 4):
        run(halving, number)
    np.testing.assert_array_equal(new_clients().read([SHARDS])[0], WHOLE / 16)


def test_read_values_do_not_change(new_clients):
    servers = new_clients()
    contents = ServerContents(servers)
    piece = Shard(0, "large")
    first, second = np.zeros(100_000, np.float32), np.ones(100_000, np.float32)
    contents.create([NewShard(piece, first.shape, first.dtype, first)])
    (found,) = servers.read([[piece]])
    taken_over = jax.device_put(found)
    for _ in range(4):  # more than there are buffers
        contents.assign([([piece], second)])
        (again,) = servers.read([[piece]])
        np.testing.assert_array_equal(again, second)
        del again
    np.testing.assert_array_equal(found, first)
    del found
    servers.read([[piece]])
    np.testing.assert_array_equal(taken_over, first)


def test_read_values_do_not_change_and_jax_adopts_their_memory(new_clients):
    servers, one, other = new_clients(), Shard(0, "one"), Shard(0, "other")
    contents = ServerContents(servers)
    contents.create(
        [NewShard(p, (40_000,), np.float32, np.full(40_000, p.key == "one", "f4")) for p in (one, other)]
    )
    contents.create(
        [NewShard(p, (p.rows[1] - p.rows[0],), np.float32, WHOLE[slice(*p.rows)]) for p in SHARDS]
    )
    (alone,) = servers.read([[one]])
    together = servers.read([[one], SHARDS])
    for _ in range(5):
        assert servers.read([[other]])[0].max() == 0
        assert servers.read([[other], [other]])[1].max() == 0
    for value, expected in zip([alone, *together], [np.ones(40_000), np.ones(40_000), WHOLE], strict=True):
        np.testing.assert_array_equal(value, expected)
        assert jax.device_put(value).unsafe_buffer_pointer() == value.ctypes.data
