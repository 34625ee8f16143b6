"""What strangers send to a live task: it refuses or closes, its memory returns, and it goes on serving."""

import os
import random
import socket
import struct
import time

import numpy as np
import pyarrow as pa
import pytest
from echo_task import EchoTask
from pyarrow import flight

from replicax._src.cluster.credentials import Credentials
from replicax._src.ps.messages import Message, encode
from replicax._src.ps.transport import TaskClient
from replicax.errors import UnauthenticatedError

pytestmark = pytest.mark.timeout(250)
TOKEN = Credentials(token="secret")
MB = 2**20
SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
ERRORS = (flight.FlightError, pa.ArrowException, OSError)
KEPT = 60 * MB  # of threads, arenas and pools; not of what was sent


@pytest.fixture(scope="module")
def task():
    with EchoTask() as task:
        serve(task)
        yield task


def serve(task):
    """Checks that the task serves who has the token."""
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        sent = np.arange(10**6)
        with client.open() as link:
            np.testing.assert_array_equal(link.call(Message({}, [sent]), 30).arrays[0], sent)
        assert client.ask("hello", {"a": 1}, 30)["a"] == 1


def raw(task, data, is_over=None):
    """Sends bytes, and gives what comes back until the task closes, or that is the end of an answer."""
    answer = b""
    with socket.create_connection(("127.0.0.1", task.port), timeout=10) as connection:
        try:
            connection.sendall(data)
            if is_over is None:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(2**16):
                answer += part
                if is_over is not None and is_over(answer):
                    break
        except ConnectionError:
            pass
    return answer


# --- bytes on the wire: HTTP/2 by hand ----------------------------------------------------------------


def _frame(kind, flags, stream, payload):
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + payload


def _field(name, value):
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call_of(method, payload, token):
    """A gRPC call as bytes, its body being ``payload``."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/arrow.flight.protocol.FlightService/{method}",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
        **({"authorization": token} if token else {}),
    }
    head = b"".join(_field(name, value) for name, value in fields.items())
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"")
    body = bytes([0]) + struct.pack("!I", len(payload)) + payload
    cut = [body[at : at + 16_000] for at in range(0, len(body), 16_000)]
    data = [_frame(0, int(part is cut[-1]), 1, part) for part in cut]
    return preface + _frame(1, 4, 1, head) + b"".join(data)


def is_over(answer):
    """Whether these frames have the end of the first stream, or of the connection."""
    at = 0
    while at + 9 <= len(answer):
        kind, flags, stream = answer[at + 3], answer[at + 4], answer[at + 8]
        if kind == 7 or (stream == 1 and (kind == 3 or (kind in (0, 1) and flags & 1))):
            return True
        at += 9 + int.from_bytes(answer[at : at + 3])
    return False


def flight_data(header, metadata, body):
    """A ``FlightData``, as protobuf has it."""

    def field(number, value):
        length, left = b"", len(value)
        while left > 127:
            length, left = length + bytes([left & 127 | 128]), left >> 7
        tag = number << 3 | 2
        tags = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
        return tags + length + bytes([left]) + value

    return field(2, header) + field(3, metadata) + field(1000, body)


# --- what a stranger with pyarrow sends ---------------------------------------------------------------


def exchange(client, token, random_):
    headers = [(b"authorization", token.encode())] if token else []
    options = flight.FlightCallOptions(headers=headers, timeout=10)
    try:
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_command(random_.randbytes(random_.randrange(20))), options
        )
        schema = random_.choice([SCHEMA, SCHEMA, pa.schema([("a", pa.int64()), ("b", pa.string())])])
        writer.begin(schema)
        for _ in range(random_.randrange(1, 4)):
            metadata = random_.choice([random_.randbytes(random_.randrange(60)), damaged(random_)])
            rows = random_.choice([0, 1, 1000])
            arrays = [
                pa.array(["x"] * rows, field.type)
                if field.type == pa.string()
                else pa.array([1] * rows, field.type)
                for field in schema
            ]
            batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
            random_.choice(
                [
                    lambda metadata=metadata: writer.write_metadata(metadata),
                    lambda batch=batch: writer.write_batch(batch),
                    lambda metadata=metadata, batch=batch: writer.write_with_metadata(batch, metadata),
                ]
            )()
        writer.done_writing()
        while True:
            reader.read_chunk()
    except (StopIteration, *ERRORS):
        pass
    finally:
        try:
            writer.close()
        except (UnboundLocalError, *ERRORS):
            pass


def damaged(random_):
    head = bytearray(encode(Message({"op": "echo"}, [np.zeros(random_.choice([3, 30_000]))])).head)
    for _ in range(random_.randrange(4)):
        head[random_.randrange(len(head))] = random_.randrange(256)
    return bytes(head[: random_.choice([len(head), random_.randrange(len(head))])])


# --- what comes to the port of streams ----------------------------------------------------------------


def frame(task, client, has_ticket, random_):
    """Sends a frame, and maybe more, and takes what comes back."""
    told = client.ask("", {}, 30)
    ticket = bytes.fromhex(told["ticket"]) if has_ticket else random_.randbytes(random_.choice([32, 32, 10]))
    with socket.create_connection(("127.0.0.1", told["port"]), timeout=30) as connection:
        try:
            connection.sendall(ticket)
            if has_ticket:
                assert connection.recv(8, socket.MSG_WAITALL) == b"replicax"
            connection.sendall(random_frame(random_))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(2**16):
                pass
        except OSError as error:  # without a ticket nothing is read, and the connection is reset
            if has_ticket or isinstance(error, TimeoutError):
                raise


def random_frame(random_):
    head = b"".join(damaged(random_) for _ in range(random_.choice([1, 1, 3])))
    size = random_.choice([len(head), len(head), random_.randrange(2**32)])
    whole = random_.choice([b"m", b"m", b"m", b"r", b"?"]) + struct.pack("<I", size) + head
    return random_.choice([whole, whole + random_.randbytes(1000), random_.randbytes(50)])


def attack(task, num_each, seed):
    """Sends random bytes, calls, exchanges and frames, with the token, or a ticket, and without."""
    random_ = random.Random(seed)
    for _ in range(num_each // 10):
        raw(task, random_.randbytes(random_.randrange(1, 300)))
    for turn in range(num_each):
        parts = [random_.randbytes(random_.randrange(random_.choice([2, 200, 5000]))) for _ in range(3)]
        payload = random_.choice(
            [flight_data(*parts), flight_data(b"", damaged(random_), parts[0]), parts[1]]
        )
        method = random_.choice(["DoExchange", "DoExchange", "DoAction", "DoPut", "DoGet", "Handshake", "x"])
        raw(task, call_of(method, payload, ["secret", "wrong", None][turn % 3]), is_over)
    client = flight.connect(f"grpc://127.0.0.1:{task.port}")
    for turn in range(num_each):
        exchange(client, ["secret", None][turn % 2], random_)
    client.close()
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        for turn in range(num_each):
            frame(task, client, turn % 2 == 0, random_)


def attacked(task, num_each, seed):
    attack(task, 60, seed=0)  # the first ones make threads and arenas
    before = task.memory()
    attack(task, num_each, seed)
    serve(task)
    assert task.process.poll() is None
    assert task.memory() < before + KEPT
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        until = time.monotonic() + 60  # the task sees the end of what a client has closed a little later
        while (statistics := client.ask("statistics", {}, 30))["streams"] and time.monotonic() < until:
            time.sleep(0.01)
    assert statistics["rejected"] > num_each / 2
    assert statistics["streams"] == 0


@pytest.mark.parametrize(("token", "is_answered"), [("secret", True), ("wrong", False), (None, False)])
def test_calls_by_hand_get_as_far_as_the_service(task, token, is_answered):
    action = b"\x0a\x05hello\x12\x02{}"
    assert (b'"what":"hello"' in raw(task, call_of("DoAction", action, token), is_over)) is is_answered


def test_random_calls_and_frames(task):
    attacked(task, 300, seed=1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_thousand_random_calls_and_frames(task):
    """So many of each to both ports."""
    seed = int.from_bytes(os.urandom(4))
    print(f"{seed=}")
    attacked(task, 10_000, seed)


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_stranger_costs_no_memory(task, token):
    serve(task)
    before = task.memory("VmHWM")
    client = flight.connect(f"grpc://127.0.0.1:{task.port}")
    batch = pa.RecordBatch.from_arrays([pa.array(np.zeros(500 * MB, np.uint8))], schema=SCHEMA)
    headers = [(b"authorization", token.encode())] if token else []

    def send():
        writer, _ = client.do_exchange(
            flight.FlightDescriptor.for_command(b"link"),
            flight.FlightCallOptions(headers=headers, timeout=30),
        )
        writer.begin(SCHEMA)
        writer.write_batch(batch)
        writer.close()

    with pytest.raises(ERRORS, match="token"):
        send()
    assert task.memory("VmHWM") < before + 20 * MB
    serve(task)


def test_many_who_have_no_token_leave_nothing(task):
    with TaskClient(task.address, Credentials(token="wrong"), "ps 0") as client:
        for _ in range(100):
            with pytest.raises(UnauthenticatedError):
                client.open()
    serve(task)


def test_a_large_message_is_announced_and_does_not_come(task):
    """Its memory is not touched, and goes with the stream."""
    with TaskClient(task.address, TOKEN, "ps 0") as client:
        before = task.memory()
        pipe = client._client.stream()
        pipe.begin()
        head = encode(Message({}, [np.zeros(2**30, np.uint8)])).head
        pipe._writer.write_metadata(head)
        assert client.ask("hello", {}, 10)
        assert task.memory() < before + KEPT
        pipe.cancel()
        pipe.close()
    serve(task)
