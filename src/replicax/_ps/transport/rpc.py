"""``rx.experimental.rpc``: functions that are registered in one process and called by name from others.

It is TensorFlow's ``tf.distribute.experimental.rpc``, over the wire of parameter servers, with its tokens and TLS.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, Self, final

import jax
import numpy as np

from replicax._ps.transport import structures
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient, TaskServer
from replicax._src.program_kit.cluster_tasks import Credentials
from replicax._src.program_kit.errors import (
    ContextError,
    InvalidArgumentError,
    UnavailableError,
    WaitTimeoutError,
)

_CONNECT_S: Final = 10.0
_LAYERS: Final = ("grpc", "grpc+tls")


@final
class Server:
    """Answers calls of registered functions: ``tf.distribute.experimental.rpc.Server``.

    Make it with ``Server.create``, and use it in ``with`` or call ``close``. Each client's calls run on threads of
    this process, several at once. Clients need the same token and TLS files (``REPLICAX_TOKEN`` and others in the
    environment).

    >>> server = Server.create("grpc", "localhost:0")
    >>> server.register("add", lambda a, b: a + b)
    >>> server.start()
    >>> client = Client.create("grpc", server.address)
    >>> print(client.call("add", [1.0, 2.0]).get_value())
    3.0
    >>> client.close(), server.close()
    (None, None)
    """

    def __init__(self, address: str, credentials: Credentials):
        self._functions: dict[str, Callable[..., Any]] = {}
        self._server = TaskServer(address, self._answer, credentials)
        self._is_started = False

    @classmethod
    def create(cls, rpc_layer: str, address: str) -> Self:
        """Makes a server, which listens once it is started.

        Args:
          rpc_layer: ``"grpc"``, as in TensorFlow.
          address: ``host:port``. Port 0 takes a free one, which ``address`` has after ``start``.

        Raises:
          InvalidArgumentError: The layer is another one, or other machines can reach the address and there is no
            token.
        """
        _check_layer(rpc_layer)
        return cls(address, Credentials.from_environment(os.environ))

    @property
    def address(self) -> str:
        """The ``host:port`` to which clients connect."""
        return self._server.address

    def register(self, method_name: str, func: Callable[..., Any]) -> None:
        """Lets clients call a function by name.

        Args:
          func: A function that takes and returns pytrees of arrays and numbers. It may be an ``rx.function``.

        Raises:
          InvalidArgumentError: The name is taken, or ``func`` is not callable.
          ContextError: The server has been started.
        """
        if self._is_started:
            raise ContextError(
                f"rpc.Server.register({method_name!r}): the server has been started. Register functions before start()."
            )
        if not callable(func):
            raise InvalidArgumentError(
                f"rpc.Server.register({method_name!r}): func must be a function, got {func!r}."
            )
        if (
            not isinstance(method_name, str)
            or not method_name.isidentifier()
            or method_name.startswith("_")
            or method_name in self._functions
        ):
            raise InvalidArgumentError(
                "rpc.Server.register: method_name must be a Python identifier that does not begin with _ and "
                f"is not registered yet; got {method_name!r}."
            )
        self._functions[method_name] = func

    def start(self) -> None:
        """Starts to answer.

        Raises:
          UnavailableError: It cannot listen at its address.
        """
        self._server.start()
        self._is_started = True

    def close(self) -> None:
        """Closes the server. Running calls get a few seconds to end."""
        self._server.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, message: Message) -> Message:
        """Calls a function, or lists the registered functions."""
        if message.header.get("ask") == "methods":
            return Message({"methods": sorted(self._functions)})
        name = message.header.get("method")
        if name not in self._functions:
            known = ", ".join(sorted(self._functions)) or "none"
            raise InvalidArgumentError(
                f"No function {name!r} is registered at {self.address}. Registered are: {known}."
            )
        arguments = structures.rebuilt(message.header["args"], message.arrays)
        return _message({}, "result", self._functions[name](*arguments))


@final
class StatusOrResult:
    """The outcome of a call: its result or its error. The methods wait until the call has ended."""

    def __init__(self, future: Future[Any], timeout_s: float, what: str):
        self._future, self._timeout_s, self._what = future, timeout_s, what

    def is_ok(self) -> bool:
        """True if the call has a result."""
        return self.get_error() is None

    def get_error(self) -> Exception | None:
        """Returns the error of the call, or None if there is a result.

        It is a RemoteError if the function raised, or an UnavailableError, UnauthenticatedError,
        InvalidArgumentError,
        MessageError or WaitTimeoutError.
        """
        try:
            self._future.result(None if math.isinf(self._timeout_s) else self._timeout_s)
        except WaitTimeoutError as error:
            return error
        except FutureTimeoutError:
            return WaitTimeoutError(f"{self._what} did not end within {self._timeout_s:g} s.")
        except Exception as error:
            return error
        return None

    def get_value(self) -> Any:
        """Returns the result, with JAX arrays as leaves.

        Raises:
          ReplicaxError: The error that ``get_error`` returns.
        """
        error = self.get_error()
        if error is not None:
            raise error
        return self._future.result()


@final
class Client:
    """Calls functions of a ``Server``: ``tf.distribute.experimental.rpc.Client``.

    Make it with ``Client.create``. It has two methods for each registered function: ``client.add(1.0, 2.0)`` returns a
    ``StatusOrResult`` at once, ``client.add_blocking(1.0, 2.0)`` waits for the result. Threads may share it.
    """

    def __init__(self, address: str, credentials: Credentials, name: str, timeout_s: float):
        self._client = TaskClient(address, credentials, name or "rpc server")
        self._name, self._timeout_s = name or f"The server at {address}", timeout_s
        self._is_closed = False
        try:
            methods = self._client.ask("methods", {}, min(timeout_s, _CONNECT_S))["methods"]
        except BaseException:
            self.close()
            raise
        for method in methods:
            self._add_methods(method)

    @classmethod
    def create(cls, rpc_layer: str, address: str, name: str = "", timeout_in_ms: int = 0) -> Self:
        """Connects to a server.

        Args:
          rpc_layer: ``"grpc"``, as in TensorFlow.
          address: ``host:port`` of the server.
          name: The name of the server, for messages.
          timeout_in_ms: The default limit of a call in milliseconds; 0 for no limit.

        Raises:
          InvalidArgumentError: The layer is another one.
          UnavailableError: No server answers at the address.
          UnauthenticatedError: The server has another token.
        """
        _check_layer(rpc_layer)
        return cls(
            address, Credentials.from_environment(os.environ), name, _seconds(timeout_in_ms) or math.inf
        )

    def call(
        self,
        method_name: str,
        args: Sequence[Any] | None = None,
        output_specs: Any = None,
        timeout_in_ms: int = 0,
    ) -> StatusOrResult:
        """Calls a function and returns at once. Several calls may run at the same time.

        Args:
          args: The arguments: pytrees of arrays and numbers.
          output_specs: It is ignored, because the answer has its specs.
          timeout_in_ms: The limit of the call in milliseconds; 0 for the limit of the client.

        Raises:
          UnavailableError: The client was closed.
          InvalidArgumentError: An argument cannot be sent.
        """
        del output_specs
        if self._is_closed:
            raise UnavailableError(f"The client of {self._name} was closed.")
        message = _message({"method": method_name}, "args", tuple(args or ()))
        timeout_s = _seconds(timeout_in_ms) or self._timeout_s
        future: Future[Any] = Future()
        # It is a daemon thread, because a call without a limit must not keep the process alive.
        threading.Thread(
            target=self._call, args=(future, message, timeout_s), name="replicax rpc", daemon=True
        ).start()
        return StatusOrResult(future, timeout_s, f"{self._name}: {method_name}()")

    def close(self) -> None:
        """Closes the connections. Running calls fail."""
        self._is_closed = True
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, future: Future[Any], message: Message, timeout_s: float) -> None:
        try:
            future.set_result(self._called(message, timeout_s))
        except BaseException as error:
            future.set_exception(error)

    def _called(self, message: Message, timeout_s: float) -> Any:
        try:
            answer = self._client.call(message, timeout_s)
        except UnavailableError as error:
            if error.is_silent and not math.isinf(timeout_s):
                raise WaitTimeoutError(f"{self._name} did not answer within {timeout_s:g} s.") from error
            raise
        return structures.rebuilt(
            answer.header["result"], [jax.numpy.asarray(array) for array in answer.arrays]
        )

    def _add_methods(self, name: str) -> None:
        def method(*args: Any, timeout_in_ms: int = 0) -> StatusOrResult:
            return self.call(name, args, timeout_in_ms=timeout_in_ms)

        def blocking(*args: Any, timeout_in_ms: int = 0) -> Any:
            return self.call(name, args, timeout_in_ms=timeout_in_ms).get_value()

        for suffix, function in (("", method), ("_blocking", blocking)):
            if getattr(type(self), name + suffix, None) is not None:
                continue  # a function named `call`, for example, is reached by call("call")
            function.__name__ = name + suffix
            setattr(self, name + suffix, function)


def _message(header: dict[str, Any], what: str, pytree: Any) -> Message:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(pytree)]
    return Message({**header, what: structures.described(pytree)}, leaves)


def _seconds(timeout_in_ms: Any) -> float:
    if isinstance(timeout_in_ms, bool) or not isinstance(timeout_in_ms, int | float) or timeout_in_ms < 0:
        raise InvalidArgumentError(
            f"timeout_in_ms must be a number of milliseconds, or 0 for no limit; got {timeout_in_ms!r}."
        )
    return timeout_in_ms / 1000


def _check_layer(rpc_layer: str) -> None:
    if rpc_layer not in _LAYERS:
        raise InvalidArgumentError(f"rpc_layer must be {' or '.join(map(repr, _LAYERS))}, got {rpc_layer!r}.")
