"""``Tasks``: the workers and parameter servers of a cluster as their coordinator reaches them."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from replicax._src.cluster.credentials import Credentials
from replicax._src.parameter_servers.errors import UnavailableError

if TYPE_CHECKING:
    from replicax._src.parameter_servers.transport.transport import TaskClient

log = logging.getLogger("replicax")
_HELLO_S: Final = 5.0
_PAUSE_S: Final = 0.2
_SAY_EVERY_S: Final = 10.0
_BEAT_S: Final = 5.0


@final
@dataclass(frozen=True)
class Share:
    """Who a program is among those that share parameter servers.

    Attributes:
      members: All of them: ``("chief 0", "worker 0")``. The first is the chief, which makes what they share.
      member: Which of them this is.
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
        """What ``hello``, ``beat`` and ``leave`` say of it."""
        return {"member": self.member, "members": list(self.members)}


@final
class Tasks:
    """Addresses and credentials, and one coordinator's time with the tasks that have them.

    Args:
      workers, ps: Addresses, in order.
      credentials: Of all tasks.
      share: Who this is among programs that share the parameter servers; None if this one has them to itself.

    Attributes:
      incarnation: Of this coordinator, random; of programs that share one: see ``join_shared``.
    """

    def __init__(
        self, workers: Sequence[str], ps: Sequence[str], credentials: Credentials, share: Share | None = None
    ):
        self.share = share
        self._addresses = {"worker": tuple(workers), "ps": tuple(ps)}
        self._credentials = credentials
        self.incarnation = uuid.uuid4().hex
        self._closing = threading.Event()
        self._beating: threading.Thread | None = None
        self._leaves = True

    def addresses(self, job: str) -> tuple[str, ...]:
        """Of the tasks of a job."""
        return self._addresses[job]

    def connect(self, job: str, index: int) -> TaskClient:
        """A new client of a task. Does not wait for it."""
        from replicax._src.parameter_servers.transport.transport import TaskClient

        return TaskClient(self._addresses[job][index], self._credentials, f"{job} {index}")

    def greet_ps(self, limit_s: float) -> list[Mapping[str, Any]]:
        """Takes the parameter servers over: what others have there is dropped. Says who is missing while it waits.

        Returns:
          What each tells of itself.

        Raises:
          UnavailableError: Some do not answer.
          UnauthenticatedError: They take other credentials.
        """
        start = time.monotonic()
        clients = [self.connect("ps", index) for index in range(len(self._addresses["ps"]))]
        told: dict[int, Mapping[str, Any]] = {}
        said = start
        try:
            while True:
                why = self._greet_missing(clients, told)
                if len(told) == len(clients):
                    break
                now = time.monotonic()
                missing = [
                    f"ps {i} ({self._addresses['ps'][i]})" for i in range(len(clients)) if i not in told
                ]
                if now - start > limit_s:
                    raise UnavailableError(
                        f"The chief waited {limit_s:g} s for {', '.join(missing)}: {why} Is its server started, with this "
                        "TF_CONFIG and these REPLICAX_TLS settings? REPLICAX_START_TIMEOUT_S sets how long to wait.",
                        missing[0].split(" (")[0],
                    )
                if now - said > _SAY_EVERY_S:
                    said = now
                    log.warning("The chief has waited %.0f s for %s.", now - start, ", ".join(missing))
                time.sleep(_PAUSE_S)
        finally:
            for client in clients:
                client.close()
        return [told[index] for index in range(len(clients))]

    def _greet_missing(self, clients: Sequence[TaskClient], told: dict[int, Mapping[str, Any]]) -> str:
        why = ""
        for index, client in enumerate(clients):
            if index not in told:
                try:
                    told[index] = client.ask("hello", self._hello, _HELLO_S)
                except UnavailableError as error:
                    why = str(error)
        return why

    @property
    def _hello(self) -> dict[str, Any]:
        return {"incarnation": self.incarnation, "ps": list(self._addresses["ps"]), **self._of_share}

    @property
    def _of_share(self) -> dict[str, Any]:
        return {} if self.share is None else self.share.described()

    def start_beating(self) -> None:
        """Lets all tasks know, from now on, that the coordinator is there."""
        self._beating = threading.Thread(target=self._beat, name="replicax-beats", daemon=True)
        self._beating.start()
        # Or it might be asking when Python is gone. Servers that programs share wait for all to leave.
        atexit.register(self.close, leaves=self.share is not None)

    def _beat(self) -> None:
        clients = [
            self.connect(job, index) for job in self._addresses for index in range(len(self._addresses[job]))
        ]
        try:
            while not self._closing.wait(_BEAT_S):
                self._ask_all(clients, "beat")
        finally:
            if self._leaves:
                self._ask_all(clients, "leave")
            for client in clients:
                client.close()

    def _ask_all(self, clients: Sequence[TaskClient], what: str) -> None:
        for client in clients:
            try:
                client.ask(what, {"incarnation": self.incarnation, **self._of_share}, 2.0)
            except Exception as error:
                log.debug("%s", error)  # who uses the server will meet it

    def close(self, timeout_s: float = 5.0, *, leaves: bool = True) -> None:
        """Ends the time with the tasks.

        Args:
          leaves: Whether they are told; otherwise they find out by the silence.
        """
        atexit.unregister(self.close)
        if not self._closing.is_set():
            self._leaves = leaves
        self._closing.set()
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join(timeout_s)
