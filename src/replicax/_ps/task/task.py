"""``Server``: one task of a cluster with parameter servers, in this process. Public as ``rx.Server``."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, final

import jax

from replicax._ps.task.server_def import ServerDef, ServerOptions
from replicax._ps.task.service import Host, TaskService
from replicax._ps.task.session_rules import TaskSession
from replicax._src.program_kit.cluster_tasks import ClusterDef, ClusterSpec, Credentials
from replicax._src.program_kit.errors import ContextError, InvalidArgumentError
from replicax._src.program_kit.own_process import (
    end_beside_programs,
    export_platform,
    prepare_own_process,
    vitals,
)

if TYPE_CHECKING:
    from replicax._ps.transport.transport import TaskServer

_log = logging.getLogger(__name__)
_TICK_S: Final = 0.1
_LAST_WORDS_S: Final = 0.05
_STOP_TIMEOUT_S: Final = 10.0


@final
class Server:
    """A worker or a parameter server, without any code of the user's: ``tf.distribute.Server``.

    It serves the coordinator on threads of its own until it is stopped. One process may have several servers. If
    ``TF_CONFIG`` says that this process is this task, JAX is configured for it (threads, the CPU for a ps, a cache
    of compiled programs), unless JAX has started. ``replicax server`` does that too.

    Args:
      server_or_cluster_def: The cluster: a ClusterSpec, a ClusterDef or a dict of jobs; or a ServerDef.
      job_name: ``worker`` or ``ps``. None for that of the ServerDef, or the only job.
      task_index: The index of the task. None for that of the ServerDef, or the only task of the job.
      protocol: ``grpc`` or ``grpc+tls``. If the credentials have a certificate, TLS is always used.
      config: A ``ServerOptions``, where TensorFlow takes a ConfigProto.
      start: False to start it later with ``start()``.

    Raises:
      InvalidArgumentError: An argument is missing, or not allowed.
      ClusterError: The cluster is invalid, or does not have this task.
      UnavailableError: It cannot listen at its address.
      SnapshotError: It has snapshots, but none can be read.
      MissingExtraError: xxhash or cloudpickle is not installed; the extra ``ps`` has both.
    """

    def __init__(
        self,
        server_or_cluster_def: ServerDef
        | ClusterSpec
        | ClusterDef
        | Mapping[str, Sequence[str] | Mapping[int, str]],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: ServerOptions | None = None,
        start: bool = True,
    ):
        if config is not None and not isinstance(config, ServerOptions):
            raise InvalidArgumentError(
                f"config must be an rx.ServerOptions, got {type(config).__name__}. Use JAX's own settings for "
                "the devices that a ConfigProto would configure."
            )
        self._options = ServerOptions() if config is None else config
        self._server_def = ServerDef.of(server_or_cluster_def, job_name, task_index, protocol)
        self._credentials = self._options.credentials or Credentials.from_environment(os.environ)
        if self._server_def.protocol == "grpc+tls" and not self._credentials.uses_tls:
            raise InvalidArgumentError(
                "protocol='grpc+tls' needs a certificate and its key: set REPLICAX_TLS_CERTIFICATE and "
                "REPLICAX_TLS_KEY, or give Credentials in rx.ServerOptions."
            )
        self._host: Host | None = None
        self._service: TaskService | None = None
        self._transport: TaskServer | None = None
        self._is_stopped = False
        self._is_over = threading.Event()
        self._is_ending = threading.Event()
        self._lock = threading.Lock()
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: ServerOptions | None = None, start: bool = True) -> Server:
        """Makes a single worker at a free port of this machine. ``target`` has its address.

        TensorFlow makes a job named ``local`` instead, to which a Session connects.
        """
        return Server({"worker": ["localhost:0"]}, config=config, start=start)

    @property
    def server_def(self) -> ServerDef:
        """The cluster and the task of this server."""
        return self._server_def

    @property
    def target(self) -> str:
        """The address at which it listens: ``grpc://localhost:2222``. Once started, it has the actual port in place
        of 0.
        """
        address = self._server_def.address if self._transport is None else self._transport.address
        return f"{'grpc+tls' if self._credentials.uses_tls else 'grpc'}://{address}"

    def start(self) -> None:
        """Starts the server, which listens when this returns. Does nothing if it has been started.

        Raises:
          ContextError: It has been stopped; make another one.
          UnavailableError: It cannot listen at its address.
        """
        with self._lock:
            if self._is_ending.is_set():
                raise ContextError("Server.start(): this Server has been stopped. Make another one.")
            if self._transport is not None:
                return
            from replicax._ps.task.work import host_of
            from replicax._ps.transport.transport import TaskServer

            definition = self._server_def
            prepare_own_process(definition.cluster, definition.task)
            self._host = host_of(definition, self._options, self._credentials)
            session = TaskSession(
                str(definition.task),
                self._options.silence_timeout_s,
                time.monotonic(),
                self._options.wait_timeout_s,
                ends_with_coordinator=self._options.on_coordinator_loss == "exit",
            )
            self._service = TaskService(
                definition.task, self._host, about_this_process(), session, self._measured
            )
            transport = TaskServer(definition.address, self._service.answer, self._credentials)
            transport.start()
            self._transport = transport
        threading.Thread(target=self._watch, name=f"replicax-{definition.task}", daemon=True).start()
        atexit.register(self.stop)

    def join(self) -> None:
        """Serves until the process ends. As in TensorFlow, no code of the main thread runs after it, except after
        ``stop``.

        At SIGTERM the server ends in order: a parameter server writes its last snapshot, and connections are closed.
        Then the main thread exits with code 143, so that ``finally`` blocks and ``atexit`` functions run. If the server
        ends without a signal, because ``config`` says so when no coordinator is there, the exit code is 0. In another
        thread ``join`` returns when the server has ended, and does not handle SIGTERM.

        Raises:
          ContextError: It has not been started.
          SystemExit: The server has ended, in the main thread, and nobody has called ``stop``.
        """
        if self._service is None:
            raise ContextError("Server.join(): this Server has not been started. Call start() first.")
        with _at_sigterm(self._service.is_to_stop.set) as has_come:
            try:
                # Wait in short intervals: a signal may arrive in another thread, and wakes only that one.
                while not self._is_over.wait(_TICK_S):
                    pass
            except BaseException:  # Ctrl-C
                self.stop()
                raise
        is_main = threading.current_thread() is threading.main_thread()
        # The rest of a script is the coordinator's, so it does not run here.
        if has_come.is_set() or (is_main and not self._is_stopped):
            code = 128 + signal.SIGTERM if has_come.is_set() else 0
            if self._transport is not None and self._transport.statistics()["streams"]:
                end_beside_programs(code)
            sys.exit(code)

    def stop(self) -> None:
        """Ends the server within seconds: closes its connections and drops the coordinator's data. ``join`` returns."""
        self._is_stopped = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            is_first = not self._is_ending.is_set()
            self._is_ending.set()
        if is_first:
            try:
                if self._transport is not None and self._service is not None and self._host is not None:
                    self._service.is_to_stop.set()
                    self._transport.shutdown()
                    self._host.close()
                    self._service.close()
            finally:
                atexit.unregister(self.stop)
                self._is_over.set()
        self._is_over.wait(_STOP_TIMEOUT_S)

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of its connections and of its work, with the session id of its coordinator."""
        if self._transport is None or self._service is None:
            return {}
        return {
            "task": str(self._server_def.task),
            **self._transport.statistics(),
            **self._service.statistics(),
        }

    def close(self) -> None:
        """Calls ``stop``."""
        self.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # --- threads ------------------------------------------------------------------------------------------

    def _measured(self) -> dict[str, Any]:
        transport = self._transport
        return {**vitals(), "transport": {} if transport is None else transport.statistics()}

    def _watch(self) -> None:
        """Lets the time pass in the coordinator's session until the task must stop."""
        assert self._service is not None
        while not self._service.is_to_stop.wait(_TICK_S):
            end = self._service.watch(time.monotonic())
            if end is not None:
                _log.warning("%s: %s; exiting.", self._server_def.task, end.why)
                break
        time.sleep(_LAST_WORDS_S)  # the client that asked it to stop gets its answer
        self._end()


def about_this_process() -> dict[str, Any]:
    """Returns the properties of this process that a coordinator needs to export programs. Starts JAX's backend."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {
        "versions": versions,
        "num_devices": jax.local_device_count(),
        "platform": export_platform(),
        "pid": os.getpid(),
    }


@contextlib.contextmanager
def _at_sigterm(call: Callable[[], None]) -> Iterator[threading.Event]:
    """Calls ``call`` at SIGTERM, and sets the event, if the signal would otherwise end the process. It works in the
    main thread only.
    """
    has_come = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield has_come
        return

    def notice(number: int, frame: FrameType | None) -> None:
        has_come.set()
        call()

    signal.signal(signal.SIGTERM, notice)
    try:
        yield has_come
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
