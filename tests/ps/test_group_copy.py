"""Two parameter servers with the same pieces, in this process: both apply the same messages, and either can continue."""

import contextlib
import threading
import time

import numpy as np
import pytest

from checks import message
from exported import update_program
from group_network import GROUP, ME, ONE, Network, Open, Way
from replicax._ps.store import group_copy, group_entries
from replicax._ps.store.group_rules import View
from replicax._src.vocabulary.errors import InvalidArgumentError, UnavailableError


@pytest.fixture
def network(request):
    network = Network(**getattr(request, "param", {}))
    yield network
    for server in network.servers:
        server.close()


@pytest.fixture
def add(network):
    """The digest of a program that adds to x, which starts at 0."""
    network.create(x=np.zeros(3, np.float32))
    return network.add_program(
        update_program(lambda x, by: (x + by,), ["x"], [0], np.zeros(3, np.float32), ONE)
    )


def test_backup_has_every_answered_update_and_continues(network, add):
    for number in range(5):
        network.step(0, add, number, [ONE])
    assert network.read(0) == 5.0
    message(UnavailableError, lambda: network.read(1), "does not serve this group")
    network.view(2, 1, None, to=[1])  # the first one is dead, and heard nothing
    assert network.read(1) == 5.0
    assert network.step(1, add, 4, [ONE]).header["duplicate"]  # its window came with it
    assert not network.step(1, add, 5, [ONE]).header["duplicate"]
    assert network.read(1) == 6.0


def test_replaced_primary_rejects_requests(network, add):
    network.step(0, add, 0, [ONE])
    network.view(2, 1, None, to=[1])
    network.step(1, add, 1, [ONE])
    message(UnavailableError, lambda: network.step(0, add, 2, [ONE]), "does not serve this group")
    message(UnavailableError, lambda: network.read(0), "does not serve this group")
    assert network.part(0)["role"] == "none"
    assert network.read(1) == 2.0


def test_replaced_primary_rejects_reads_before_any_write(network, add):
    network.view(2, 1, None, to=[1])
    network.step(1, add, 0, [ONE])
    message(UnavailableError, lambda: network.read(0), "does not serve this group")


def test_nothing_is_answered_without_the_backup_until_a_decision(network, add):
    network.is_cut = True
    answered = threading.Event()
    waiting = threading.Thread(target=lambda: (network.step(0, add, 0, [ONE]), answered.set()))
    waiting.start()
    until = time.monotonic() + 20.0
    while network.part(0)["backup"] != "lost":
        assert time.monotonic() < until, network.part(0)
        time.sleep(0.005)
    assert not answered.wait(0.2)
    assert "is cut" in network.part(0)["error"]
    network.view(2, 0, None)
    assert answered.wait(10.0)
    waiting.join()
    assert network.read(0) == 1.0


def test_errors_are_the_same_on_both_and_nothing_happens(network, add):
    message(InvalidArgumentError, lambda: network.step(0, add, 0, [ONE], pull=["y"]), 'no shard "y"')
    message(
        InvalidArgumentError, lambda: network.step(0, add, 0, [np.zeros(2, np.float32)]), "takes the operands"
    )
    network.step(0, add, 0, [ONE])
    assert network.part(0)["backup"] == "in sync"
    assert network.ask(0, "checksum").header["is_on_two"]
    network.view(2, 1, None, to=[1])
    assert network.read(1) == 1.0


def test_reads_send_no_arrays_and_are_not_repeated(network, add):
    rows = [np.array([0], np.int32)]
    network.step(0, add, 0, [ONE, *rows], rows=["x"])
    copy = network.servers[1]._copies[GROUP]
    assert copy.statistics()["updates"] == 1
    assert copy.statistics()["pulls"] == 0
    before = network.num_sent
    network.read(0)
    assert network.num_sent == before + 1  # it has asked whether it still is the primary


def test_joining_backup_gets_the_state_while_updates_continue(network, add):
    large = np.arange(50_000, dtype=np.float32)
    network.create(large=large)
    network.step(0, add, 0, [ONE])
    network.view(2, 0, None)
    over, numbers = threading.Event(), iter(range(1, 100_000))
    done = []

    def go_on():
        while not over.is_set():
            done.append(next(numbers))
            network.step(0, add, done[-1], [ONE])

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    network.view(3, 0, 1, is_joining=True)
    network.until_in_sync()
    time.sleep(0.05)
    over.set()
    for thread in threads:
        thread.join()
    assert network.ask(0, "checksum").header["is_on_two"]
    network.view(4, 1, None, to=[1])
    assert network.read(1) == len(done) + 1
    assert network.step(1, add, 0, [ONE]).header["duplicate"]
    assert network.step(1, add, done[-1], [ONE]).header["duplicate"]
    np.testing.assert_array_equal(network.step(1, pull=["large"]).arrays[0], large)


def test_nothing_is_kept_for_a_backup_dropped_during_its_copy(network, add, monkeypatch):
    network.view(2, 0, None)
    network.is_silent = True  # stopped: its system takes what is sent
    before = threading.enumerate()  # of tests before this one some may be ending
    network.view(3, 0, 1, is_joining=True)
    assert network.is_awaited.wait(20.0)
    begun = [thread for thread in threading.enumerate() if thread not in before]
    (bringing,) = [thread for thread in begun if thread.name == f"replicax-copy-{GROUP}"]
    network.step(0, add, 0, [ONE])
    network.view(4, 0, None)
    bringing.join(20.0)
    assert not bringing.is_alive()
    log = network.servers[0]._copies[GROUP]._state.rules.log
    monkeypatch.setattr(log, "max_bytes", 3 * group_entries.ENTRY_BYTES)
    for number in range(1, 6):
        network.step(0, add, number, [ONE])
    assert (log.after(0), log.num_bytes) == ([], 0)
    assert network.read(0) == 6.0


@contextlib.contextmanager
def bringing(network):
    """Inside, the last part of the state has not arrived."""
    network.view(2, 0, None)
    with network.servers[1]._copies[GROUP]._state.order:
        joining = threading.Thread(target=lambda: network.view(3, 0, 1, is_joining=True))
        joining.start()
        until = time.monotonic() + 20.0
        while network.servers[0]._copies[GROUP]._state.joining_way is None:
            assert time.monotonic() < until
            if network.part(1)["epoch"] == 3:  # a backup hears first that it is one
                network.servers[0].take(View(GROUP, 3, 0, 1, True), ["a:1", "b:1"])
            time.sleep(0.005)
        yield
    joining.join()


def test_requests_are_answered_during_a_slow_copy(network, add, monkeypatch):
    size = group_entries.ENTRY_BYTES + ONE.nbytes
    monkeypatch.setattr(network.servers[0]._copies[GROUP]._state.rules.log, "max_bytes", 3 * size)
    monkeypatch.setattr(group_copy, "_WAIT_S", 0.5)
    monkeypatch.setattr(group_copy, "_ROOM_S", 0.3)
    with bringing(network):
        network.step(0, add, 0, [ONE])
        for number in range(1, 3):
            started = time.monotonic()
            network.step(0, add, number, [ONE])
            assert time.monotonic() - started >= 0.3  # so that it does not become more without end
        monkeypatch.setattr(group_copy, "_ROOM_S", 60.0)
        monkeypatch.setattr(group_copy, "_WAIT_S", 60.0)
        assert network.read(0) == 3.0  # this does not wait
    network.until_in_sync()
    assert network.ask(0, "checksum").header["is_on_two"]


def test_updates_during_a_copy_are_bounded(network, add, monkeypatch):
    copy = network.servers[0]._copies[GROUP]
    monkeypatch.setattr(copy._state.rules.log, "max_bytes", 4 * group_entries.ENTRY_BYTES)
    monkeypatch.setattr(group_copy, "_ROOM_S", 0.0)
    with bringing(network):
        for number in range(6):
            network.step(0, add, number, [ONE])
        assert not copy._state.rules.log.is_on
        assert network.part(0)["backup"] == "failed"
        assert "more than log_bytes=" in network.part(0)["error"]
    network.view(4, 0, None)
    network.view(5, 0, 1, is_joining=True)
    network.until_in_sync()
    assert network.ask(0, "checksum").header["is_on_two"]


def test_repeated_messages_during_a_copy_are_not_kept_again(network, add):
    with bringing(network):
        for _ in range(4):
            network.step(0, add, 0, [ONE])
        log = network.servers[0]._copies[GROUP]._state.rules.log
        assert log.num_bytes == ONE.nbytes + 4 * group_entries.ENTRY_BYTES
    network.until_in_sync()
    assert network.ask(0, "checksum").header["is_on_two"]
    network.view(4, 1, None, to=[1])
    assert network.step(1, add, 0, [ONE]).header["duplicate"]
    assert network.read(1) == 1.0


def test_a_backup_that_cannot_be_reached_leaves_no_client_behind(network, monkeypatch):
    closed = threading.Event()
    monkeypatch.setattr(Way, "close", lambda way: closed.set())
    network.view(2, 0, None)
    network.is_cut = True
    network.view(3, 0, 1, is_joining=True)
    assert closed.wait(20.0)


def test_copied_values_stay_if_the_view_waits_for_an_update(network, add):
    network.step(0, add, 0, [ONE])
    network.view(2, 0, None)
    joining, is_brought = network.servers[1]._copies[GROUP], threading.Event()

    class Order:
        """The thread that takes the view gets it after the threads that send the state."""

        def __init__(self, inner):
            self.inner = inner

        def __enter__(self):
            if threading.current_thread() is taking:
                assert is_brought.wait(20.0)
            self.inner.acquire()

        def __exit__(self, *_):
            self.inner.release()

    joining._state.order = Order(joining._state.order)
    taking = threading.Thread(target=lambda: network.view(3, 0, 1, is_joining=True, to=[1]))
    taking.start()
    until = time.monotonic() + 20.0
    while network.part(1)["epoch"] != 3:
        assert time.monotonic() < until
        time.sleep(0.005)
    # The coordinator continues: the other server has not reported in time that it has taken the view.
    network.view(3, 0, 1, is_joining=True, to=[0])
    network.until_in_sync()
    is_brought.set()
    taking.join()
    network.view(4, 1, None, to=[1])
    assert network.read(1) == 1.0


def test_waiting_gradients_are_copied_too(network, add):
    program = update_program(
        lambda x, g: (x + g,), ["x"], [0], np.zeros(3, np.float32), np.zeros(3, np.float32)
    )
    program = type(program)(program.blob, program.state, program.written, ("mean",))
    digest = network.add_program(program)
    network.view(2, 0, None)
    hold = {"gradients": {"round": 0, "program": digest, "operands": 1}}
    network.step(0, None, 0, [np.full(3, 2.0, np.float32)], **hold)
    network.view(3, 0, 1, is_joining=True)
    network.until_in_sync()
    network.step(0, None, 1, [np.full(3, 4.0, np.float32)], **hold)
    network.view(4, 1, None, to=[1])
    network.ask(1, "apply", round=[ME, 0], low=0, closures=[0, 1])
    assert network.read(1) == 3.0


def test_differing_copies_are_detected(network, add, caplog):
    network.servers[1]._copies[GROUP]._state.store.put("x", 1, np.ones(3, np.float32))
    answers = []
    asking = threading.Thread(target=lambda: answers.append(network.ask(0, "checksum")))
    asking.start()
    until = time.monotonic() + 10.0
    while network.part(0)["backup"] != "lost":
        assert time.monotonic() < until
        time.sleep(0.005)
    network.view(2, 0, None)
    asking.join()
    assert not answers[0].header["is_on_two"]
    assert network.part(0)["differs"]
    network.view(3, 0, 1, is_joining=True)
    network.until_in_sync()
    assert not network.part(0)["differs"]
    assert network.ask(0, "checksum").header["is_on_two"]
    assert "of group 0 differ" in caplog.text


def test_incomplete_copy_is_not_made_the_primary(network, add):
    network.view(2, 0, None)
    network.is_cut = True
    network.view(3, 0, 1, is_joining=True)
    view = View(GROUP, 4, 1, None)
    message(InvalidArgumentError, lambda: network.servers[1].take(view, []), "lacks updates of group 0")


def test_status_does_not_wait_for_an_update(network, add):
    server = network.servers[0]
    before = server.statistics()
    with server._copies[GROUP]._state.store._lock:  # an update lasts
        started = time.monotonic()
        assert server.statistics() == before
        assert time.monotonic() - started < 5.0


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ({"pull": ["y"]}, 'no shard "y"'),
        ({"rows": ["y"], "operands": [np.array([0], np.int32)]}, 'no shard "y"'),
        ({"rows": ["scalar"], "operands": [np.array([0], np.int32)]}, "its rows cannot be read"),
    ],
)
@pytest.mark.parametrize("is_update", [True, False])
def test_unreadable_message_is_rejected_by_both(network, add, what, expected, is_update):
    network.create(scalar=np.zeros((), np.float32))
    program, number = (add, 0) if is_update else (None, None)
    operands = [*([ONE] if is_update else []), *what.get("operands", ())]
    asked = {"pull": (), **what, "operands": operands}
    message(InvalidArgumentError, lambda: network.step(0, program, number, **asked), expected)
    assert network.read(0) == 0.0
    assert network.part(0)["backup"] == "in sync", network.part(0)
    assert network.ask(0, "checksum").header["is_on_two"]


def test_backup_is_not_lost_because_of_a_long_wait(network, add, monkeypatch):
    monkeypatch.setattr(group_copy, "_WAIT_S", 0.5)
    receive = Open.receive

    def slow(link, timeout_s):
        time.sleep(min(timeout_s, 1.0))
        if timeout_s < 1.0:
            raise UnavailableError("It has not answered in time.")
        return receive(link, timeout_s)

    monkeypatch.setattr(Open, "receive", slow)
    network.step(0, add, 0, [ONE])
    assert network.part(0)["backup"] == "in sync"


def parts_of(network, monkeypatch):
    """The parts of state that the primary sends from now on."""
    parts, send = [], Open.send

    def noted(link, message, timeout_s=60.0):
        if message.header.get("op") == "copy":
            parts.append(message.header["part"])
        send(link, message, timeout_s)

    monkeypatch.setattr(Open, "send", noted)
    return parts


def test_backup_that_comes_back_gets_only_the_updates_that_it_lacks(network, add, monkeypatch):
    parts = parts_of(network, monkeypatch)
    network.step(0, add, 0, [ONE])
    network.view(2, 0, None)
    for number in range(1, 10):
        network.step(0, add, number, [ONE])
    network.view(3, 0, 1, is_joining=True)
    network.until_in_sync()
    assert parts == ["where", "resume"]
    assert network.ask(0, "checksum").header["is_on_two"]
    network.view(4, 1, None, to=[1])
    assert network.read(1) == 10.0
    assert network.step(1, add, 9, [ONE]).header["duplicate"]


@pytest.mark.parametrize("network", [{"log_bytes": 1}], indirect=True)
def test_backup_that_lacks_more_than_log_bytes_gets_the_state(network, add, monkeypatch):
    parts = parts_of(network, monkeypatch)
    network.view(2, 0, None)
    for number in range(2):
        network.step(0, add, number, [ONE])
    network.view(3, 0, 1, is_joining=True)
    network.until_in_sync()
    assert parts[:2] == ["where", "state"]
    assert network.ask(0, "checksum").header["is_on_two"]


@pytest.mark.parametrize("has_more", [False, True])
def test_primary_that_comes_back_gets_what_it_lacks(network, add, monkeypatch, has_more):
    """Only updates are sent, unless the server has applied one that was never acknowledged: no other server has that
    one."""
    parts = parts_of(network, monkeypatch)
    network.step(0, add, 0, [ONE])
    network.view(2, 1, None, to=[1])
    if has_more:
        message(UnavailableError, lambda: network.step(0, add, 100, [ONE]), "does not serve")
    network.step(1, add, 1, [ONE])
    network.view(3, 1, 0, is_joining=True, to=(0, 1))
    network.until_in_sync(1)
    assert parts[:2] == ["where", "state" if has_more else "resume"]
    assert network.ask(1, "checksum").header["is_on_two"]
    network.view(4, 0, None, to=[0])
    assert network.read(0) == 2.0
    assert not network.step(0, add, 100, [ONE]).header["duplicate"]
