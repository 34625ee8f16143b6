"""``Peers``: the other processes of a cluster. All-gathers small values and checks that all run the same programs.

All processes run the same programs in the same order; each program has a position, counted from 0. The processes
compare the next program before it runs for the first time, or for the first time after the previous one.
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
from replicax._src.status.counters import counters
from replicax._src.user_code import user_line

# The time that an error of the devices waits for its cause, the failure of another task.
_REASON_S = 5.0


@final
class Peers:
    """The other processes of a cluster.

    Args:
      channel: The control channel.
      names: The names of all tasks, by number.
      addresses: The addresses of all tasks.
      number: The number of this process.
      timeout_s: The longest wait for processes that are behind.

    Attributes:
      waits: True if the start of a program waits for its results.
    """

    def __init__(self, channel: Channel, membership: Membership, timeout_s: float):
        self._channel, self._timeout_s = channel, timeout_s
        self.names, self.number = membership.names, membership.id_in_cluster
        self.cluster = membership.described
        self._num_gathered: dict[str, int] = {}
        self._num_topics = 0
        self._labels: dict[str, str] = {}  # keyed by the digest of a program
        self._digests: dict[str, str] = {}
        self._orders: set[tuple[str | None, str]] = set()  # pairs of programs that followed each other
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
        """True for process 0, whose initial values all processes take."""
        return self.number == 0

    def new_topic(self, name: str) -> str:
        """Returns an unused topic. All processes must ask for the same number of topics in the same order."""
        self._num_topics += 1
        return f"{name} {self._num_topics}"

    def gather(
        self,
        topic: str,
        value: Any,
        what: str,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Any]:
        """All-gathers ``value``: returns the values of all processes, by number. All call it, in the same order for
        each topic.

        In the thread that runs programs, all processes call it before the same program. A process that skips it, or
        waits in a different one, is a mismatch. Other threads may call it at any time.

        Args:
          topic: The subject of the value. Each thread that gathers needs its own topics.
          value: A value that JSON can hold.
          what: The purpose, for messages.
          is_cancelled: Polled; the wait ends with an error if it returns True.

        Raises:
          ClusterFailureError: A task is gone, has not called it in time, or does something else.
        """
        position = self._position + 1 if self._runs_programs else None
        return self._gathered(topic, value, what, position=position, is_cancelled=is_cancelled)

    @property
    def _runs_programs(self) -> bool:
        """True in the thread whose exchanges and reads are in the sequence of the programs."""
        return threading.get_ident() == self._channel.program_thread and not self._channel.has_threads

    @contextlib.contextmanager
    def reading(self, topic: str) -> Iterator[None]:
        """Wraps a wait for the next batch of a dataset that all processes read together.

        Args:
          topic: The topic of the dataset.
        """
        if not self._runs_programs:
            yield
            return
        self._channel.begin_reading(self._position, topic)
        try:
            yield
        except BaseException:
            self._channel.note_reads(1)  # the end, or an error in place of a batch
            raise
        finally:
            self._channel.end_reading()

    def note_reads(self, num_batches: int) -> None:
        """Counts batches of such datasets that the caller has taken."""
        if self._runs_programs:
            self._channel.note_reads(num_batches)

    def gather_once(self, key: str, value: Any, what: str) -> list[Any]:
        """Like ``gather``, with a key that no other call uses, so that any thread may call it.

        Args:
          key: The key, equal in all processes.
          value: A value that JSON can hold.
          what: The purpose, for messages.

        Raises:
          ClusterFailureError: A task is gone, or has not called it in time.
        """
        return self._channel.gather(key, value, self._timeout_s, what=what)

    def _gathered(self, topic: str, value: Any, what: str, **how: Any) -> list[Any]:
        count = self._num_gathered[topic] = self._num_gathered.get(topic, -1) + 1
        return self._channel.gather(f"{topic} {count}", value, self._timeout_s, what=what, **how)

    def check(self) -> None:
        """Raises the failure of another task, if there is one."""
        self._channel.check()

    @property
    def failure(self) -> ClusterFailureError | None:
        """The failure of another task; None if there is none."""
        return self._channel.failure

    def figures_of_tasks(self) -> list[dict[str, Any]]:
        """Returns the last figures of each task, by number; see ``status/figures.py``. Does not block."""
        return self._channel.figures_of_tasks()

    def tell_of_saving(self, message: Mapping[str, Any]) -> None:
        """Sends a message of ``save_rounds.KINDS`` to the controller. Does not block."""
        self._channel.tell(message)

    def hear_of_saving(
        self, listener: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
    ) -> Callable[[], None]:
        """Passes the controller's messages about saving to ``listener``, in a thread, and sends each value that it
        returns.

        Returns:
          A function that removes the listener.
        """
        self._channel.on_saving += (listener,)

        def end() -> None:
            self._channel.on_saving = tuple(one for one in self._channel.on_saving if one != listener)

        return end

    def agree(self, name: str, text: str) -> str:
        """Checks that all processes are about to run the same program. For known programs it costs nothing.

        Args:
          name: The name of the program, for messages.
          text: The code of the program.

        Returns:
          The program's label.

        Raises:
          ProgramMismatchError: The processes are about to run different programs.
        """
        digest = hashlib.sha256(text.encode()).hexdigest()
        with self._lock:
            return self._labels.get(digest) or self._agree_now(digest, name)

    def _agree_now(self, digest: str, name: str) -> str:
        """Raises unless all processes are about to run this program next."""
        self._channel.note_thread()
        position = self._position + 1
        offer = [digest, name, position, user_line()]
        offers = self._gathered("program", offer, f"to run {name}", position=position, program=name)
        if any(offer[0] != digest or offer[2] != position for offer in offers):
            raise self._mismatch(offers)
        label = self._labels.setdefault(digest, f"#{len(self._labels)} {offers[0][1]}")
        self._digests[label] = digest
        self._orders.add((self._last, label))
        return label

    def _mismatch(self, offers: Sequence[Sequence[Any]]) -> ProgramMismatchError:
        lines = "\n".join(
            f"  {name}: {program}, as program number {position}, code {digest[:12]}, at {at}"
            for name, (digest, program, position, at) in zip(self.names, offers, strict=True)
        )
        return ProgramMismatchError(
            f"The tasks are about to run different programs, which would wait for each other or mix up their values:\n{lines}\n"
            "All tasks must run the same code, of the same version, on batches of the same shapes, and make the same calls of "
            "replicax in the same order. If the names are equal, something in the function differs: a number or shape that "
            "comes from the task, the machine, or unseeded randomness."
        )

    @contextlib.contextmanager
    def running(self, label: str, *, is_new: bool, agrees: bool = False) -> Iterator[None]:
        """Wraps the start of a program, and the wait for its results.

        Args:
          label: The label that ``agree`` returned.
          is_new: True in its first run. Connections that are opened then belong to its collectives.
          agrees: True to agree on it even if it followed the previous program before.

        Raises:
          ClusterFailureError: A task is gone, and had not run this program before. Replaces the error that the devices
            raise.
        """
        with self._lock:
            self._channel.check(self._position + 1)
            if agrees or (self._last, label) not in self._orders:
                self._agree_now(self._digests[label], label.partition(" ")[2])
            self._last = label
            self._channel.note_thread()
            self._position += 1
            self._is_running, is_done = True, False
            counters.programs.begin()
            try:
                self._channel.begin(self._position, label)
                with self.watchdog.learning() if is_new else contextlib.nullcontext():
                    yield
                is_done = self.waits
            except Exception as error:
                failure = self.explain(error)
                if failure is None:
                    raise
                raise failure from (error if tracebacks.is_full() else None)  # the cause is another task
            finally:
                counters.programs.end()
                self._is_running = False
                self._channel.end(is_done)

    def explain(self, error: BaseException) -> ClusterFailureError | None:
        """Returns the failure of another task that caused an error of the devices; None if there is none."""
        failure = self._channel.wait_for_failure(_REASON_S) if jax_compat.is_of_devices(error) else None
        return None if failure is None else again(failure)


_joined: list[Peers] = []


def joined_peers() -> Peers | None:
    """Returns the processes of the cluster that this process has joined; None if it has joined none."""
    return _joined[0] if _joined else None


def note_joined(peers: Peers) -> None:
    """Notes that this process has joined a cluster, which it can do once."""
    _joined.append(peers)
