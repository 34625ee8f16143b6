"""Servers and clients in one process: answers, errors, limits, credentials, TLS, and how they end."""

import gc
import logging
import os
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from certificates import credentials_of_ca
from checks import message, needs_ipv6
from echo_task import echo_server
from replicax._ps.transport import transport
from replicax._ps.transport.messages import Encoded, Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.cluster.credentials import Credentials
from replicax._src.wire.buffers import _Lease
from replicax.errors import (
    InvalidArgumentError,
    MessageError,
    RemoteError,
    UnauthenticatedError,
    UnavailableError,
    UnknownProgramError,
)

pytestmark = pytest.mark.timeout(180)
TOKEN = Credentials(token="secret")


@pytest.fixture
def server():
    with echo_server(max_streams=8) as server:
        yield server
        server.echo.may_go_on.set()


@pytest.fixture
def client(server):
    with TaskClient(server.address, TOKEN, "ps 0") as client:
        yield client


@pytest.fixture
def link(client):
    return client.open()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come true within 60 s"
        time.sleep(0.005)


# --- answers ------------------------------------------------------------------------------------------


def test_asks_are_answered(client):
    assert client.ask("hello", {"a": [1, None, "x"]}, 30) == {
        "ask": "hello",
        "a": [1, None, "x"],
        "answered": 1,
    }


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [np.float32(3)],
        [np.arange(5, dtype=np.int32), np.ones((2, 3), ml_dtypes.bfloat16), np.zeros((0, 3))],
        [np.arange(5_000_001, dtype=np.int32), np.array(True), np.arange(70_000.0)],
    ],
    ids=["none", "a scalar", "small", "large"],
)
def test_messages_are_answered(link, arrays):
    for turn in range(3):
        answer = link.call(Message({"op": "echo", "turn": turn}, arrays), 30)
        assert answer.header == {"op": "echo", "turn": turn, "answered": turn + 1}
        for ours, theirs in zip(answer.arrays, arrays, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(ours, theirs)
            assert not ours.flags.writeable
            assert ours.size == 0 or ours.ctypes.data % 64 == 0


def test_grouped_messages_are_answered_separately(client, server):
    link = client.open()
    ops = ["echo", "fail", "echo", "unknown", "echo"]
    link.send_all([Message({"op": op, "n": n}, [np.arange(n)]) for n, op in enumerate(ops)], 30)
    answers = []
    while len(answers) < len(ops):
        answers += link.receive_all(30)
    assert [type(answer) for answer in answers] == [
        Message,
        RemoteError,
        Message,
        UnknownProgramError,
        Message,
    ]
    assert [a.header["answered"] for a in answers if isinstance(a, Message)] == [1, 3, 5]
    assert [len(a.arrays[0]) for a in answers if isinstance(a, Message)] == [0, 2, 4]
    link.send_all([Message({"op": "echo"}), Message({"op": "fail"})], 30)
    assert link.receive(30).header["answered"] == 6
    with pytest.raises(RemoteError, match="as it was asked"):
        link.receive(30)
    assert client.statistics()["messages"] == server.statistics()["messages"] == 7


def test_answers_do_not_wait_for_a_slow_one(link, server):
    for _ in range(2):
        ops = ["echo", "echo", "wait", "echo"]
        link.send_all([Message({"op": op}) for op in ops], 30)
        assert server.echo.waits.wait(30)
        early = []
        while len(early) < 2:  # together, if the server's threads have had their turn in time
            early += link.receive_all(30)
        assert [answer.header["op"] for answer in early] == ["echo", "echo"]
        server.echo.may_go_on.set()
        late = []
        while len(late) < 2:
            late += link.receive_all(30)
        assert [answer.header["op"] for answer in late] == ["wait", "echo"]
        server.echo.waits.clear()
        server.echo.may_go_on.clear()
        time.sleep(0.1)  # the thread that sends held answers sleeps, until there is one again


def test_large_answers_do_not_wait_for_others(link, server):
    link.send_all([Message({"op": "make", "bytes": 200_000}), Message({"op": "wait"})], 30)
    assert len(link.receive(30).arrays[0]) == 200_000
    assert not server.echo.may_go_on.is_set()
    server.echo.may_go_on.set()
    assert link.receive(30).header["op"] == "wait"


def test_message_group_is_not_sent_if_one_message_cannot_be(link):
    with pytest.raises(MessageError, match="cannot be sent"):
        link.send_all([Message({"op": "echo"}), Message({"op": "echo"}, [np.array(["a"])])], 30)
    assert link.call(Message({"op": "echo"}), 30).header["answered"] == 1


def test_several_messages_are_sent_before_answers_are_received(link):
    for number in range(20):
        link.send(Message({"op": "echo", "n": number}, [np.full(number * 50, number)]))
    for number in range(20):
        answer = link.receive(10)
        assert answer.header["n"] == number
        assert set(answer.arrays[0]) <= {number}


def test_one_thread_sends_while_another_one_receives(link):
    got = []
    receiver = threading.Thread(target=lambda: got.extend(link.receive(20).header["n"] for _ in range(200)))
    receiver.start()
    for number in range(200):
        link.send(Message({"op": "echo", "n": number}, [np.zeros(20_000)]))
    receiver.join(20)
    assert got == list(range(200))


def test_streams_are_answered_at_the_same_time(server, client):
    slow, fast = client.open(), client.open()
    slow.send(Message({"op": "wait"}))
    fast.call(Message({"op": "echo"}), 30)
    server.echo.may_go_on.set()
    slow.receive(30)


def test_received_arrays_do_not_change(link):
    answers = [link.call(Message({}, [np.full(10**6, n, np.uint8)]), 30).arrays[0] for n in range(6)]
    assert [set(answer.tobytes()) for answer in answers] == [{n} for n in range(6)]


@pytest.mark.rest
def test_a_server_keeps_no_array_of_a_message_that_it_has_answered(server, client):
    link = client.open()
    gc.collect()  # of what other tests have left
    link.call(Message({}, [np.zeros(10**6, np.uint8)]), 30)
    # The client has its answer before the thread of the stream has left the answering function.
    wait_until(lambda: not [held for held in gc.get_objects() if type(held) is _Lease])


# --- errors -------------------------------------------------------------------------------------------


def test_error_of_the_service_is_raised_and_the_stream_continues(link, caplog):
    with pytest.raises(RemoteError, match="ps 0 failed: ValueError: as it was asked") as caught:
        link.call(Message({"op": "fail"}), 30)
    assert (caught.value.type, caught.value.task) == ("ValueError", "ps 0")
    assert "fail failed" in caplog.text
    with pytest.raises(UnknownProgramError, match="no such program") as caught:
        link.call(Message({"op": "unknown"}), 30)
    assert caught.value.digest == "abc"
    assert link.call(Message({"op": "echo"}), 30).header["op"] == "echo"


def test_an_error_of_an_ask_is_raised(client):
    with pytest.raises(RemoteError, match="as it was asked"):
        client.ask("fail", {}, 30)


def test_unsendable_message_does_not_end_the_stream(link):
    with pytest.raises(MessageError, match="cannot be sent"):
        link.send(Message({}, [np.array(["a"])]))
    link.call(Message({"op": "echo"}), 30)


@pytest.mark.parametrize("num_bytes", [0, 2**27])
def test_invalid_message_is_rejected_and_ends_the_stream(client, link, num_bytes, monkeypatch):
    body = [bytes(num_bytes)] if num_bytes else ()
    with monkeypatch.context() as patch:
        patch.setattr(transport, "encode", lambda message: Encoded(b"wrong", body))
        with pytest.raises(MessageError, match="5 bytes are not a message"):
            link.call(Message({"op": "echo"}), 30)
    with pytest.raises(UnavailableError, match="5 bytes are not a message"):
        link.call(Message({"op": "echo"}), 30)
    client.open().call(Message({"op": "echo"}), 30)


def test_number_of_streams_is_limited(server, client):
    links = [client.open() for _ in range(8)]
    for link in links:
        link.call(Message({}), 30)
    message(UnavailableError, lambda: client.open().call(Message({}), 30), "ps 0 at", "8 connections")
    with TaskClient(server.address, TOKEN, "ps 0") as another:  # whoever asks is answered all the same
        assert "ask" in another.ask("hello", {}, 30)
    links[3].close()
    wait_until(lambda: server.statistics()["streams"] < 8)
    client.open().call(Message({}), 30)


def test_an_answer_that_takes_too_long_closes_the_link_and_no_other(client, link):
    other = client.open()
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=r"\d s\b") as caught:
        link.call(Message({"op": "wait"}), 0.3)
    assert time.monotonic() - started > 0.25
    assert caught.value.task == "ps 0"
    with pytest.raises(UnavailableError, match="did not answer"):
        link.send(Message({}))
    other.call(Message({"op": "echo"}), 30)


def test_an_ask_that_takes_too_long(client):
    with pytest.raises(UnavailableError, match=r"did not answer 'wait'"):
        client.ask("wait", {}, 0.3)


def test_no_server():
    with TaskClient("127.0.0.1:1", TOKEN, "ps 1") as client:
        message(UnavailableError, lambda: client.ask("hello", {}, 30), "ps 1 at 127.0.0.1:1", "refused")
        message(UnavailableError, client.open, "ps 1 at 127.0.0.1:1")


def test_another_program_at_the_address_or_a_damaged_hello_may_be_tried_again():
    accepted = []

    def answer(other):
        accepted.append(other.accept()[0])
        accepted[0].recv(60)
        accepted[0].sendall(b"RPLY" + bytes(56))

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=answer, args=(other,), daemon=True).start()
        with TaskClient(f"127.0.0.1:{other.getsockname()[1]}", TOKEN, "ps 1") as client:
            message(UnavailableError, lambda: client.ask("hello", {}, 30), "ps 1 at", "another program")
    accepted[0].close()


def test_a_port_that_is_in_use(server):
    message(UnavailableError, echo_server(server.address).start, server.address, "in use")


@pytest.mark.parametrize("what", ["receive", "send"])
def test_ctrl_c_in_the_middle_of_a_message_closes_the_link(client, link, what):
    def interrupted(*_):
        raise KeyboardInterrupt

    setattr(link._connection, what, interrupted)
    with pytest.raises(KeyboardInterrupt):
        link.call(Message({"op": "echo"}), 30)
    message(UnavailableError, lambda: link.call(Message({}), 30), "KeyboardInterrupt", "ps 0 at")
    client.open().call(Message({"op": "echo"}), 30)


# --- the end ------------------------------------------------------------------------------------------


def test_closing_a_link_wakes_waiting_threads(client, link):
    threading.Timer(0.2, link.close).start()
    with pytest.raises(UnavailableError, match="was closed"):
        link.receive(20)


def test_closing_a_client_closes_its_links(server, client, link):
    link.call(Message({}), 30)
    client.close()
    message(UnavailableError, lambda: link.call(Message({}), 30), "was closed")
    message(UnavailableError, lambda: client.ask("hello", {}, 30), "was closed")
    wait_until(lambda: server.statistics()["streams"] == 0)


def test_link_opened_while_its_client_closes_is_closed(client, monkeypatch):
    connected = client._connected

    def closed_meanwhile(*arguments):
        connection = connected(*arguments)
        client.close()
        return connection

    monkeypatch.setattr(client, "_connected", closed_meanwhile)
    message(UnavailableError, client.open, "was closed")
    assert client.statistics()["links"] == 0


def test_a_server_ends_although_streams_are_open(server, client, link):
    link.call(Message({}), 30)
    started = time.monotonic()
    server.shutdown(60.0)
    assert time.monotonic() - started < 30
    with pytest.raises(UnavailableError):
        link.receive(30)
    with pytest.raises(UnavailableError):
        client.ask("hello", {}, 30)


def test_a_server_that_ends_finishes_what_it_is_answering(server, link):
    link.send(Message({"op": "wait"}))
    assert server.echo.waits.wait(30)
    ending = threading.Thread(target=server.shutdown, args=(60.0,))
    ending.start()
    threading.Timer(0.2, server.echo.may_go_on.set).start()
    assert link.receive(30).header["op"] == "wait"
    ending.join(60)
    assert not ending.is_alive()


def test_a_process_whose_server_was_not_shut_down_ends():
    program = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from echo_task import echo_server

        server = echo_server()
        server.start()
        print(server.address, flush=True)
        sys.stdin.readline()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), __file__.rpartition("/")[0]]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as task:
        with TaskClient(task.stdout.readline().strip(), TOKEN, "ps 0") as client:
            link = client.open()
            link.call(Message({}), 30)
            _, warned = task.communicate("end\n", timeout=60)
            with pytest.raises(UnavailableError):
                link.call(Message({}), 30)
    assert (task.returncode, warned) == (0, "")


def test_a_process_that_was_forked_off_ends_nothing_of_the_server():
    program = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from echo_task import echo_server

        server = echo_server()
        server.start()
        print(server.address, flush=True)
        sys.stdin.readline()
        if not os.fork():
            server.shutdown()  # as at its exit
            os._exit(0)
        os.wait()
        print("forked", flush=True)
        sys.stdin.readline()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), __file__.rpartition("/")[0]]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as task:
        with TaskClient(task.stdout.readline().strip(), TOKEN, "ps 0") as client:
            link = client.open()
            link.call(Message({}), 30)
            task.stdin.write("fork\n")
            task.stdin.flush()
            assert task.stdout.readline() == "forked\n"
            link.call(Message({}), 30)
            client.open().call(Message({}), 30)
            task.communicate("end\n", timeout=60)


def test_a_server_that_was_never_started_can_be_shut_down():
    echo_server().shutdown()


def test_statistics(server, client, link):
    sent = np.zeros(10**6, np.uint8)
    for _ in range(3):
        link.call(Message({"op": "echo"}, [sent]), 30)
    of_server, of_client = server.statistics(), client.statistics()
    assert of_server["messages"] == of_client["messages"] == 3
    assert of_server["bytes_in"] == of_client["bytes_out"] > 3 * 10**6
    assert of_server["bytes_out"] == of_client["bytes_in"] > 3 * 10**6
    assert (of_server["streams"], of_client["links"], of_server["rejected"]) == (1, 1, 0)
    link.close()
    wait_until(lambda: server.statistics()["streams"] == 0)
    assert server.statistics() == {**of_server, "streams": 0}
    assert client.statistics() == {**of_client, "links": 0}


def test_clients_leave_no_threads_and_no_descriptors(server):
    def held():
        return {t for t in threading.enumerate() if t.name.startswith("replicax")}, len(
            os.listdir("/proc/self/fd")
        )

    threads, num_open = held()
    for _ in range(20):
        with TaskClient(server.address, TOKEN, "ps 0") as client:
            client.ask("hello", {}, 30)
            client.open().call(Message({}), 30)
    wait_until(lambda: held()[0] <= threads and held()[1] <= num_open)


# --- credentials --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "says"), [(None, "no token"), ("wrong", "a wrong token"), ("secre", "a wrong token")]
)
def test_client_without_the_token_is_rejected(server, token, says):
    with TaskClient(server.address, Credentials(token=token), "ps 0") as client:
        message(UnauthenticatedError, lambda: client.ask("hello", {}, 30), "ps 0 at", says, "REPLICAX_TOKEN")
        message(UnauthenticatedError, client.open, says)
    wait_until(lambda: server.statistics()["rejected"] == 2)
    assert server.statistics()["streams"] == 0


def test_a_server_without_credentials_warns_once_and_serves_clients_without(caplog):
    with caplog.at_level(logging.WARNING, "replicax"), echo_server(credentials=Credentials()) as server:
        with TaskClient(server.address, Credentials(), "ps 0") as client:
            client.open().call(Message({}), 30)
            client.open().call(Message({}), 30)
    assert len([r for r in caplog.records if "has no credentials" in r.getMessage()]) == 1


def test_client_with_a_token_rejects_a_server_without_it():
    with echo_server(credentials=Credentials()) as server:
        with TaskClient(server.address, TOKEN, "ps 0") as client:
            message(UnauthenticatedError, lambda: client.ask("hello", {}, 30), "ps 0 at", "token")


def test_server_without_credentials_does_not_listen_on_all_interfaces():
    message(InvalidArgumentError, lambda: echo_server("0.0.0.0:0", Credentials()), "accept everybody")


@needs_ipv6
def test_ipv6():
    with echo_server("[::1]:0") as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        assert server.address.startswith("[::1]:")
        client.open().call(Message({}), 30)


def test_host_names():
    with echo_server("localhost:0") as server, TaskClient(server.address, TOKEN, "ps 0") as client:
        client.open().call(Message({}), 30)


# --- TLS ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """``pki["a"]``: credentials whose certificate the CA of this name signed."""
    folder = tmp_path_factory.mktemp("pki")
    return {name: credentials_of_ca(folder, name) for name in ("a", "b")}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_mutual_tls(pki, host):
    with echo_server(f"{host}:0", pki["a"]) as server, TaskClient(server.address, pki["a"], "ps 0") as client:
        answer = client.open().call(Message({}, [np.arange(10**6)]), 30)
        np.testing.assert_array_equal(answer.arrays[0], np.arange(10**6))
        assert client.ask("hello", {"a": 1}, 30)["a"] == 1


@pytest.fixture(params=["plain", "TLS"])
def any_link(request, pki):
    credentials = pki["a"] if request.param == "TLS" else TOKEN
    with (
        echo_server(credentials=credentials) as server,
        TaskClient(server.address, credentials, "ps 0") as client,
    ):
        yield client.open()
        server.echo.may_go_on.set()


def arrived(link, num_answers=1):
    """Answers that are received as they arrive, without waiting for any."""
    answers, until = [], time.monotonic() + 30
    while len(answers) < num_answers:
        assert time.monotonic() < until
        if link.has_bytes() or select.select([link], [], [], 0.01)[0]:
            answers += link.receive_arrived() or []
    return answers


def test_answers_that_have_arrived_are_received_without_waiting(any_link):
    assert any_link.receive_arrived() is None
    assert not any_link.has_bytes()
    for turn in range(3):
        any_link.send(Message({"op": "echo", "turn": turn}, [np.arange(5)]))
        (answer,) = arrived(any_link)
        assert answer.header["turn"] == turn
        np.testing.assert_array_equal(answer.arrays[0], np.arange(5))
        assert any_link.receive_arrived() is None
        assert not any_link.has_bytes()


def test_many_answers_arrive_in_order(any_link):
    ops = ["echo", "fail"] * 500
    any_link.send_all([Message({"op": op, "n": n}, [np.arange(100)]) for n, op in enumerate(ops)])
    answers = arrived(any_link, len(ops))
    assert [type(each) for each in answers] == [Message, RemoteError] * 500
    assert [each.header["n"] for each in answers[::2]] == list(range(0, 1000, 2))


def test_large_answer_between_small_ones_is_left_to_a_receive_that_waits(any_link):
    large = np.arange(2**20)
    for n, arrays in enumerate([[], [large], []]):
        any_link.send(Message({"op": "echo", "n": n}, arrays))
    answers = []
    while len(answers) < 3:
        some = any_link.receive_arrived()
        if some is None and any_link.has_bytes():
            some = any_link.receive_all(30)
        answers += some or []
    assert [each.header["n"] for each in answers] == [0, 1, 2]
    np.testing.assert_array_equal(answers[1].arrays[0], large)


def test_answer_with_a_large_header_arrives(any_link):
    any_link.send(Message({"op": "echo", "text": "x" * 2**20}))
    wait_until(lambda: select.select([any_link], [], [], 0.01)[0])
    for _ in range(20):
        assert any_link.receive_arrived() is None
    assert len(any_link.receive_all(30)[0].header["text"]) == 2**20


def test_end_of_the_task_is_an_error_of_what_has_arrived(any_link):
    any_link.send(Message({"op": "echo"}))
    arrived(any_link)
    any_link._connection.cancel()
    message(UnavailableError, lambda: arrived(any_link), "ps 0")
    assert any_link.is_closed
    assert any_link.fileno() == -1
    message(UnavailableError, any_link.receive_arrived, "ps 0")


@pytest.mark.parametrize("how", ["receive_all", "receive_arrived"])
def test_answers_before_one_that_is_no_message_are_received(client, server, how, monkeypatch):
    """Otherwise its error would be taken for the answer to an older request."""
    answer = server._answer
    monkeypatch.setattr(
        server, "_answer", lambda m: Encoded(b"none", ()) if m.header["n"] == 2 else answer(m)
    )
    link = client.open()
    link.send_all([Message({"op": "echo", "n": n}) for n in range(4)])
    time.sleep(0.2)  # all have arrived
    answers = link.receive_all(30) if how == "receive_all" else arrived(link)
    assert [each.header["n"] for each in answers] == [0, 1]
    assert link.has_bytes()
    message(MessageError, lambda: link.receive_all(30), "4 bytes are not a message")
    assert link.is_closed


@pytest.mark.parametrize("who", ["no certificate", "of another CA", "no TLS"])
def test_mutual_tls_rejects_a_client_without_a_certificate(pki, who):
    shown = {
        "no certificate": Credentials(ca_file=pki["a"].ca_file),
        "of another CA": Credentials(
            ca_file=pki["a"].ca_file, certificate_file=pki["b"].certificate_file, key_file=pki["b"].key_file
        ),
        "no TLS": Credentials(),
    }[who]
    with echo_server(credentials=pki["a"]) as server:
        with TaskClient(server.address, shown, "ps 0") as client:
            message(UnavailableError, lambda: client.ask("hello", {}, 30), "ps 0 at", server.address)
            message(UnavailableError, client.open)
        assert server.statistics()["messages"] == 0
        with TaskClient(server.address, pki["a"], "ps 0") as client:
            client.open().call(Message({}), 30)


def test_client_rejects_a_server_of_another_ca(pki):
    with echo_server(credentials=pki["b"]) as server, TaskClient(server.address, pki["a"], "ps 0") as client:
        message(UnavailableError, lambda: client.ask("hello", {}, 30), "ps 0 at")


def test_tls_and_a_token(pki):
    of_server = Credentials("secret", certificate_file=pki["a"].certificate_file, key_file=pki["a"].key_file)
    with echo_server(credentials=of_server) as server:
        with TaskClient(server.address, Credentials("secret", ca_file=pki["a"].ca_file), "ps 0") as client:
            client.open().call(Message({}), 30)
        with TaskClient(server.address, Credentials("wrong", ca_file=pki["a"].ca_file), "ps 0") as client:
            message(UnauthenticatedError, client.open, "a wrong token")


def test_mutual_tls_asks_for_the_token_too(pki):
    both = Credentials("secret", pki["a"].ca_file, pki["a"].certificate_file, pki["a"].key_file)
    with echo_server(credentials=both) as server, TaskClient(server.address, pki["a"], "ps 0") as client:
        message(UnauthenticatedError, client.open, "no token")
