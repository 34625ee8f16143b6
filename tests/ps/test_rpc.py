"""``rx.experimental.rpc``: functions that another process calls by name, results as futures, typed errors."""

import subprocess
import sys
import textwrap
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax.errors import (
    ContextError,
    InvalidArgumentError,
    MessageError,
    RemoteError,
    UnauthenticatedError,
    UnavailableError,
    WaitTimeoutError,
)
from replicax.experimental import rpc

pytestmark = pytest.mark.timeout(250)


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REPLICAX_TOKEN", "secret")


def failing(x):
    raise ValueError(f"no {float(x):g}")


@pytest.fixture
def server():
    may_go_on = threading.Event()
    with rpc.Server.create("grpc", "localhost:0") as server:
        server.register("multiply", rx.function(lambda a, b: a * b))
        server.register(
            "pytrees", lambda pytree, scale: {"sum": pytree["a"] + pytree["b"][0] * scale, "none": None}
        )
        server.register("failing", failing)
        server.register("waiting", lambda: may_go_on.wait(300))
        server.register("call", lambda: 7)
        server.start()
        yield server
        may_go_on.set()


@pytest.fixture
def client(server):
    with rpc.Client.create("grpc", server.address, name="calculator") as client:
        yield client


def test_functions_are_called_by_name(client):
    result = client.call("multiply", [jnp.arange(3.0), 2])
    assert result.is_ok()
    assert result.get_error() is None
    np.testing.assert_array_equal(result.get_value(), [0.0, 2.0, 4.0])


def test_a_client_has_methods_for_the_functions(client):
    assert client.multiply(3, 4).get_value() == 12
    assert client.multiply_blocking(np.float32(3), np.float32(0.5)) == 1.5
    assert client.call("call").get_value() == 7  # its own `call` is kept


def test_pytrees_are_sent(client):
    result = client.pytrees_blocking({"a": np.ones(2), "b": (np.full(2, 3.0),)}, 2.0)
    assert result["none"] is None
    np.testing.assert_array_equal(result["sum"], [7.0, 7.0])


def test_large_arrays_are_sent(client):
    large = np.arange(2_000_000, dtype=np.float32)
    np.testing.assert_array_equal(client.multiply_blocking(large, 2), 2 * large)


def test_calls_run_at_the_same_time(client, server):
    waits = [client.waiting() for _ in range(3)]
    assert client.multiply_blocking(2, 3) == 6
    server._functions["waiting"].__closure__[0].cell_contents.set()
    assert all(bool(each.get_value()) for each in waits)


def test_error_of_a_function_is_the_error_of_its_call(client):
    result = client.failing(5)
    assert not result.is_ok()
    assert isinstance(result.get_error(), RemoteError)
    message(RemoteError, result.get_value, "ValueError", "no 5")
    assert client.multiply_blocking(1, 1) == 1


def test_a_function_that_is_not_registered_is_an_error(client):
    message(InvalidArgumentError, client.call("divide", [1, 2]).get_value, "'divide'", "multiply")


def test_a_call_that_takes_too_long_is_an_error(client):
    started = time.monotonic()
    message(WaitTimeoutError, client.call("waiting", timeout_in_ms=300).get_value, "0.3 s")
    assert time.monotonic() - started < 30
    assert client.multiply_blocking(1, 2) == 2


@pytest.mark.parametrize("argument", ["text", object(), {1.5: 2}])
def test_unsupported_values_raise(client, argument):
    with pytest.raises((MessageError, InvalidArgumentError), match="cannot be sent"):
        client.call("multiply", [argument, 2]).get_value()


def test_another_token_is_rejected(server, monkeypatch):
    monkeypatch.setenv("REPLICAX_TOKEN", "another")
    message(UnauthenticatedError, lambda: rpc.Client.create("grpc", server.address), "REPLICAX_TOKEN")


def test_no_server():
    message(UnavailableError, lambda: rpc.Client.create("grpc", "127.0.0.1:1"), "127.0.0.1:1")


def test_a_server_that_has_ended_is_an_error_of_the_call(server, client):
    client.multiply_blocking(1, 1)
    server.close()
    assert isinstance(client.multiply(1, 1).get_error(), UnavailableError)


def test_a_client_that_was_closed_is_an_error_of_the_call(client):
    waits = client.waiting()
    time.sleep(0.2)
    client.close()
    assert isinstance(waits.get_error(), UnavailableError)
    message(UnavailableError, lambda: client.call("multiply", [1, 2]), "closed")


def test_invalid_servers_raise(server):
    message(InvalidArgumentError, lambda: rpc.Server.create("http", "localhost:0"), "'http'", "'grpc'")
    message(InvalidArgumentError, lambda: rpc.Client.create("http", "localhost:1"), "'http'")
    message(ContextError, lambda: server.register("late", abs), "'late'", "start()")
    new = rpc.Server.create("grpc", "localhost:0")
    new.register("one", abs)
    message(InvalidArgumentError, lambda: new.register("one", abs), "'one'")
    message(InvalidArgumentError, lambda: new.register("two", 2), "'two'")
    message(InvalidArgumentError, lambda: new.register("not a name", abs), "'not a name'")
    message(InvalidArgumentError, lambda: new.register("_idle", abs), "'_idle'")


def test_other_machines_need_a_token(monkeypatch):
    monkeypatch.delenv("REPLICAX_TOKEN")
    message(InvalidArgumentError, lambda: rpc.Server.create("grpc", "0.0.0.0:0"), "REPLICAX_TOKEN")


def test_another_process_calls():
    program = """
        import sys
        from replicax.experimental import rpc

        with rpc.Server.create("grpc", "localhost:0") as server:
            server.register("add", lambda a, b: a + b)
            server.start()
            print(server.address, flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            with rpc.Client.create("grpc", process.stdout.readline().strip()) as client:
                assert client.add_blocking(1, 2) == 3
        finally:
            process.communicate("", timeout=200)
    assert process.returncode == 0


def test_a_process_with_a_call_that_does_not_end_can_end(server):
    program = f"""
        from replicax.experimental import rpc

        client = rpc.Client.create("grpc", "{server.address}")
        client.waiting()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=200)
