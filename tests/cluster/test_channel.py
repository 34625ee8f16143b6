"""The control channel on real sockets: members in threads of this process, and the controller in another thread."""

import contextlib
import errno
import json
import logging
import re
import socket
import threading
import time
import types

import pytest

from checks import message, needs_ipv6
from replicax._src.cluster import channel as channel_module
from replicax._src.cluster import start
from replicax._src.cluster.channel import Channel
from replicax._src.cluster.control_messages import ask, connect, receive, send
from replicax._src.cluster.controller_process import ControllerServer
from replicax._src.cluster.machine_layout import free_ports
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.spec import ClusterSpec, Task, split_address
from replicax._src.control.controller import Controller
from replicax._src.wire.errors import ForeignPeerError, TokenError
from replicax._src.wire.frames import Kind
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import bind_shared, listen
from replicax.errors import ClusterStartError, PeerFailureError, ProgramMismatchError

pytestmark = pytest.mark.timeout(180)
PATIENCE_S = 60  # more than a machine needs that is busy with something else
SECURITY = Security(b"secret")
NAMES = ["worker 0", "worker 1", "worker 2"]


def read_status(path):
    """What a task tells the launcher."""
    return types.SimpleNamespace(**json.loads(path.read_text()))


def member(address, number, names=NAMES):
    """A task of a cluster whose controller is at an address."""
    others = [f"127.0.0.1:{number}" for number in range(1, len(names))]
    return Membership(ClusterSpec({"worker": [address, *others]}), Task("worker", number))


@contextlib.contextmanager
def serving(names=NAMES, linger_s=0.0, at="127.0.0.1:0", **options):
    """A controller, and its address. It ends when the block ends, even with connected members."""
    listener = listen(*split_address(at), backlog=8)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    cluster = member(address, 0, names).described
    server = ControllerServer(
        Controller(names, **options), listener, SECURITY, cluster, {"coordinator": "there"}
    )
    must_end = threading.Event()
    thread = threading.Thread(target=server.run, args=(must_end, linger_s))
    thread.start()
    try:
        yield address
    finally:
        must_end.set()
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def channels(address, names=NAMES, **options):
    """The channels of all members, connected."""
    made = [Channel(member(address, number, names), SECURITY, **options) for number in range(len(names))]
    try:
        for channel in made:
            assert channel.connect(time.monotonic() + PATIENCE_S)["coordinator"] == "there"
        yield made
    finally:
        for channel in made:
            channel.leave()


def until_failed(channel):
    until = time.monotonic() + PATIENCE_S
    while channel.failure is None:
        assert time.monotonic() < until
        time.sleep(0.01)


def gathered_by_all(members, key, values):
    results = [None] * len(members)

    def gather(number):
        results[number] = members[number].gather(key, values[number], PATIENCE_S, what="to test")

    threads = [threading.Thread(target=gather, args=(n,)) for n in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    return results


def test_values_are_gathered():
    values = [1, {"two": [2.5, None]}, "trois " * 50_000]  # the last needs several reads
    with serving() as address, channels(address) as members:
        assert gathered_by_all(members, "a", values) == [values] * 3
        assert gathered_by_all(members, "b", [0, 0, 0]) == [[0, 0, 0]] * 3


def test_launcher_gets_the_number_of_programs_run(monkeypatch, tmp_path):
    path = tmp_path / "status.json"
    monkeypatch.setenv("REPLICAX_STATUS_FILE", str(path))

    def shown(channel):
        channel._write_status()
        status = read_status(path)
        return status.step, status.state

    with serving(NAMES[:1]) as address:
        channel = Channel(member(address, 0, NAMES[:1]), SECURITY)
        assert shown(channel) == (0, "starting")
        for position in range(3):
            channel.begin(position, "#0 train_step")
            assert shown(channel) == (position, "running" if position else "starting")
            channel.end()
            assert shown(channel) == (position + 1, "running")
        channel.connect(time.monotonic() + PATIENCE_S)
        channel.begin(3, "#0 train_step")
        channel.end()
        began_at = time.monotonic()
        channel.leave()
        left_at = time.monotonic()
    status = read_status(path)
    assert (status.step, status.state) == (4, "ending")  # it is not left to the next heartbeat
    assert began_at < status.left_at <= left_at


def test_task_that_reports_an_error_has_begun_to_end(monkeypatch, tmp_path):
    path = tmp_path / "status.json"
    monkeypatch.setenv("REPLICAX_STATUS_FILE", str(path))
    with serving(NAMES[:1]) as address, channels(address, NAMES[:1]) as (channel,):
        channel.report_error("ValueError")
        left_at = read_status(path).left_at
        assert left_at <= time.monotonic()
    assert read_status(path).left_at == left_at


def test_task_that_ends_after_anothers_failure_reports_no_time(monkeypatch, tmp_path):
    """Its process ends after the other's, no matter when the launcher learns of that."""
    path = tmp_path / "status.json"
    with serving(NAMES[:2]) as address:
        second = Channel(member(address, 1, NAMES[:2]), SECURITY)
        monkeypatch.setenv("REPLICAX_STATUS_FILE", str(path))
        first = Channel(member(address, 0, NAMES[:2]), SECURITY)
        for channel in (first, second):
            channel.connect(time.monotonic() + PATIENCE_S)
        second.report_error("ValueError: my own")
        assert first.wait_for_failure(PATIENCE_S) is not None
        first._write_status()
        for channel in (first, second):
            channel.leave()
    assert read_status(path).left_at is None


def test_dead_member_is_named_to_waiting_and_other_members():
    with serving() as address, channels(address) as (first, second, third):
        second.begin(3, "#0 train_step")
        # What the kernel does when the process is killed.
        killed = threading.Timer(0.2, second._connection.cancel)
        killed.start()
        start = time.monotonic()
        with pytest.raises(PeerFailureError) as caught:
            first.gather("k", 1, 2 * PATIENCE_S, what="to test")
        assert time.monotonic() - start < PATIENCE_S
        assert caught.value.tasks == ("worker 1",)
        assert "in its program number 3, #0 train_step" in str(caught.value)
        assert third.wait_for_failure(PATIENCE_S) is not None
        message(PeerFailureError, third.check, "worker 1 died without a word", "start the job again")
        killed.join()


def test_error_of_another_task_is_shown():
    with serving() as address, channels(address) as (first, second, _):
        second.report_error("Traceback\n  line 3\nValueError: my own")
        assert first.wait_for_failure(PATIENCE_S) is not None
        message(PeerFailureError, first.check, "worker 1 raised an error", "    ValueError: my own")


def test_reason_of_a_task_that_gives_up_is_passed_on_unless_another_task_is_the_cause():
    with serving() as address, channels(address) as (first, second, third):
        first.give_up("worker 2 has not come")
        first.leave()
        for other in (second, third):
            assert other.wait_for_failure(PATIENCE_S) is not None
            message(PeerFailureError, other.check, "worker 0 gave up", "worker 2 has not come")
        second.give_up("a consequence")
        third.wait_for_failure(0.3)
        message(PeerFailureError, third.check, "worker 0 gave up")


def test_leaving_does_not_wait_for_the_next_heartbeat(monkeypatch):
    monkeypatch.setattr(channel_module, "next_moment", lambda now: (0, 1000.0))
    monkeypatch.setattr(channel_module, "_STATUS_FILE_S", 1000.0)
    with serving(NAMES[:1]) as address, channels(address, NAMES[:1]) as (member,):
        member.leave()
        assert not member._thread.is_alive()


def test_member_that_left_is_no_failure_until_it_is_needed():
    with serving() as address, channels(address) as (first, second, _):
        second.leave()
        first.wait_for_failure(0.5)
        call = lambda: first.gather("k", 1, 5.0, what="to test")  # noqa: E731
        message(PeerFailureError, call, "worker 1 has ended its program", "All tasks must run the same steps")


def test_member_that_left_is_not_needed_for_programs_it_has_run():
    """Some such programs need not wait: they read variables whose shards all lie in one process."""
    with serving() as address, channels(address) as (first, second, third):
        unblocked = {channel: threading.Event() for channel in (first, third)}
        for channel, event in unblocked.items():
            channel.on_failure = lambda failure, event=event: event.set()
        first.begin(3, "#0 read")
        third.begin(6, "#0 read")
        for position in (3, 4, 5):
            second.begin(position, "#0 read")
            second.end(is_done=True)
        second.leave()
        for channel in (first, third):
            until_failed(channel)
        assert first.failure_here is None
        for position in (4, 5):
            first.end()
            first.check(position)
            first.begin(position, "#0 read")
        first.end()
        says = "worker 1 has ended its program, and this process still needs it", "after its program number 5"
        message(PeerFailureError, lambda: first.check(6), *says)
        message(PeerFailureError, lambda: first.begin(6, "#0 read"), *says)
        message(PeerFailureError, lambda: first.gather("k", 1, PATIENCE_S, what="to test"), *says)
        assert unblocked[third].wait(PATIENCE_S)  # it was in a program that it would have waited in
        assert not unblocked[first].wait(0.1)


def test_member_that_left_is_needed_for_an_unfinished_program():
    """It was dispatched, and failed, or continues without the member that left."""
    with serving() as address, channels(address) as (first, second, _):
        for channel in (first, second):
            channel.begin(0, "#0 step")
        second.end()
        unblocked = threading.Event()
        first.on_failure = lambda failure: unblocked.set()
        second.leave()
        assert unblocked.wait(PATIENCE_S)
        assert "worker 1 has ended its program" in str(first.failure_here)


def test_member_that_left_early_or_died_is_needed_for_more_programs():
    with serving() as address, channels(address) as (first, second, third):
        for channel, position in (second, 5), (third, 4), (first, 3):
            channel.begin(position, "#0 read")
            channel.end(is_done=True)
        second.leave()
        until_failed(first)
        first.check(5)
        third.report_error("ValueError: x")
        third.leave()
        until = time.monotonic() + PATIENCE_S
        while "raised" not in str(first.failure) and time.monotonic() < until:
            time.sleep(0.01)
        assert first.failure_here is first.failure
        message(PeerFailureError, lambda: first.check(4), "worker 2 raised an error", "ValueError: x")


@pytest.mark.rest
def test_silent_member_is_given_up():
    with serving(silence_s=3.0) as address, channels(address) as (first, second, _):
        second._connection._sending.acquire()  # it heartbeats no more, as if it were stopped
        try:
            assert first.wait_for_failure(PATIENCE_S) is not None
            with pytest.raises(PeerFailureError, match=r"worker 1.* \d+ s"):
                first.check()
        finally:
            second._connection._sending.release()


@pytest.mark.rest
def test_silent_member_is_not_waited_for_long():
    """At most ten seconds, while others may take a minute to leave."""
    with serving(NAMES[:1], linger_s=60.0, silence_s=1.0) as address:
        soon = time.monotonic() + PATIENCE_S
        stopped = connect(address, SECURITY, soon)
        send(
            stopped, {"kind": "hello", "member": 0, "cluster": member(address, 0, NAMES[:1]).described}, soon
        )
        assert receive(stopped, soon)["kind"] == "welcome"
        time.sleep(2.5)
    stopped.close()


def test_lost_controller():
    """Its machine is down, for example; here its thread ends with the block."""
    with serving() as address:
        channel = Channel(member(address, 1), SECURITY)
        channel.connect(time.monotonic() + PATIENCE_S)
    assert channel.wait_for_failure(PATIENCE_S) is not None
    message(PeerFailureError, channel.check, "beside worker 0", address, "ended the connection")
    channel.leave()


def test_different_programs_are_a_mismatch():
    with serving() as address, channels(address) as (first, second, _):
        first.begin(4, "#1 evaluate")
        with contextlib.suppress(
            ProgramMismatchError
        ):  # the controller may have answered before this has begun
            second.begin(4, "#0 train_step")
        assert first.wait_for_failure(PATIENCE_S) is not None
        says = [
            "worker 0: in its program number 4, #1 evaluate",
            "worker 1: in its program number 4, #0 train_step",
        ]
        message(ProgramMismatchError, first.check, *says, "in the same order")


@pytest.mark.rest
def test_missing_member_is_named_in_time(caplog):
    with serving() as address, contextlib.ExitStack() as stack:
        channel = Channel(member(address, 0), SECURITY)
        channel.connect(time.monotonic() + PATIENCE_S)
        stack.callback(channel.leave)
        call = lambda: channel.gather("start", 1, 2.5, what="for all tasks to start")  # noqa: E731
        said = "worker 1 (has not come), worker 2 (has not come)"
        message(PeerFailureError, call, "worker 0 waited ", " s for all tasks to start", said)


def test_wait_can_be_cancelled():
    with serving() as address, channels(address) as (first, *_):
        stop = threading.Event()
        threading.Timer(0.2, stop.set).start()
        start = time.monotonic()
        with pytest.raises(PeerFailureError):
            first.gather("k", 1, 2 * PATIENCE_S, what="to test", is_cancelled=stop.is_set)
        assert time.monotonic() - start < PATIENCE_S


@pytest.mark.rest
def test_wait_for_a_living_member_is_logged_and_ends_in_time(caplog):
    """The message names what the member does; here it is in this test."""
    limits = {"stall_s": 1.0, "timeout_s": 5.0}
    with (
        serving(NAMES[:2], **limits) as address,
        channels(address, NAMES[:2]) as (first, second),
        caplog.at_level(logging.WARNING, "replicax"),
    ):
        for channel in (first, second):
            channel.begin(0, "#0 f")
        second.end()
        first.begin(1, "#0 f")
        assert first.wait_for_failure(PATIENCE_S) is not None
        assert second.wait_for_failure(PATIENCE_S) is not None  # it cannot go on either
        waited = "s in its program number 1, #0 f, for worker 1, which has not reached it"
        at = "test_channel.py"
        for channel in (first, second):
            with pytest.raises(PeerFailureError) as caught:
                channel.check()
            assert caught.value.tasks == ("worker 1",)
            for said in (waited, "after its program number 0, #0 f, for ", at, "timeout_seconds"):
                assert said in str(caught.value)
    assert re.search("worker 0 has waited [1234] s in its program number 1", caplog.text)
    assert "It fails after 5 s" in caplog.text


def test_no_process_listens():
    address = f"127.0.0.1:{free_ports(1)[0]}"
    channel = Channel(member(address, 1), SECURITY)
    says = [" s for worker 0, which does not answer at", address, "REPLICAX_START_TIMEOUT_S"]
    message(ClusterStartError, lambda: channel.connect(time.monotonic() + 0.3), *says)


@pytest.mark.parametrize(
    ("number", "names", "says"),
    [
        (1, NAMES[:2], "belongs to another cluster, worker 0 at 127.0.0.1:"),
        (0, NAMES, "another process is already worker 0"),
    ],
)
def test_foreign_task_is_rejected(number, names, says):
    with serving() as address:
        first = Channel(member(address, 0), SECURITY)
        first.connect(time.monotonic() + PATIENCE_S)
        other = Channel(member(address, number, names), SECURITY)
        message(ClusterStartError, lambda: other.connect(time.monotonic() + PATIENCE_S), "refuses", says)
        first.leave()


def test_a_second_process_that_is_the_same_task_is_named_to_those_that_wait(caplog):
    """A task is missing because another has its index: the wait says so, and not only which task has not come."""
    with serving() as address:
        first = Channel(member(address, 0), SECURITY)
        first.connect(time.monotonic() + PATIENCE_S)
        twin = Channel(member(address, 0), SECURITY)
        message(ClusterStartError, lambda: twin.connect(time.monotonic() + PATIENCE_S), "already worker 0")
        message(
            PeerFailureError,
            lambda: first.gather("start", 0, 3.0, what="to start", every_s=1.5),
            "worker 1 (has not come), worker 2 (has not come)",
            "Another process says that it is worker 0 too: give each task its own index",
        )
        first.leave()
    assert "says that it is worker 0 too" in caplog.text


def test_member_that_joins_before_the_earlier_run_has_ended_waits():
    with contextlib.ExitStack() as earlier, contextlib.ExitStack() as next_run:
        address = earlier.enter_context(serving(at=f"127.0.0.1:{free_ports(1)[0]}"))
        first, second = (Channel(member(address, number), SECURITY) for number in range(2))
        for channel in (first, second):
            channel.connect(time.monotonic() + PATIENCE_S)
        second._connection.cancel()
        assert first.wait_for_failure(PATIENCE_S) is not None
        begin = time.monotonic()
        timer = threading.Timer(1.0, lambda: (earlier.close(), next_run.enter_context(serving(at=address))))
        timer.start()
        restarted = Channel(member(address, 1), SECURITY)
        assert restarted.connect(time.monotonic() + PATIENCE_S)["coordinator"] == "there"
        assert time.monotonic() - begin >= 1
        timer.join()
        for channel in (first, second, restarted):
            channel.leave()


@pytest.mark.rest
def test_an_earlier_run_that_does_not_end_is_named():
    with serving() as address, channels(address) as (first, second, _):
        second._connection.cancel()
        assert first.wait_for_failure(PATIENCE_S) is not None
        restarted = Channel(member(address, 1), SECURITY)
        says = [
            " s for an earlier run of the job to end",
            "worker 1 has been here before, and died",
            "REPLICAX_START_TIMEOUT_S",
        ]
        message(ClusterStartError, lambda: restarted.connect(time.monotonic() + 2), *says)


@contextlib.contextmanager
def other_program(says, num_answers=1000):
    """A program that is none of replicax, and its address. It says something to each connection, and closes it; after
    some answers, or if it says None, it is silent."""
    with listen("127.0.0.1", 0, backlog=8) as listener, contextlib.ExitStack() as held:
        stop = threading.Event()

        def answer():
            listener.settimeout(0.1)
            left = 0 if says is None else num_answers
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    connection = held.enter_context(listener.accept()[0])
                    if left:
                        left -= 1
                        with contextlib.suppress(OSError):
                            connection.sendall(says)
                        connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            thread.join(timeout=PATIENCE_S)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("num_answers", "says"),
    [
        (1000, ("Another program has the address of worker 0", "a web server listens there")),
        (1, ("does not answer", "another program answers")),
    ],
)
def test_another_program_at_the_address(num_answers, says):
    """The program answers something else: members say so when their time is over, even if the last attempt was not
    answered."""
    with other_program(b"HTTP/1.1 400 Bad Request\r\n\r\n", num_answers) as address:
        channel = Channel(member(address, 1), SECURITY)
        message(ClusterStartError, lambda: channel.connect(time.monotonic() + 1.5), *says)


OTHER_PROGRAMS = [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a web server listens there (HTTP/1.1 400 Bad Request)"),
    (b"220 mail ESMTP\r\n", "a program that says '220 mail ESMTP' listens there"),
    (b"", "closes each connection at once"),
    (None, "takes connections and says nothing"),
]


@pytest.mark.parametrize(("program", "says"), OTHER_PROGRAMS)
def test_the_program_at_the_address_of_worker_0_is_named(program, says, monkeypatch):
    """To worker 1, which waits for it, and to worker 0, which cannot listen there."""
    monkeypatch.setattr(
        start, "_try_service", lambda settings: (None, {"errno": errno.EADDRINUSE, "error": "in use"})
    )
    monkeypatch.setattr(start, "_SILENT_S", 1.0)
    monkeypatch.setattr(start, "_ANSWER_S", 1.0)
    with other_program(program) as address:
        channel = Channel(member(address, 1), SECURITY)
        said = message(
            ClusterStartError, lambda: channel.connect(time.monotonic() + 0.5), "worker 0", address, says
        )
        if program:  # it is certain that it is no task, so waiting longer or starting worker 0 does not help
            assert said.startswith("Another program has the address of worker 0")
            assert "Stop that program, or choose another port in TF_CONFIG, on all tasks." in said
            assert "allow more time" not in said
        begin = time.monotonic()
        message(
            ClusterStartError,
            lambda: start._start_service(member(address, 0), {}, SECURITY, begin + 300),
            "worker 0 cannot listen at its own address",
            says,
            "Choose another port",
        )
        assert time.monotonic() - begin < 60


def test_a_program_that_is_none_of_replicax_is_not_waited_for_until_the_end(monkeypatch):
    monkeypatch.setattr(channel_module, "EARLIER_RUN_S", 0.5)
    with other_program(b"220 mail ESMTP\r\n") as address:
        channel = Channel(member(address, 1), SECURITY)
        begin = time.monotonic()
        message(ClusterStartError, lambda: channel.connect(begin + 300), "220 mail ESMTP")
        assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("names", "security", "says"),
    [
        (NAMES, SECURITY, "Another process is already worker 0 of this cluster"),
        (NAMES[:2], SECURITY, "another job of replicax listens there (worker 0 at"),
        (
            NAMES,
            Security(b"other"),
            "another job of replicax listens there, and its token is not that of this process",
        ),
    ],
)
def test_the_job_at_the_address_of_worker_0_is_named(names, security, says, monkeypatch):
    monkeypatch.setattr(
        start, "_try_service", lambda settings: (None, {"errno": errno.EADDRINUSE, "error": "in use"})
    )
    monkeypatch.setattr(start, "EARLIER_RUN_S", 0.5)
    with serving() as address:
        first = Channel(member(address, 0), SECURITY)
        first.connect(time.monotonic() + PATIENCE_S)
        mine = member(address, 0, names)
        message(
            ClusterStartError, lambda: start._start_service(mine, {}, security, time.monotonic() + 300), says
        )
        if says.startswith("Another process"):
            message(
                PeerFailureError,
                lambda: first.gather("start", 0, 2.0, what="to start"),
                "says that it is worker 0 too",
            )
        first.leave()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" * 5, b"\xff" * 100])
def test_unauthenticated_peers_do_not_disturb_the_controller(noise):
    with serving() as address:
        with socket.create_connection(split_address(address), timeout=PATIENCE_S) as stranger:
            stranger.sendall(noise)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""  # it hangs up
        with channels(address) as members:
            assert gathered_by_all(members, "a", [1, 2, 3]) == [[1, 2, 3]] * 3


@pytest.mark.parametrize(
    "said", [{"kind": "nonsense"}, {"kind": "hello"}, {"kind": "heartbeat", "status": {}}]
)
def test_peer_with_invalid_messages_does_not_disturb_the_controller(said):
    with serving() as address:
        with pytest.raises(OSError, match="ended the connection"):
            ask(address, said, SECURITY, PATIENCE_S)
        with channels(address) as members:
            assert gathered_by_all(members, "a", [1, 2, 3]) == [[1, 2, 3]] * 3


@pytest.mark.parametrize(
    "said",
    [b"[" * 100_000, b'{"kind": "heartbeat", "status": {"position": "x"}}', b'{"kind": "offer"}'],
    ids=len,
)
def test_member_with_invalid_messages_is_lost_to_the_others_only(said):
    with serving() as address, channels(address) as members:
        members[2]._connection.send([(Kind.MESSAGE, said, ())], time.monotonic() + PATIENCE_S)
        until_failed(members[0])
        assert "worker 2" in str(members[0].failure)
        assert ask(address, {"kind": "ping"}, SECURITY, PATIENCE_S)["kind"] == "pong"


@pytest.mark.parametrize("said", [{"kind": "gone"}, {"kind": "gathered", "key": "a"}, {"kind": "timeout"}])
def test_invalid_message_of_the_controller_is_a_failure_and_no_endless_wait(said, monkeypatch):
    with serving(NAMES[:1]) as address, channels(address, NAMES[:1]) as members:
        monkeypatch.setattr(Controller, "tick", lambda controller, now: [(0, said)])
        until_failed(members[0])
        assert type(members[0].failure) is PeerFailureError
        assert "none of this version" in str(members[0].failure)


@pytest.mark.parametrize("token", [b"", b"another"])
def test_joining_and_ending_a_job_need_the_token(token, monkeypatch):
    monkeypatch.setattr(channel_module, "EARLIER_RUN_S", -1.0)  # none is waited for
    with serving(NAMES[:2]) as address:
        stranger, soon = (
            Channel(member(address, 1, NAMES[:2]), Security(token)),
            time.monotonic() + PATIENCE_S,
        )
        message(ClusterStartError, lambda: stranger.connect(soon), "REPLICAX_TOKEN")
        cluster = member(address, 0, NAMES[:2]).described
        failed = {"kind": "failed", "member": 1, "cluster": cluster, "text": "no"}
        with pytest.raises(TokenError):
            ask(address, failed, Security(token), PATIENCE_S)
        with channels(address, NAMES[:2]) as members:
            assert gathered_by_all(members, "a", [1, 2]) == [[1, 2]] * 2


@needs_ipv6
@pytest.mark.parametrize(
    ("at", "reached_by"), [("[2001:db8::1]:0", ["::1", "127.0.0.1"]), ("[::1]:0", ["::1"])]
)
def test_an_ipv6_address_is_listened_at(at, reached_by):
    """It listens on all networks, as at an IPv4 address: the machine may have the address only for others."""
    with listen(*split_address(at), backlog=2) as listener:
        for host in reached_by:
            socket.create_connection((host, listener.getsockname()[1]), timeout=PATIENCE_S).close()


def test_reserved_port_is_only_for_processes_that_share_it():
    """As with gRPC, no other process can take the port before its server listens there, and only the server gets
    connections then."""
    with bind_shared("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port, backlog=1)
        with socket.create_server(("127.0.0.1", port), reuse_port=True) as server:
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
            server.settimeout(PATIENCE_S)
            server.accept()[0].close()


def test_last_attempt_that_is_cut_short_does_not_hide_a_wrong_token(monkeypatch):
    spec = ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    channel = Channel(Membership(spec, Task("worker", 1)), Security(b"another"))
    answers = iter([TokenError("a wrong token")])

    def joined(deadline):
        for error in answers:
            raise error
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise TimeoutError("the deadline has passed")

    monkeypatch.setattr(channel, "_joined", joined)
    with pytest.raises(ClusterStartError, match="REPLICAX_TOKEN"):
        channel.connect(time.monotonic() + 0.5)


# --- messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"x", b"[]", b'{"value": 1}', b"\xff"])
def test_invalid_messages(text):
    with serving() as address:
        connection = connect(address, SECURITY, time.monotonic() + PATIENCE_S)
        connection.receive = lambda deadline: memoryview(text)
        with pytest.raises(ForeignPeerError):
            receive(connection, time.monotonic() + PATIENCE_S)
        connection.close()


@pytest.mark.rest
def test_waiting_is_logged(caplog):
    """The message names the tasks, every few seconds."""
    with serving() as address, caplog.at_level(logging.WARNING, "replicax"):
        channel = Channel(member(address, 2), SECURITY)
        channel.connect(time.monotonic() + PATIENCE_S)
        with pytest.raises(PeerFailureError) as caught:
            channel.gather("start", 1, 3.0, what="for all tasks to start", every_s=0.5)
        channel.leave()
    assert caught.value.tasks == ("worker 0", "worker 1")
    assert 2 <= caplog.text.count("worker 2 has been waiting") <= 6
    assert "worker 0 (has not come), worker 1 (has not come)" in caplog.text
