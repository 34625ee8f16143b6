"""A client of several parameter servers, with stores of this process behind it."""

import threading
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from checks import message
from exported import update_program
from replicax._ps.client import request_rules
from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.server_contents import NewShard, ServerContents
from replicax._ps.client.server_requests import Ask
from replicax._ps.programs.programs import Shard
from replicax._ps.store.group_rules import View
from replicax._ps.store.store import Store
from replicax._src.vocabulary.errors import (
    InvalidArgumentError,
    MessageError,
    UnavailableError,
    UnknownProgramError,
)
from store_connections import StoreConnection, server_clients

ME = "me"
TABLE = np.arange(10, dtype=np.float32).reshape(5, 2)
SHARDS = [Shard(0, "t/0", (0, 3)), Shard(1, "t/1", (3, 5))]
WHOLE = [Shard(1, "w")]


class BreakableConnection:
    """A connection that the test can break."""

    def __init__(self, client):
        self.client = client
        self.link = StoreConnection(client.store, client.task)

    def send(self, message):
        self.client.sent.append(message.header["op"])
        self.client.breaks_here("send")
        self.link.send(message)

    def receive(self, timeout_s):
        self.client.breaks_here("receive")
        return self.link.receive(timeout_s)

    def close(self):
        self.client.num_closed += 1


class Client:
    """Opens connections to a store. ``breaks``: the operations at which a connection breaks, in order."""

    def __init__(self, store, task):
        self.store, self.task = store, task
        self.breaks, self.sent = [], []
        self.num_opened = self.num_closed = 0

    def open(self):
        self.breaks_here("open")
        self.num_opened += 1
        return BreakableConnection(self)

    def close(self):
        pass

    def breaks_here(self, where):
        if self.breaks and self.breaks[0] == where:
            del self.breaks[0]
            raise UnavailableError(f"broke at {where}", self.task)


@pytest.fixture
def stores():
    made = [Store(), Store()]
    for store in made:
        store.hello(ME)
    return made


@pytest.fixture
def clients(stores):
    return [Client(store, f"ps {index}") for index, store in enumerate(stores)]


@pytest.fixture
def servers(clients):
    with ServerClients(clients, ME) as made:
        contents = ServerContents(made)
        contents.create(
            [NewShard(p, (p.rows[1] - p.rows[0], 2), np.float32, TABLE[slice(*p.rows)]) for p in SHARDS]
        )
        contents.create([NewShard(WHOLE[0], (), np.float32, np.float32(7))])
        yield made


@pytest.fixture
def contents(servers):
    return ServerContents(servers)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(request_rules, "_PAUSES_S", (0.0, 0.01, 0.01))


def add_one(servers, key="w", ps=1):
    return ServerContents(servers).send_program(
        ps, update_program(lambda w: (w + 1,), [key], [0], np.float32(0))
    )


def test_full_values_are_read_from_their_shards(servers):
    table, whole = servers.read([SHARDS, WHOLE])
    np.testing.assert_array_equal(table, TABLE)
    assert whole.shape == ()
    assert whole == 7
    table[:] = 0  # a copy
    np.testing.assert_array_equal(servers.read([SHARDS])[0], TABLE)


def test_assigned_values_are_split_into_shards(servers, contents):
    contents.assign([(SHARDS, TABLE * 2), (WHOLE, np.float32(3))])
    table, whole = servers.read([SHARDS, WHOLE])
    np.testing.assert_array_equal(table, TABLE * 2)
    assert whole == 3


def test_ctrl_c_while_answers_are_awaited_does_not_mix_them_up(servers, monkeypatch, contents):
    receive, interrupts = BreakableConnection.receive, [KeyboardInterrupt()]

    def interrupted(self, timeout_s):
        if interrupts:
            raise interrupts.pop()
        return receive(self, timeout_s)

    monkeypatch.setattr(BreakableConnection, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        contents.find(["t/0", "t/1"])  # both have been asked
    np.testing.assert_array_equal(servers.read([SHARDS])[0], TABLE)


def test_rows_are_read_from_their_servers(servers):
    np.testing.assert_array_equal(servers.read_rows(SHARDS, np.array([4, 0, 4]), 5), TABLE[[4, 0, 4]])
    assert servers.read_rows(SHARDS, np.array([], np.int32), 5).shape == (0, 2)
    with pytest.raises(InvalidArgumentError, match="from -1 to 2, but the table has rows 0 to 4"):
        servers.read_rows(SHARDS, np.array([-1, 2]), 5)


def test_pieces_are_created_by_a_program_on_the_server(servers, contents):
    ones = update_program(lambda: (jnp.ones((4, 2)),), [], [])
    pieces = [Shard(0, "made/0", (0, 4)), Shard(1, "made/1", (4, 8))]
    contents.create([NewShard(piece, (4, 2), np.float32, ones) for piece in pieces])
    np.testing.assert_array_equal(servers.read([pieces])[0], np.ones((8, 2)))


def test_existing_pieces_stay_only_if_allowed(servers, contents):
    again = NewShard(WHOLE[0], (), np.float32, np.float32(1))
    with pytest.raises(InvalidArgumentError, match="exists already"):
        contents.create([again])
    contents.create([again], if_absent=True)
    assert servers.read([WHOLE])[0] == 7


def test_dropped_pieces_are_gone(servers, contents):
    contents.drop(SHARDS)
    contents.drop(SHARDS)
    with pytest.raises(InvalidArgumentError, match='no shard "t/0"'):
        servers.read([SHARDS])
    assert servers.read([WHOLE])[0] == 7


def test_a_step_applies_and_reads_as_one_on_every_server(servers, clients):
    program = add_one(servers)
    asks = {
        0: Ask(rows=[("t/0", np.array([2, 0], np.int32))]),
        1: Ask(program, pull=[("w", None), ("t/1", None)]),
    }
    answers = servers.step((ME, 0), 0, asks)
    np.testing.assert_array_equal(answers[0].rows[0], TABLE[[2, 0]])
    version, value = answers[1].values["w"]
    assert value == 8
    assert not answers[1].is_duplicate
    assert clients[1].sent[-2:] == ["program", "step"]  # sent before it is needed
    unchanged = servers.step((ME, 1), 0, {1: Ask(pull=[("w", version), ("t/1", None)])})[1]
    assert unchanged.values["w"] == (version, None)
    np.testing.assert_array_equal(unchanged.values["t/1"][1], TABLE[3:])


def test_a_closure_is_applied_once(servers):
    program = add_one(servers)
    first = servers.step((ME, 5), 0, {1: Ask(program)})[1]
    second = servers.step((ME, 5), 0, {1: Ask(program, pull=[("w", None)])})[1]
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert second.values["w"][1] == 8


def test_all_requests_are_sent_before_any_answer_is_awaited(stores):
    asked, others = threading.Event(), []

    class First(Client):
        def open(self):
            link = StoreConnection(self.store, self.task)
            receive = link.receive
            link.receive = lambda timeout_s: (others.append(asked.is_set()), receive(timeout_s))[1]
            return link

    class Second(Client):
        def open(self):
            link = StoreConnection(self.store, self.task)
            send = link.send
            link.send = lambda message: (asked.set(), send(message))[1]
            return link

    servers = ServerClients([First(stores[0], "ps 0"), Second(stores[1], "ps 1")], ME)
    servers.step(None, 0, {0: Ask(), 1: Ask()})
    assert others == [True]


@pytest.mark.parametrize("where", ["send", "receive"])
def test_broken_connection_is_reopened_and_nothing_happens_twice(servers, clients, where):
    program = add_one(servers)
    servers.step((ME, 0), 0, {1: Ask(program)})
    clients[1].breaks = [where]
    answer = servers.step((ME, 1), 0, {1: Ask(program, pull=[("w", None)])})[1]
    assert answer.values["w"][1] == 9
    assert answer.is_duplicate == (where == "receive")
    assert clients[1].num_opened == 2
    assert clients[1].num_closed == 1


def test_returning_server_is_waited_for(servers, clients, monkeypatch):
    monkeypatch.setattr(request_rules, "_PAUSES_S", (0.0, 0.01))
    servers[1].returns = True
    clients[1].breaks = ["receive"] + ["open"] * 10
    np.testing.assert_array_equal(servers.read([WHOLE])[0], servers.read([WHOLE])[0])
    assert not clients[1].breaks
    program = add_one(servers)
    servers.step((ME, 0), 0, {1: Ask(program)})
    clients[1].breaks = ["receive"] + ["open"] * 10
    with pytest.raises(UnavailableError, match="broke at receive"):  # it may have happened, and would again
        servers.step(None, 0, {1: Ask(program)})


def test_restarted_server_gets_all_programs(servers, clients, stores, contents):
    program = add_one(servers)
    servers.step((ME, 0), 0, {1: Ask(program)})
    assert (contents.has_program(program), contents.has_program("another")) == (True, False)
    clients[1].store = Store()
    clients[1].store.hello(ME)
    contents.send_all_programs(1)
    assert clients[1].num_opened == 2
    assert clients[1].store.statistics()["programs"] == stores[1].statistics()["programs"] == 1


def test_lost_server_is_named_after_a_few_tries(servers, clients):
    clients[1].breaks = ["receive"] + ["open"] * 10
    with pytest.raises(UnavailableError, match="broke at open") as error:
        servers.read([SHARDS])
    assert error.value.task == "ps 1"
    assert len(clients[1].breaks) == 7
    clients[1].breaks = []
    np.testing.assert_array_equal(
        servers.read([SHARDS])[0], TABLE
    )  # neither connection has an answer left in it


def test_non_idempotent_requests_are_not_retried(servers, clients):
    program = add_one(servers)
    servers.step((ME, 0), 0, {1: Ask(program)})
    clients[1].breaks = ["receive"]
    with pytest.raises(UnavailableError, match="broke at receive"):
        servers.step(None, 0, {1: Ask(program)})
    assert servers.read([WHOLE])[0] == 9


def views(*primaries, epoch=1):
    return [View(group, epoch, primary, None) for group, primary in enumerate(primaries)]


def test_repeated_assignment_does_not_undo_later_updates(servers, clients, contents):
    program = add_one(servers)
    step = lambda number: servers.step((ME, number), 0, {1: Ask(program)})  # noqa: E731
    step(0)

    class Between(list):
        """The answer is lost, and before the client repeats the request another client has its turn."""

        def __delitem__(self, at):
            super().__delitem__(at)
            with ServerClients([Client(client.store, client.task) for client in clients], ME) as others:
                others.step((ME, 1), 0, {1: Ask(program)})

    clients[1].breaks = Between(["receive"])
    contents.assign([(WHOLE, np.float32(3))])
    assert servers.read([WHOLE])[0] == 4
    contents.assign([(WHOLE, np.float32(1))])
    assert servers.read([WHOLE])[0] == 1


@pytest.mark.parametrize("where", ["send", "receive"])
def test_pieces_are_created_once_if_the_connection_breaks(servers, clients, stores, where, contents):
    clients[1].breaks = [where]
    value = np.arange(2, dtype=np.float32)
    contents.create([NewShard(Shard(1, "new"), (2,), np.float32, value)])
    np.testing.assert_array_equal(servers.read([[Shard(1, "new")]])[0], value)
    assert not clients[1].breaks
    with pytest.raises(InvalidArgumentError):  # another call with the same key is still an error
        contents.create([NewShard(Shard(1, "new"), (2,), np.float32, value)])


def test_request_without_retry_goes_to_the_new_primary(servers, clients, stores, contents):
    servers.use_primaries(views(0, 1))
    servers.read([WHOLE, SHARDS])
    servers.use_primaries(views(1, 1, epoch=3))  # nobody waits for an answer
    servers.use_primaries(views(0, 1, epoch=2))  # was sent before
    contents.create([NewShard(Shard(0, "new"), (2,), np.float32, np.zeros(2, np.float32))])
    assert [store.statistics()["shards"] for store in stores] == [1, 3]


def test_new_primary_named_while_connecting_gets_the_request(servers, contents, clients, stores):
    servers.use_primaries(views(0, 1))
    servers[0].disconnect()
    opens = clients[0].open

    def open_late():
        connection = opens()
        servers.use_primaries(views(1, 1, epoch=2))
        return connection

    clients[0].open = open_late
    contents.create([NewShard(Shard(0, "new"), (2,), np.float32, np.zeros(2, np.float32))])
    assert [store.statistics()["shards"] for store in stores] == [1, 3]


def test_arrays_of_a_request_are_released_after_its_answer(servers):
    numbers = np.array([2, 0], np.int32)
    is_kept = weakref.ref(numbers)
    servers.step(None, 0, {0: Ask(rows=[("t/0", numbers)])})
    del numbers
    assert is_kept() is None


def test_server_that_gave_up_the_coordinator_is_skipped_while_the_other_serves(servers, stores):
    stores[1].hello("another")
    servers.use_primaries(views(1, 1))
    np.testing.assert_array_equal(servers.read([SHARDS[:1]])[0], TABLE[:3])
    stores[0].hello("another")
    servers.timeout_s = 0.5  # a task would say that the coordinator's time is over; a store is asked again
    message(UnavailableError, lambda: servers.read([SHARDS[:1]]), "another")


def test_error_of_one_server_leaves_no_answer_in_another_connection(servers, clients):
    with pytest.raises(InvalidArgumentError, match='no shard "nothing"'):
        servers.step(None, 0, {0: Ask(pull=[("nothing", None)]), 1: Ask(pull=[("w", None)])})
    clients[0].open = lambda: pytest.fail("the connection stays")
    table, whole = servers.read([SHARDS, WHOLE])
    np.testing.assert_array_equal(table, TABLE)
    assert whole == 7


def test_unsendable_request_leaves_no_answer_in_another_connection(servers, monkeypatch):
    send = StoreConnection.send

    def refuse(link, message):
        if link._task == "ps 1":
            raise MessageError("too large")
        send(link, message)

    with monkeypatch.context() as patched:
        patched.setattr(StoreConnection, "send", refuse)
        with pytest.raises(MessageError, match="too large"):
            servers.step(None, 0, {0: Ask(), 1: Ask()})
    np.testing.assert_array_equal(servers.read([SHARDS])[0], TABLE)


def test_programs_are_sent_again_to_a_restarted_server(servers, clients, contents):
    program = add_one(servers)
    servers.step((ME, 0), 0, {1: Ask(program)})
    anew = clients[1].store = Store()
    anew.hello(ME)
    clients[1].breaks = ["send"]
    contents.create([NewShard(WHOLE[0], (), np.float32, np.float32(1))], if_absent=True)
    assert servers.step((ME, 1), 0, {1: Ask(program, pull=[("w", None)])})[1].values["w"][1] == 2


def test_unknown_program_is_an_error(servers):
    with pytest.raises(UnknownProgramError) as error:
        servers.step((ME, 0), 0, {1: Ask("0123")})
    assert error.value.digest == "0123"


def test_replaced_coordinator_gets_a_stale_coordinator_error(servers, stores):
    stores[1].hello("the next")
    with pytest.raises(UnavailableError, match="the next"):
        servers.read([WHOLE])


def test_clients_that_were_closed_stay_closed(stores):
    servers = server_clients(stores[:1], ME)
    servers.step(None, 0, {0: Ask()})
    servers.close()
    with pytest.raises(UnavailableError, match="closed"):
        servers.step(None, 0, {0: Ask()})


def test_clients_closed_between_request_and_answer_raise(servers, monkeypatch):
    send = BreakableConnection.send

    def send_and_close(connection, message):
        send(connection, message)
        servers.close()  # as another thread does
        connection.client.breaks = ["receive"]

    monkeypatch.setattr(BreakableConnection, "send", send_and_close)
    with pytest.raises(UnavailableError):
        servers.read([WHOLE])


def test_clients_count_messages_and_connections(servers, clients):
    before = servers.statistics()["ps 1"]
    clients[1].breaks = ["receive"]
    servers.read([WHOLE])
    after = servers.statistics()["ps 1"]
    assert after["num_opened"] == before["num_opened"] + 1
    assert after["num_messages"] == before["num_messages"] + 2
