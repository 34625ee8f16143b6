"""The other processes of a cluster, as programs and datasets see them: values gathered, programs agreed on.

All processes run the same programs in the same order; each has a position, counted from 0. Before a program runs for
the first time, or after another one for the first time, the processes compare which they are about to run.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from replicax._src import jax_compat, tracebacks
from replicax._src.cluster.channel import Channel
from replicax._src.cluster.failures import ClusterFailureError, ProgramMismatchError, again
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.watchdog import Watchdog

# How long an error of the devices waits for the reason: what has happened to another task.
_REASON_S = 5.0


@final
class Peers:
    """What a process has of its cluster.

    Args:
      channel: To the others.
      names: Of all tasks, by number.
      addresses: Of all tasks.
      number: Of this process.
      timeout_s: How long others may be behind.

    Attributes:
      waits: Programs are waited for where they are started.
    """

    def __init__(self, channel: Channel, membership: Membership, timeout_s: float):
        self._channel, self._timeout_s = channel, timeout_s
        self.names, self.number = membership.names, membership.id_in_cluster
        self.cluster = membership.described
        self._num_gathered: dict[str, int] = {}
        self._num_topics = 0
        self._labels: dict[str, str] = {}  # by the digest of a program
        self._digests: dict[str, str] = {}
        self._orders: set[tuple[str | None, str]] = set()  # of two that have followed each other
        self._last: str | None = None
        self._position = -1
        self._lock = threading.RLock()
        self._is_running = False
        self.waits = True
        self.watchdog = Watchdog(lambda: self._is_running)
        channel.on_failure = self.watchdog.unblock

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, whose initial values all take."""
        return self.number == 0

    def new_topic(self, name: str) -> str:
        """A topic that nobody has used. All processes ask for as many, in the same order."""
        self._num_topics += 1
        return f"{name} {self._num_topics}"

    def gather(
        self,
        topic: str,
        value: Any,
        what: str,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Any]:
        """The values of all processes, by number; all call it, in the same order for each topic.

        Args:
          topic: What the value is about: threads that gather have topics of their own.
          value: As JSON has it.
          what: What they wait to do, for messages.
          is_cancelled: Asked now and then; the wait ends, with an error, if so.

        Raises:
          ClusterFailureError: Somebody is gone, or missing for too long.
        """
        return self._gathered(topic, value, what, is_cancelled=is_cancelled)

    def _gathered(self, topic: str, value: Any, what: str, **how: Any) -> list[Any]:
        count = self._num_gathered[topic] = self._num_gathered.get(topic, -1) + 1
        return self._channel.gather(f"{topic} {count}", value, self._timeout_s, what=what, **how)

    def gather_before_program(self, name: str, value: Any) -> list[Any]:
        """As ``gather``, for what all do before the next program: who runs that without it is told, and the others too.

        Args:
          name: What they do, for people.
          value: As JSON has it.

        Raises:
          ClusterFailureError: Somebody is gone, or missing for too long, or has not done it.
        """
        with self._lock:
            offers = self._gathered(name, [value, name], f"for {name}", position=self._position + 1)
            return [offer[0] for offer in offers]

    def check(self) -> None:
        """Raises what has happened to the others, if they cannot go on."""
        self._channel.check()

    @property
    def failure(self) -> ClusterFailureError | None:
        """Why they cannot go on, if so."""
        return self._channel.failure

    def tell_of_saving(self, message: Mapping[str, Any]) -> None:
        """Says something of ``save_rounds.KINDS`` to the controller. Does not block."""
        self._channel.tell(message)

    def hear_of_saving(
        self, listener: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
    ) -> Callable[[], None]:
        """From now on ``listener`` is given, in a thread, what the controller says of that; what it returns is the
        answer.

        Returns:
          What ends this.
        """
        self._channel.on_saving += (listener,)

        def end() -> None:
            self._channel.on_saving = tuple(one for one in self._channel.on_saving if one != listener)

        return end

    def agree(self, name: str, text: str) -> str:
        """Makes sure that all processes are about to run the same program. For known ones it costs nothing.

        Args:
          name: Of the program, for people.
          text: What it does.

        Returns:
          The program's label.

        Raises:
          ProgramMismatchError: They are about to run different ones.
        """
        digest = hashlib.sha256(text.encode()).hexdigest()
        with self._lock:
            return self._labels.get(digest) or self._agree_now(digest, name)

    def _agree_now(self, digest: str, name: str) -> str:
        """All are about to run this program next, or it raises."""
        position = self._position + 1
        offers = self._gathered("program", [digest, name, position], f"to run {name}", position=position)
        if any(offer[0] != digest or offer[2] != position for offer in offers):
            raise self._mismatch(offers)
        label = self._labels.setdefault(digest, f"#{len(self._labels)} {offers[0][1]}")
        self._digests[label] = digest
        self._orders.add((self._last, label))
        return label

    def _mismatch(self, offers: Sequence[Sequence[Any]]) -> ProgramMismatchError:
        lines = "\n".join(
            f"  {name}: {program}, as program number {position}, code {digest[:12]}"
            for name, (digest, program, position) in zip(self.names, offers, strict=True)
        )
        return ProgramMismatchError(
            f"The tasks are about to run different programs, which would wait for each other or mix up their values:\n{lines}\n"
            "All tasks must run the same code, of the same version, on batches of the same shapes, and make the same calls of "
            "replicax in the same order. Where the name is the same, something in the function differs: a number or shape that "
            "comes from the task, the machine, or unseeded randomness."
        )

    @contextlib.contextmanager
    def running(self, label: str, *, is_new: bool) -> Iterator[None]:
        """Around the start of a program, and the wait for it.

        Args:
          label: What ``agree`` returned.
          is_new: Its first run; connections that are made in it are those of collectives.

        Raises:
          ClusterFailureError: Somebody is gone, unless it has left after having run this program; also in place of the
            error that this gives on the devices.
        """
        with self._lock:
            self._channel.check(self._position + 1)
            if (self._last, label) not in self._orders:
                self._agree_now(self._digests[label], label.partition(" ")[2])
            self._last = label
            self._position += 1
            self._is_running, is_done = True, False
            try:
                self._channel.begin(self._position, label)
                with self.watchdog.learning() if is_new else contextlib.nullcontext():
                    yield
                is_done = self.waits
            except Exception as error:
                failure = self.explain(error)
                if failure is None:
                    raise
                raise failure from (error if tracebacks.is_full() else None)  # what failed is another task
            finally:
                self._is_running = False
                self._channel.end(is_done)

    def explain(self, error: BaseException) -> ClusterFailureError | None:
        """What has happened to another task, if that is why the devices gave an error."""
        failure = self._channel.wait_for_failure(_REASON_S) if jax_compat.is_of_devices(error) else None
        return None if failure is None else again(failure)


_joined: list[Peers] = []


def joined_peers() -> Peers | None:
    """The processes of the cluster that this process has joined."""
    return _joined[0] if _joined else None


def note_joined(peers: Peers) -> None:
    """This process has joined a cluster. It can do that once."""
    _joined.append(peers)
