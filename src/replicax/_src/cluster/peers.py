"""``Peers``: the other processes of a cluster. All-gathers small values and checks that all run the same programs.

All processes run the same programs in the same order; each program has a position, counted from 0. The processes
compare the next program before it runs for the first time, or for the first time after the previous one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from replicax._src.cluster.admission import Admission
from replicax._src.cluster.channel import Channel
from replicax._src.cluster.counters import counters
from replicax._src.cluster.failures import ClusterFailureError, ProgramMismatchError, again
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.watchdog import Watchdog
from replicax._src.control.dated_keys import DatedKeys
from replicax._src.control.dates import first_at, position_in_words
from replicax._src.control.standing import Moment, Topic
from replicax._src.jax_internals import jax_compat
from replicax._src.user import tracebacks
from replicax._src.user.user_code import user_line

# The time that an error of the devices waits for its cause, the failure of another task.
_REASON_S = 5.0


@final
class Peers:
    """The other processes of a cluster.

    If failures are tolerated, the live processes are its *members*, and only they gather and compare. Programs are then
    of this process alone: a step goes through ``stepping`` instead of ``running``. The fault tolerance, a layer above,
    sets ``at_end``, and ``on_end`` and ``serve`` of the channel.

    Args:
      channel: The control channel.
      membership: The tasks, and the task of this process.
      timeout_s: The longest wait for processes that are behind.

    Attributes:
      channel: The control channel.
      names: The names of all tasks, by number.
      number: The number of this process.
      cluster: The cluster in words.
      waits: True if the start of a program waits for its results.
      at_end: A function that is called before this process leaves the cluster, unless it ends with an error. It agrees
        with the others on the end, and its waits are bounded.
      admission: The way by which replacements of dead processes enter. None if failures are not tolerated.
    """

    def __init__(self, channel: Channel, membership: Membership, timeout_s: float):
        self.channel = self._channel = channel
        self._timeout_s = timeout_s
        self.names, self.number = membership.names, membership.id_in_cluster
        self.cluster = membership.described
        self._keys = DatedKeys(is_dated=channel.min_workers is not None)
        self._labels: dict[str, str] = {}  # keyed by the digest of a program
        self._digests: dict[str, str] = {}
        self._orders: set[tuple[str | None, str]] = set()  # pairs of programs that followed each other
        self._last: str | None = None
        self._position = -1
        self._lock = threading.RLock()
        self._is_running = False
        self.waits = True
        self.at_end: Callable[[], None] = lambda: None
        self.admission: Admission | None = None
        self._exit: SystemExit | None = None
        self.watchdog = Watchdog(lambda: self._is_running)
        channel.on_failure = self.watchdog.unblock

    def __len__(self) -> int:
        """Returns the number of all tasks, those that are gone included."""
        return len(self.names)

    @property
    def min_workers(self) -> int | None:
        """The fewest live processes that continue after a failure. None if failures are not tolerated."""
        return self._channel.min_workers

    @property
    def tolerates_failures(self) -> bool:
        """True if the live processes continue after a failure."""
        return self._channel.min_workers is not None

    def serve(self) -> None:
        """Answers the other processes after a failure, in the training thread; elsewhere it does nothing. Call it where
        that thread waits for something else than an all-gather.
        """
        self._channel.serve_here()

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the live processes that take part in all-gathers, ascending. If failures are not tolerated,
        those of all.

        A newcomer takes part from the first step on that it commits. Until then it is *solo*: the only one here.
        """
        if self.is_solo:
            return (self.number,)
        standing = self._channel.standing
        return (standing is not None and standing.participants) or self._channel.members

    @property
    def is_solo(self) -> bool:
        """True in a newcomer that has not committed a step. Its all-gathers return its own value at once."""
        return self.moment().is_solo

    def moment(self) -> Moment:
        """Returns the present moment, for all-gathers that belong to it and are made later, in another thread.

        Call it in the training thread.
        """
        return self._channel.moment

    @property
    def last_entry(self) -> int | None:
        """The version with which the last newcomer entered that has committed a step; None if there is none. Equal in
        all processes that take part.
        """
        standing = self._channel.standing
        return None if standing is None else standing.last_entry

    @property
    def is_leader(self) -> bool:
        """True for the process with the lowest number that takes part, whose initial values all processes take. If
        failures are tolerated, another process becomes it when this one dies. False in a process that is solo.
        """
        return not self.is_solo and self.number == self.members[0]

    def new_topic(self, name: str) -> Topic:
        """Returns an unused topic, dated now. All processes must ask for the same number of topics in the same order.

        A topic of a process that is solo stays its own: its all-gathers return its own value.
        """
        return self._keys.new_topic(name, self.moment())

    def state_for_newcomers(self) -> dict[str, Any]:
        """Returns what a newcomer needs to know of the agreements of this process, as JSON."""
        with self._lock:
            return {"programs": dict(self._labels)}

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Takes in a newcomer what ``state_for_newcomers`` has returned in the process that gives it the state."""
        with self._lock:
            self._labels = dict(state["programs"])
            self._digests = {label: digest for digest, label in self._labels.items()}

    def gather(
        self,
        topic: str | Topic,
        value: Any,
        what: str,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> GatheredValues:
        """All-gathers ``value``: returns the values of all live processes, by number. All call it, in the same order
        for each topic.

        In the thread that runs programs, all processes call it before the same program. A process that skips it, or
        waits in a different one, is a mismatch. Other threads may call it at any time, with a topic of ``new_topic``.

        If failures are tolerated, it has a date: that of its topic, or the present one.

        Args:
          topic: The subject of the value. Each thread that gathers needs its own topics.
          value: A value that JSON can hold.
          what: The purpose, for messages.
          is_cancelled: Polled; the wait ends with an error if it returns True.

        Raises:
          ClusterFailureError: A task is gone, has not called it in time, or does something else.
        """
        position = self._next_position if self._runs_programs else None
        return self._gathered(topic, value, what, position=position, is_cancelled=is_cancelled)

    def end(self) -> None:
        """Agrees on the end with the other live processes: calls ``at_end``. A process that runs another step instead
        is a mismatch, as it is for an all-gather. A newcomer that has not entered only calls ``at_end``.
        """
        moment = self.moment()
        if not moment.is_solo:
            position = self._next_position
            self._channel.announce("end", what="to end", position=position, date=moment.date)
        self.at_end()

    def note_exit(self, error: SystemExit) -> None:
        """Notes that ``sys.exit()`` ends a loop of steps, in which the others still need this process."""
        self._exit = error

    @property
    def exit_inside_of_loop(self) -> SystemExit | None:
        """The ``sys.exit()`` that ended the last loop of steps; None if none did, or the program continued."""
        return self._exit

    @property
    def position(self) -> int:
        """The position of the last program that has begun."""
        return self._position

    @property
    def _next_position(self) -> int:
        """The position of the next program."""
        return max(self._position + 1, first_at(self.moment().date))

    @property
    def _runs_programs(self) -> bool:
        """True in the thread whose exchanges and reads are in the sequence of the programs."""
        return threading.get_ident() == self._channel.program_thread and not self._channel.has_threads

    @contextlib.contextmanager
    def reading(self, topic: Topic) -> Iterator[None]:
        """Wraps a wait for the next batch of a dataset that all processes read together.

        Args:
          topic: The topic of the dataset.
        """
        if not self._runs_programs:
            yield
            return
        name = "" if topic.moment.is_solo else topic.name
        self._channel.begin_reading(self._next_position - 1, name)
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

    def gather_once(self, key: str, value: Any, what: str, since: Moment | None = None) -> GatheredValues:
        """Like ``gather``, with a key that no other call uses, so that any thread may call it.

        Args:
          key: The key, equal in all processes.
          value: A value that JSON can hold.
          what: The purpose, for messages.
          since: The moment to which it belongs; None for the present one, in the training thread.

        Raises:
          ClusterFailureError: A task is gone, or has not called it in time.
        """
        moment = since or self.moment()
        if moment.is_solo:
            return self._own(value)
        return self._channel.gather(key, value, self._timeout_s, what=what, date=moment.date)

    def _gathered(self, topic: str | Topic, value: Any, what: str, **how: Any) -> GatheredValues:
        moment = self.moment() if isinstance(topic, str) else topic.moment
        if moment.is_solo:
            return self._own(value)
        key = self._keys.next(topic, moment)
        return self._channel.gather(key, value, self._timeout_s, what=what, date=moment.date, **how)

    def _own(self, value: Any) -> GatheredValues:
        """Returns the values of an all-gather that only this process makes, as they would come from the controller."""
        self._channel.check()
        self._channel.serve_here()
        return GatheredValues([json.loads(json.dumps(value))], (self.number,), self.names, self.number)

    def check(self) -> None:
        """Raises the failure of another task, if there is one."""
        self._channel.check()

    @property
    def failure(self) -> ClusterFailureError | None:
        """The failure of another task; None if there is none."""
        return self._channel.failure

    def figures_of_tasks(self) -> list[dict[str, Any]]:
        """Returns the last figures of each task, by number; see ``cluster/figures.py``. Does not block."""
        return self._channel.figures_of_tasks()

    def forget_figures(self) -> None:
        """Notes that another process shows the figures of all tasks from now on."""
        self._channel.forget_figures()

    def send_about_saving(self, message: Mapping[str, Any]) -> None:
        """Sends a message of ``save_rounds.KINDS`` or ``boundary_saves.KINDS`` to the controller. Does not block."""
        self._channel.tell(message)

    def listen_for_saving(
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

    def check_reached(self) -> None:
        """Raises the failure of another task, if this process's last program needed that task.

        Raises:
          ClusterFailureError: It did. A task that ended after it had run that program is none.
        """
        failure = self._channel.failure_here
        if failure is not None:
            raise again(failure)

    @property
    def is_cut_off(self) -> bool:
        """True if the connection to the controller has ended."""
        return self._channel.is_lost

    def wait_for_failure(self, timeout_s: float) -> ClusterFailureError | None:
        """Waits for the failure of another task, and returns it; None if there is none in time."""
        return self._channel.wait_for_failure(timeout_s)

    def hold_end(self, is_saving: Callable[[], bool]) -> None:
        """Keeps the watchdog from ending this process while ``is_saving`` returns True, and tells the launcher."""
        self.watchdog.is_held = is_saving
        self._channel.note_saving(is_saving)

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
        position = self._next_position
        offer = [digest, name, position, user_line()]
        offers = self._gathered("program", offer, f"to run {name}", position=position, program=name)
        if any(offer[0] != digest or offer[2] != position for offer in offers):
            raise self._mismatch(offers)
        label = self._labels.setdefault(digest, f"#{len(self._labels)} {offers[0][1]}")
        self._digests[label] = digest
        self._orders.add((self._last, label))
        return label

    def _mismatch(self, offers: GatheredValues) -> ProgramMismatchError:
        lines = "\n".join(
            f"  {name}: {program}, as program number {position_in_words(position)}, code {digest[:12]}, at {at}"
            for name, (digest, program, position, at) in offers.named()
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
            self._channel.check(self._next_position)
            if agrees or (self._last, label) not in self._orders:
                self._agree_now(self._digests[label], label.partition(" ")[2])
            self._last = label
            self._channel.note_thread()
            self._position = self._next_position
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

    @contextlib.contextmanager
    def stepping(self, name: str) -> Iterator[None]:
        """Wraps a step that the live processes compute together, if failures are tolerated: all its attempts, once.

        The controller then knows where this process is: it names processes that run different steps, and ends the run
        if one of them takes too long. If the run fails while a step runs, and the step does not end, this process ends.

        Args:
          name: The name of the step, the same in all processes.

        Raises:
          ClusterFailureError: The run has failed.
        """
        self._channel.check()
        self._channel.note_thread()
        self._position, self._exit = self._next_position, None
        self._is_running = True
        try:
            self._channel.begin(self._position, f"step {name}")
            yield
        finally:
            self._is_running = False
            self._channel.end(is_done=True)

    def explain(self, error: BaseException) -> ClusterFailureError | None:
        """Returns the failure of another task that caused an error of the devices; None if there is none."""
        if self.tolerates_failures or not jax_compat.is_of_devices(error):
            return None  # if failures are tolerated, no program needs another task
        failure = self._channel.wait_for_failure(_REASON_S)
        return None if failure is None else again(failure)


_joined: list[Peers] = []


def joined_peers() -> Peers | None:
    """Returns the processes of the cluster that this process has joined; None if it has joined none."""
    return _joined[0] if _joined else None


def note_joined(peers: Peers) -> None:
    """Notes that this process has joined a cluster, which it can do once."""
    _joined.append(peers)
