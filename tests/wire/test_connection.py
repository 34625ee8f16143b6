"""Connections: frames in any pieces, deadlines, several threads, and how they end."""

import contextlib
import random
import select
import socket
import struct
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._src.wire import connection as connections
from replicax._src.wire.connection import _BUFFER_BYTES, _FIRST_BYTES, FOREVER, Connection
from replicax._src.wire.errors import DamagedFrameError, ForeignPeerError, PeerEndedError, WireError
from replicax._src.wire.frames import HEADER_BYTES, Kind, frame_parts
from replicax._src.wire.streams import PlainStream

pytestmark = pytest.mark.timeout(120)
MB = 2**20
LARGE = 64 * MB
SOON_S = 20.0  # what takes milliseconds on a quiet machine


def soon(seconds=30.0):
    return time.monotonic() + seconds


class Received:
    """Memory for bodies."""

    def __init__(self):
        self.body = b""

    def room(self, head, num_bytes):
        self.head, self.body = bytes(head), bytearray(num_bytes)
        return memoryview(self.body)


def taken(connection, deadline=None):
    """The next frame: its head and body."""
    received = Received()
    head = connection.receive(soon() if deadline is None else deadline, received.room)
    return (received.head, bytes(received.body)) if head is None else (bytes(head), b"")


@contextlib.contextmanager
def in_a_thread(call, *arguments):
    """Runs a call meanwhile; its error is raised at the end."""
    raised = []

    def run():
        try:
            call(*arguments)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def seconds_of(call, error):
    """The time that it takes to raise an error."""
    started = time.monotonic()
    with pytest.raises(error):
        call()
    return time.monotonic() - started


# --- frames -------------------------------------------------------------------------------------------


EDGES = [
    0,
    1,
    23,
    24,
    25,
    _FIRST_BYTES - 24,
    _FIRST_BYTES,
    _BUFFER_BYTES - 24,
    _BUFFER_BYTES,
    _BUFFER_BYTES + 1,
]


def test_reason_of_a_peer_has_no_escape_sequences(pair):
    """It is shown on terminals, and the peer may be anybody."""
    sender, receiver = pair
    sender.end("\x1b[2Jno such job\x07\n\x9b2J")
    with pytest.raises(PeerEndedError) as caught:
        receiver.receive(soon())
    assert caught.value.reason == "\\x1b[2Jno such job\\x07\n\\x9b2J"


def test_frames_of_all_sizes_round_trip(pair):
    sender, receiver = pair
    random_ = random.Random(0)
    heads = [random_.randbytes(size) for size in (*EDGES, 3 * MB)]
    sent = [(Kind.MESSAGE, head, b"") for head in heads]
    for size in (*EDGES, 3 * MB):
        cuts = sorted(random_.randrange(size + 1) for _ in range(random_.randrange(3)))
        body = random_.randbytes(size)
        parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, size])]
        sent.append((Kind.MESSAGE, random_.choice(heads[:8]), parts))
    random_.shuffle(sent)

    def send():
        for at in range(0, len(sent), 3):  # three of them in one write
            sender.send([(kind, head, body or ()) for kind, head, body in sent[at : at + 3]], soon())

    with in_a_thread(send):
        for _, head, body in sent:
            assert taken(receiver) == (head, b"".join(body) if body else b"")
    assert sender.bytes_out >= receiver.bytes_in > sum(EDGES) + 6 * MB


class Cut:
    """A stream that gives its bytes in pieces, and then ends."""

    def __init__(self, data, sizes):
        self.data, self.sizes = data, sizes

    def read(self, memory, deadline, *, fill):
        size = min(len(memory), len(self.data), self.sizes.pop(0) if self.sizes else len(memory))
        memory[:size] = self.data[:size]
        self.data = self.data[size:]
        return size

    def read_arrived(self, memory):
        return self.read(memory, 0.0, fill=False)

    def write(self, parts, deadline):
        raise AssertionError

    def has_pending(self):
        return False


def plain_connection(end):
    """A connection over a socket, without TLS, with checksums."""
    return Connection(end, PlainStream(end), "a peer", is_checked=True)


@contextlib.contextmanager
def connection_with(data, sizes=(), *, is_checked=True):
    """A connection that receives these bytes."""
    with socket.socket() as tcp:
        connection = Connection(tcp, Cut(data, list(sizes)), "a peer", is_checked=is_checked)
        yield connection
        connection.close()


def bytes_of(frames, *, is_checked=True):
    return b"".join(
        b"".join(frame_parts(kind, head, [body] if body else (), is_checked=is_checked))
        for kind, head, body in frames
    )


some_frames = st.lists(
    st.tuples(
        st.just(Kind.MESSAGE),
        st.one_of(st.binary(max_size=60), st.sampled_from([b"h" * size for size in EDGES])),
        st.one_of(st.just(b""), st.binary(max_size=60), st.sampled_from([b"b" * size for size in EDGES])),
    ),
    max_size=5,
)


@settings(max_examples=150)
@given(
    some_frames, st.lists(st.integers(1, 2**15), max_size=60) | st.lists(st.integers(1, 30)), st.booleans()
)
def test_frames_round_trip_for_any_split_of_their_bytes(frames, sizes, is_checked):
    with connection_with(bytes_of(frames, is_checked=is_checked), sizes, is_checked=is_checked) as connection:
        for sent in frames:
            assert taken(connection) == sent[1:]
        with pytest.raises(PeerEndedError):
            taken(connection)


def test_a_stream_that_ends_anywhere_in_a_frame_gives_no_frame():
    whole = bytes_of([(Kind.MESSAGE, b"a head", b"a body")])
    for size in range(len(whole)):
        with connection_with(whole[:size]) as connection, pytest.raises(PeerEndedError):
            taken(connection)


def test_changed_byte_gives_no_frame():
    """The next frame is not mistaken for one either."""
    first, second = (Kind.MESSAGE, b"a head", b"a body"), (Kind.MESSAGE, b"another", b"")
    whole = bytes_of([first, second])
    damaged_second = len(bytes_of([first]))
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        with connection_with(bytes(changed), [7] * 4) as connection:
            if at >= damaged_second:
                assert taken(connection) == first[1:]
            with pytest.raises(DamagedFrameError):
                taken(connection)


def test_more_parts_than_one_call_of_the_system_takes(pair):
    sender, receiver = pair
    parts = [bytes([n % 251]) * 70 for n in range(3000)]
    with in_a_thread(sender.send, [(Kind.MESSAGE, b"", parts)], soon()):
        assert taken(receiver) == (b"", b"".join(parts))


class Reluctant:
    """A socket that accepts less than it is given."""

    def __init__(self, connection, most):
        self.connection, self.most = connection, most

    def sendmsg(self, parts, ancillary=(), flags=0):
        return self.connection.send(b"".join(parts)[: self.most], flags)

    def send(self, data, flags=0):
        return self.connection.send(data[: self.most], flags)

    def __getattr__(self, name):
        return getattr(self.connection, name)


@pytest.mark.parametrize("most", [7, 64, 1000])
def test_rest_of_a_partial_send_is_sent(pair, most):
    sender, receiver = pair
    stream = sender._stream
    plain = stream if isinstance(stream, PlainStream) else stream._socket
    plain._socket = Reluctant(sender._socket, most)
    body = [np.arange(n, dtype=np.uint8).data for n in (3, 64, 130, 200)] + [bytes(range(250)) * 80]
    frames = [(Kind.MESSAGE, b"first", body), (Kind.MESSAGE, b"second", ())]
    with in_a_thread(sender.send, frames, soon()):
        assert taken(receiver) == (b"first", b"".join(body))
        assert taken(receiver) == (b"second", b"")


def test_frames_that_arrived_together_are_reported(pair):
    sender, receiver = pair
    assert not receiver.has_frame()
    assert not receiver.wait(0.0)
    sender.send(
        [(Kind.MESSAGE, text * 50, ()) for text in (b"x", b"y")] + [(Kind.MESSAGE, b"", [b"body"])], soon()
    )
    assert receiver.wait(30)
    assert not receiver.has_frame()  # nothing has been read
    assert taken(receiver)[0] == b"x" * 50
    assert receiver.has_frame()
    assert receiver.wait(0.0)
    assert taken(receiver)[0] == b"y" * 50
    assert not receiver.has_frame()  # one with a body is none
    assert receiver.wait(0.0)
    assert taken(receiver)[1] == b"body"
    assert not receiver.wait(0.0)


def arrived(connection, num=1, deadline=None):
    """The heads of small messages that have arrived, once there are so many, or at the deadline."""
    heads, deadline = [], soon() if deadline is None else deadline
    while len(heads) < num and time.monotonic() < deadline:
        heads += map(bytes, connection.receive_arrived())
        select.select([connection], [], [], 0.01)
    return heads


def test_small_messages_are_received_together_when_they_have_arrived(pair):
    sender, receiver = pair
    assert receiver.receive_arrived() == []  # it does not wait
    sender.send([(Kind.MESSAGE, text * 50, ()) for text in (b"x", b"y", b"z")], soon())
    assert arrived(receiver, 3) == [b"x" * 50, b"y" * 50, b"z" * 50]
    assert receiver.bytes_in == 3 * (HEADER_BYTES + 50)
    assert not receiver.has_bytes()
    sender.send([(Kind.MESSAGE, b"small", ()), (Kind.MESSAGE, b"", [b"body"])], soon())
    assert arrived(receiver, 2, soon(0.1)) == [b"small"]  # one with a body is left to ``receive``
    assert receiver.has_bytes()
    assert taken(receiver)[1] == b"body"


def test_messages_before_a_damaged_one_are_received():
    frames = [(Kind.MESSAGE, b"x", ()), (Kind.MESSAGE, b"y", ()), (Kind.MESSAGE, b"z", ())]
    with connection_with(bytes_of(frames)[:-1] + b"Z") as connection:
        assert [bytes(head) for head in connection.receive_arrived()] == [b"x", b"y"]
        for _ in range(2):
            with pytest.raises(DamagedFrameError):
                connection.receive_arrived()


def test_end_of_the_peer_is_reported_after_its_last_frame(pair):
    sender, receiver = pair
    sender.send([(Kind.MESSAGE, b"last", ())], soon())
    assert arrived(receiver) == [b"last"]
    sender.close()
    with pytest.raises(PeerEndedError):
        arrived(receiver)


def test_reason_of_the_peer_is_left_to_receive(pair):
    sender, receiver = pair
    with in_a_thread(sender.end, "enough"):
        assert not arrived(receiver, 1, soon(0.2))
        with pytest.raises(PeerEndedError) as caught:
            receiver.receive(soon())
        receiver.close()
    assert caught.value.reason == "enough"


@pytest.mark.parametrize(
    "size", [_FIRST_BYTES, _BUFFER_BYTES - HEADER_BYTES, _BUFFER_BYTES, 3 * _BUFFER_BYTES]
)
@pytest.mark.parametrize("before", [0, 100, _BUFFER_BYTES - _FIRST_BYTES - 2 * HEADER_BYTES])
def test_looking_again_for_a_large_frame_does_not_end_the_connection(size, before):
    frames = [(Kind.MESSAGE, b"b" * before, b""), (Kind.MESSAGE, b"h" * size, b""), (Kind.MESSAGE, b"z", b"")]
    with connection_with(bytes_of(frames)) as connection:
        left = [head for _, head, _ in frames]
        while left:
            for _ in range(2 * _BUFFER_BYTES // _FIRST_BYTES):
                for head in connection.receive_arrived() if left else ():
                    assert bytes(head) == left.pop(0)
            if left:
                assert taken(connection)[0] == left.pop(0)
        with pytest.raises(PeerEndedError):
            connection.receive_arrived()


@settings(max_examples=100)
@given(some_frames, st.lists(st.integers(1, 2**15), max_size=60) | st.lists(st.integers(1, 30)), st.data())
def test_frames_are_the_same_however_often_one_looks_for_them(frames, sizes, data):
    with connection_with(bytes_of(frames), sizes) as connection:
        left = [(head, body) for _, head, body in frames]
        while left:
            for _ in range(data.draw(st.integers(0, 12))):
                for head in connection.receive_arrived() if left else ():
                    assert (bytes(head), b"") == left.pop(0)
            if left:
                assert taken(connection) == left.pop(0)


def test_bytes_are_counted(pair):
    sender, receiver = pair
    sender.send([(Kind.MESSAGE, b"head", [b"body" * 10]), (Kind.MESSAGE, b"head", ())], soon())
    taken(receiver), taken(receiver)
    assert receiver.bytes_in == 2 * (HEADER_BYTES + 4) + 40
    assert sender.bytes_out - receiver.bytes_in in (0, 8)  # of the checksum
    assert (receiver.bytes_out, sender.bytes_in) == (0, 0)


# --- what is refused before memory is taken -------------------------------------------------------------


def test_body_is_rejected_if_none_is_allowed(pair):
    sender, receiver = pair
    sender.send([(Kind.MESSAGE, b"", [bytes(100)])], soon())
    with pytest.raises(ForeignPeerError):
        receiver.receive(soon())


@pytest.mark.parametrize("num_bytes", [99, 101])
def test_memory_of_the_wrong_size_is_not_used(plain_pair, num_bytes):
    sender, receiver = plain_pair
    sender.send([(Kind.MESSAGE, b"", [bytes(100)])], soon())
    with pytest.raises(ForeignPeerError):
        receiver.receive(soon(), lambda head, _: memoryview(bytearray(num_bytes)))


def test_damaged_head_allocates_no_memory():
    whole = bytearray(bytes_of([(Kind.MESSAGE, b"a head", b"a body")]))
    whole[HEADER_BYTES] ^= 1

    def room(head, num_bytes):
        raise AssertionError

    with connection_with(bytes(whole)) as connection, pytest.raises(DamagedFrameError):
        connection.receive(soon(), room)


# --- deadlines ----------------------------------------------------------------------------------------


# The system ends waits after 1 s.
LIMITS_S = [0.0, 0.2, pytest.param(1.2, marks=pytest.mark.rest)]


@pytest.mark.parametrize("limit_s", LIMITS_S)
def test_a_receive_that_gets_nothing_ends_at_its_deadline(pair, limit_s):
    took = []
    while min(took, default=SOON_S) > limit_s + 0.7 and len(took) < 10:  # on a busy machine most take longer
        took.append(seconds_of(lambda: taken(pair[1], soon(limit_s)), TimeoutError))
    assert limit_s <= min(took) < limit_s + 0.7


@pytest.mark.parametrize("limit_s", LIMITS_S)
def test_blocked_send_ends_at_its_deadline(pair, limit_s):
    sender, _ = pair
    body = bytes(LARGE)
    took = seconds_of(lambda: sender.send([(Kind.MESSAGE, b"", [body])], soon(limit_s)), TimeoutError)
    assert limit_s <= took < limit_s + SOON_S


@pytest.mark.parametrize("sent", [0, HEADER_BYTES - 1, HEADER_BYTES + 3, HEADER_BYTES + 5000])
def test_incomplete_frame_ends_at_the_deadline(sockets, sent):
    ours, theirs = sockets
    receiver = plain_connection(ours)
    theirs.sendall(bytes_of([(Kind.MESSAGE, b"head", bytes(10_000))])[:sent])
    assert 0.2 <= seconds_of(lambda: taken(receiver, soon(0.2)), TimeoutError) < SOON_S
    receiver.close()


def test_a_peer_that_ends_in_the_middle_of_a_body_has_ended(pair):
    sender, receiver = pair
    part = bytes_of([(Kind.MESSAGE, b"head", bytes(1_000_000))], is_checked=sender._is_checked)[:300_000]

    def say_part():
        sender._stream.write([part], soon())
        sender.cancel()

    with in_a_thread(say_part), pytest.raises(PeerEndedError):
        taken(receiver)


@pytest.mark.parametrize("limit_s", [0.3, 1.3])
def test_a_frame_that_comes_byte_by_byte_ends_at_the_deadline(sockets, limit_s):
    """A deadline is for the complete frame, not for each byte."""
    ours, theirs = sockets
    receiver = plain_connection(ours)
    whole, is_over = bytes_of([(Kind.MESSAGE, b"head", bytes(10_000))]), threading.Event()

    def dribble():
        for byte in whole:
            if is_over.wait(0.02):
                return
            theirs.sendall(bytes([byte]))

    with in_a_thread(dribble):
        assert limit_s <= seconds_of(lambda: taken(receiver, soon(limit_s)), TimeoutError) < limit_s + SOON_S
        is_over.set()
    receiver.close()


def test_slow_reader_delays_a_send_at_most_to_its_deadline(sockets):
    ours, theirs = sockets
    sender, is_over = plain_connection(ours), threading.Event()

    def drain():
        while not is_over.wait(0.02):
            theirs.recv(50_000)

    body = bytes(LARGE)
    with in_a_thread(drain):
        took = seconds_of(lambda: sender.send([(Kind.MESSAGE, b"", [body])], soon(1.5)), TimeoutError)
        is_over.set()
    assert 1.5 <= took < 1.5 + SOON_S  # draining all takes 26 s
    sender.close()


# --- several threads ----------------------------------------------------------------------------------


def test_64_mb_are_sent_both_ways_at_once(pair):
    pattern = np.arange(LARGE // 8)
    bodies = [pattern.view(np.uint8).data, pattern[::-1].copy().view(np.uint8).data]
    got = [Received(), Received()]
    with contextlib.ExitStack() as threads:
        for end, body, received in zip(pair, bodies, got):
            threads.enter_context(in_a_thread(end.send, [(Kind.MESSAGE, b"head", [body])], soon()))
            threads.enter_context(in_a_thread(end.receive, soon(), received.room))
    for received, body in zip(got, reversed(bodies)):
        assert received.body == body


def test_one_thread_sends_small_frames_while_another_one_receives(pair):
    def send(end):
        for number in range(500):
            end.send([(Kind.MESSAGE, struct.pack("<I", number) * random.randrange(1, 50), ())], soon())

    def receive(end):
        for number in range(500):
            assert taken(end)[0][:4] == struct.pack("<I", number)

    with contextlib.ExitStack() as threads:
        for end in pair:
            threads.enter_context(in_a_thread(send, end))
            threads.enter_context(in_a_thread(receive, end))


def test_frames_of_several_senders_do_not_mix(pair):
    sender, receiver = pair
    bodies = [bytes([n]) * 300_000 for n in range(4)]

    def send(body):
        for _ in range(5):
            sender.send([(Kind.MESSAGE, body[:1], [body[:100_000], body[100_000:]])], soon())

    with contextlib.ExitStack() as threads:
        for body in bodies:
            threads.enter_context(in_a_thread(send, body))
        for _ in range(20):
            head, body = taken(receiver)
            assert body == bodies[head[0]]


@pytest.mark.parametrize("how", ["cancel", "close", "the peer"])
def test_closing_a_connection_wakes_sender_and_receiver(pair, how):
    ours, theirs = pair
    body, errors = bytes(LARGE), []

    def until_error(call):
        try:
            call()
        except OSError as error:
            errors.append(error)

    calls = [
        lambda: ours.receive(FOREVER),
        lambda: ours.send([(Kind.MESSAGE, b"", [body])], FOREVER),
    ]
    threads = [threading.Thread(target=until_error, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in threads)
    started = time.monotonic()
    {"cancel": ours.cancel, "close": ours.close, "the peer": theirs.close}[how]()
    for thread in threads:
        thread.join(SOON_S)
    assert time.monotonic() - started < SOON_S
    assert len(errors) == 2
    assert not any(isinstance(error, TimeoutError) for error in errors)
    ours.close()
    assert ours._socket.fileno() == -1


def test_descriptor_in_use_by_a_thread_is_not_released(plain_pair, monkeypatch):
    """Its number would soon belong to another connection."""
    ours, _ = plain_pair
    monkeypatch.setattr(connections, "_RELEASE_S", 0.1)
    with ours._receiving:
        ours.close()
        assert ours._socket.fileno() != -1
    ours.close()
    assert ours._socket.fileno() == -1


def test_closed_connection_raises(pair):
    for end in pair:
        end.close()
        for call in (lambda: end.receive(soon()), lambda: end.send([(Kind.MESSAGE, b"", ())], soon())):  # noqa: B023
            with pytest.raises((OSError, ValueError)):
                call()
        assert end.wait(0.0)
        end.close()


# --- how it ends --------------------------------------------------------------------------------------


def test_a_peer_that_closes(pair):
    ours, theirs = pair
    assert not ours.wait(0.0)
    theirs.close()
    assert ours.wait(30)
    with pytest.raises(PeerEndedError) as ended:
        ours.receive(soon())
    assert (ended.value.reason, ended.value.is_refusal) == ("", False)


def test_a_peer_whose_system_resets_the_connection(plain_pair):
    ours, theirs = plain_pair
    theirs._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs._socket.close()
    with pytest.raises(OSError) as ended:
        ours.receive(soon())
    assert not isinstance(ended.value, TimeoutError)


@pytest.mark.parametrize("is_refusal", [False, True])
@pytest.mark.parametrize("reason", ["the task is ending", "", "é" * 100_000])
def test_peer_gives_its_reason_to_end(pair, is_refusal, reason):
    ours, theirs = pair
    theirs.send([(Kind.MESSAGE, b"before", ())], soon())
    with in_a_thread(lambda: theirs.end(reason, is_refusal=is_refusal)):
        assert taken(ours)[0] == b"before"
        with pytest.raises(PeerEndedError) as ended:
            ours.receive(soon())
        ours.close()
    assert ended.value.is_refusal is is_refusal
    assert ended.value.reason == reason[: len(ended.value.reason)]
    assert len(ended.value.reason) == min(len(reason), 8192)
    assert theirs._socket.fileno() == -1


def test_a_reason_is_read_although_its_reader_is_still_writing(pair, monkeypatch):
    """The data that it still writes is read, so it gets no error before it has read the reason."""
    monkeypatch.setattr(connections, "_LAST_WORDS_S", 30.0)
    ours, theirs = pair
    body = bytes(LARGE)
    with in_a_thread(lambda: theirs.end("too large", is_refusal=True)):
        with in_a_thread(ours.send, [(Kind.MESSAGE, b"", [body])], soon()):
            time.sleep(0.1)
            with pytest.raises(PeerEndedError) as ended:
                ours.receive(soon())
        ours.close()
    assert (ended.value.reason, ended.value.is_refusal) == ("too large", True)


def test_peer_that_keeps_writing_is_cut(sockets, monkeypatch):
    monkeypatch.setattr(connections, "_LAST_WORDS_S", 0.3)
    ours, theirs = sockets
    ending = plain_connection(ours)

    def write():
        with contextlib.suppress(OSError):
            while True:
                theirs.sendall(bytes(MB))

    with in_a_thread(write):
        started = time.monotonic()
        ending.end("enough")
        assert time.monotonic() - started < SOON_S


def test_peer_that_reads_no_last_message_is_cut(sockets, monkeypatch):
    monkeypatch.setattr(connections, "_LAST_WORDS_S", 0.3)
    ours, theirs = sockets
    ending = plain_connection(ours)
    with pytest.raises(TimeoutError):
        ending.send([(Kind.MESSAGE, b"", [bytes(LARGE)])], soon(0.1))
    started = time.monotonic()
    ending.end("enough")
    assert time.monotonic() - started < SOON_S
    assert theirs.fileno() != -1


# --- TLS ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["TLS"], indirect=True)
def test_bytes_buffered_by_tls_are_reported(pair):
    """The system does not report them."""
    sender, receiver = pair
    sender.send([(Kind.MESSAGE, b"head", ())], soon())
    assert receiver._stream.read(memoryview(bytearray(1)), soon(), fill=False) == 1
    assert not select.select([receiver._socket], [], [], 0)[0]
    assert receiver.wait(0.0)
    receiver._stream.read(memoryview(bytearray(100)), soon(), fill=False)
    assert not receiver.wait(0.0)


@pytest.mark.parametrize("pair", ["TLS"], indirect=True)
def test_damage_under_tls_ends_the_connection(pair):
    ours, theirs = pair
    raw = socket.socket(fileno=socket.socket.fileno(theirs._socket))
    try:
        record = bytes([23, 3, 3]) + struct.pack(">H", 100) + bytes(100)
        select.select([], [raw], [], 10)
        raw.send(record)
        with pytest.raises(OSError) as ended:
            ours.receive(soon())
        assert not isinstance(ended.value, WireError | TimeoutError)
    finally:
        raw.detach()
