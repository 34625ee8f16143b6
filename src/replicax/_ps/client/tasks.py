"""``Tasks``: the workers and parameter servers of a cluster, from their coordinator's side."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from replicax._ps.client.wait_rules import Awaited
from replicax._ps.client.waiting import wait_for
from replicax._ps.store.group_rules import View
from replicax._src.program_kit.cluster_tasks import Credentials
from replicax._src.program_kit.errors import UnavailableError

if TYPE_CHECKING:
    from replicax._ps.transport.transport import TaskClient

log = logging.getLogger("replicax")
_ASK_S: Final = 5.0
_BEAT_S: Final = 5.0


@final
@dataclass(frozen=True)
class Share:
    """One program among those that share parameter servers.

    Attributes:
      members: The names of all programs: ``("chief 0", "worker 0")``. The first is the chief, which creates the
        variables.
      member: The name of this program.
    """

    members: Sequence[str]
    member: str

    @property
    def chief(self) -> str:
        return self.members[0]

    @property
    def is_chief(self) -> bool:
        return self.member == self.chief

    def described(self) -> dict[str, Any]:
        """Returns the fields for it in ``hello``, ``heartbeat`` and ``leave``."""
        return {"member": self.member, "members": list(self.members)}


@final
class Tasks:
    """Addresses and credentials of tasks, and one coordinator's session with them.

    Args:
      workers, ps: The addresses, in order.
      credentials: The credentials of all tasks.
      described: The fields about this program in ``hello``, ``heartbeat`` and ``leave``; see ``Share.described``.

    Attributes:
      incarnation: A random session id of this coordinator. Programs that share servers agree on it: see
        ``join_shared``.
    """

    def __init__(
        self,
        workers: Sequence[str],
        ps: Sequence[str],
        credentials: Credentials,
        described: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        self._described = described
        self._addresses = {"worker": tuple(workers), "ps": tuple(ps)}
        self._credentials = credentials
        self.incarnation = uuid.uuid4().hex
        self._closing = threading.Event()
        self._heartbeats: threading.Thread | None = None
        self._leaves = True

    def addresses(self, job: str) -> tuple[str, ...]:
        """The addresses of the tasks of a job."""
        return self._addresses[job]

    def connect(self, job: str, index: int) -> TaskClient:
        """Returns a new client of a task. Does not wait for it."""
        from replicax._ps.transport.transport import TaskClient

        return TaskClient(self._addresses[job][index], self._credentials, f"{job} {index}")

    @contextlib.contextmanager
    def clients(self, *jobs: str) -> Iterator[list[TaskClient]]:
        """Yields new clients of all tasks of these jobs, and closes them at the end."""
        with contextlib.ExitStack() as opened:
            yield [
                opened.enter_context(self.connect(job, index))
                for job in jobs
                for index in range(len(self._addresses[job]))
            ]

    def send_view(self, task: int, view: View, timeout_s: float) -> None:
        """Tells parameter server ``task`` which servers hold a group.

        Raises:
          UnavailableError: It does not answer.
          InvalidArgumentError: It lacks shards that its role needs.
        """
        fields = {
            "incarnation": self.incarnation,
            "view": view.described(),
            "ps": list(self._addresses["ps"]),
        }
        with self.connect("ps", task) as client:
            client.ask("group", fields, timeout_s)

    def greet_ps(self, limit_s: float) -> list[Mapping[str, Any]]:
        """Starts the session with the parameter servers, which drop the variables of others. Logs which ones it waits
        for.

        Returns:
          The answer of each server, in order.

        Raises:
          UnavailableError: Some do not answer.
          UnauthenticatedError: They have other credentials.
        """
        told: dict[int, Mapping[str, Any]] = {}
        with self.clients("ps") as clients:

            def missing() -> Awaited | None:
                lacking = ask_each(clients, "hello", self._hello, told)
                return self.awaited(lacking) if lacking else None

            wait_for(missing, "The chief", limit_s)
        return [told[index] for index in range(len(told))]

    def awaited(self, lacking: Mapping[int, str]) -> Awaited:
        """Describes the parameter servers that do not answer; ``lacking`` has the reasons."""
        names = [f"ps {index} ({self._addresses['ps'][index]})" for index in lacking]
        first, why = next(iter(lacking.items()))
        return Awaited(
            ", ".join(names),
            f"{why} Check that its server runs, with this TF_CONFIG and these REPLICAX_TLS settings.",
            f"ps {first}",
        )

    @property
    def _hello(self) -> dict[str, Any]:
        return {"incarnation": self.incarnation, "ps": list(self._addresses["ps"]), **self._described}

    def start_heartbeats(self, *, leaves_at_exit: bool = False) -> None:
        """Starts to send heartbeats to all tasks.

        Args:
          leaves_at_exit: True if the tasks wait until this program has left, because others use them, too.
        """
        self._heartbeats = threading.Thread(target=self._heartbeat, name="replicax-heartbeats", daemon=True)
        self._heartbeats.start()
        # A heartbeat must not run during Python's shutdown.
        atexit.register(self.close, leaves=leaves_at_exit)

    def _heartbeat(self) -> None:
        with self.clients(*self._addresses) as clients:
            while not self._closing.wait(_BEAT_S):
                self._ask_all(clients, "heartbeat")
            if self._leaves:
                self._ask_all(clients, "leave")

    def _ask_all(self, clients: Sequence[TaskClient], what: str) -> None:
        for client in clients:
            try:
                client.ask(what, {"incarnation": self.incarnation, **self._described}, 2.0)
            except Exception as error:
                log.debug("%s", error)  # the next user of the server gets the error

    def close(self, timeout_s: float = 5.0, *, leaves: bool = True) -> None:
        """Ends the session with the tasks.

        Args:
          timeout_s: The longest wait for the heartbeat thread.
          leaves: True to tell the tasks; otherwise they notice the silence.
        """
        atexit.unregister(self.close)
        if not self._closing.is_set():
            self._leaves = leaves
        self._closing.set()
        if self._heartbeats is not None and self._heartbeats is not threading.current_thread():
            self._heartbeats.join(timeout_s)


def ask_each(
    clients: Sequence[TaskClient], what: str, fields: Mapping[str, Any], told: dict[int, Mapping[str, Any]]
) -> dict[int, str]:
    """Asks the tasks that are not in ``told``, and adds their answers to it. Returns the errors of the others."""
    lacking: dict[int, str] = {}
    for index, client in enumerate(clients):
        if index not in told:
            try:
                told[index] = client.ask(what, fields, _ASK_S)
            except UnavailableError as error:
                lacking[index] = str(error)
    return lacking
