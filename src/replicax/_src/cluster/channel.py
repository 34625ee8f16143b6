"""The control channel of one process: sends heartbeats, all-gathers values, and learns which tasks are gone.

See controller.py for the rules.

If failures are tolerated (``min_workers``), the messages about epochs belong to the *owner*: the thread that made the
channel. ``epoch_member.py`` has the rules. The channel's thread queues them, re-sends the offers of all-gathers that
wait, and tells ``on_end`` at once which epochs have ended.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from replicax._src.cluster.control_messages import connect, receive, send
from replicax._src.cluster.failures import (
    ClusterFailureError,
    ClusterStartError,
    PeerFailureError,
    again,
    describe_status,
    gone_error,
    lost_error,
    mismatch_error,
    stall_text,
    timeout_error,
)
from replicax._src.cluster.figures import figures
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.occupants import describe_other_program, occupant_of
from replicax._src.cluster.status_file import GIVEN_UP, RAISED, SAVING, STATUS_FILE_VARIABLE, StatusFile
from replicax._src.control.dates import first_at
from replicax._src.control.epoch_member import Offers
from replicax._src.control.epochs import ALL_EPOCHS
from replicax._src.control.moments import next_moment
from replicax._src.control.standing import Moment, Standing
from replicax._src.drawing.text import printable_lines
from replicax._src.user.user_code import user_line, user_line_of_callback, user_line_of_thread
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import ForeignPeerError, OtherProgramError, PeerEndedError, TokenError
from replicax._src.wire.security import Security

log = logging.getLogger("replicax")
_STATUS_FILE_S = 0.5
_RETRY_S = 0.1
_ANSWER_S = 10.0  # three round trips: two to authenticate each other, one to join
EARLIER_RUN_S = 35.0
"""The time for which the controller of an earlier run, with another token, may still be at the address."""
_LOOK_AT_PROGRAM_S = 1.0
_TAKE_MESSAGE_S = 10.0
_LOOK_S = 0.2
# The interval at which the idle thread checks whether the process leaves.
_WAKE_S = 0.25
_NO_PROGRAM = -2  # below every position, also that of a process that has run no program
_NEXT_EPOCH = "next epoch"  # the key of the controller's reminders of reports


def _may_be_of_other_program(trouble: object) -> bool:
    return isinstance(trouble, TimeoutError | PeerEndedError | OtherProgramError | ConnectionResetError)


class _RefusedForNow(Exception):
    """The controller belongs to an earlier run, which is ending."""


@final
class Channel:
    """A connection to the controller, with a thread that listens and sends heartbeats.

    Args:
      membership: The tasks, and the task of this process. The controller is at the leader's address.
      security: The secrets that both sides must present.
      silence_s: The seconds without a message after which the controller counts as gone.
      stall_s: The seconds of waiting after which the log names the missing tasks.
      min_workers: If the live tasks continue after a failure: the fewest with which they do. None if they do not.

    Attributes:
      is_lost: True once the controller has ended the connection, or has been silent for too long.
      members: The numbers of the live tasks: those of the newest epoch. All tasks, if failures are not tolerated.
      is_newcomer: True if the run had begun when this process joined: it replaces one that is gone.
      standing: Where this process stands among the others, which the owner sets. None before that, and if failures are
        not tolerated: the date is 0, and all take part.
      epoch_messages: The messages for the owner, in their order: those of the kinds ``form``, ``end``, ``waits``,
        ``over``, ``lost`` and ``given_up``. None means that the connection has ended.
      on_end: A function that ends an epoch and all earlier ones, without blocking. The channel's thread calls it, at
        once. It gets ``ALL_EPOCHS`` when the run has failed, or the connection has ended.
      serve: A function that takes the queued messages; None if there is none yet. ``gather`` calls it in the owner,
        while it waits.
      program_thread: The thread that ran the last program, at first the thread that made this object.
      has_threads: True once several threads have run programs, or one runs them and another has made exchanges before.
        Then exchanges and reads have no common order with programs.
    """

    def __init__(
        self,
        membership: Membership,
        security: Security,
        *,
        silence_s: float = 60.0,
        stall_s: float = 60.0,
        min_workers: int | None = None,
    ):
        self._address, self._number = membership.leader_address, membership.id_in_cluster
        self._names, self._cluster = membership.names, membership.described
        self.min_workers = min_workers
        self.members: tuple[int, ...] = tuple(range(len(self._names)))
        self.is_newcomer = False
        self.standing: Standing | None = None
        self.epoch_messages: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self.on_end: Callable[[int], None] = lambda epoch: None
        self.serve: Callable[[], None] | None = None
        self._owner = threading.get_ident()
        self._offers = Offers()
        self._epoch = 0
        self._is_out = False  # True once the others continue without this process
        self._has_run_failed = False  # for all tasks
        self._is_over = False  # True once all tasks have agreed on the end
        self._silence_s, self._stall_s = silence_s, stall_s
        self._security = security
        self._connection: Connection | None = None
        self._changed = threading.Condition()
        self._gathered: dict[str, GatheredValues] = {}
        self._missing: dict[str, dict[int, Any]] = {}
        self._twins: list[int] = []
        self._failure: ClusterFailureError | None = None
        self._last_common = _NO_PROGRAM
        self._done = _NO_PROGRAM
        self._is_closed = False
        self.is_lost = False
        self.program_thread = threading.get_ident()
        self.has_threads = False
        self._is_ordered = False  # True once the program thread has run a program or made an ordered exchange
        self._status: dict[str, Any] = {"position": -1, "program": None, "doing": "starting"}
        self._reads = self._num_programs = 0
        self._reading: tuple[int, int, str] | None = None
        self._left_at: float | None = None
        self._has_raised = False
        self._is_saving: Callable[[], bool] = lambda: False
        self._status_file = StatusFile(os.environ.get(STATUS_FILE_VARIABLE))
        self._last_status: dict[str, Any] | None = None
        self._figures: list[dict[str, Any]] = []
        self._is_watching = False
        self._thread = threading.Thread(target=self._listen, name="replicax-channel", daemon=True)
        self.on_failure: Callable[[ClusterFailureError], None] = lambda failure: None
        self.on_saving: tuple[Callable[[Mapping[str, Any]], Mapping[str, Any] | None], ...] = ()

    # --- life ---------------------------------------------------------------------------------------

    def connect(self, deadline: float) -> dict[str, Any]:
        """Joins the cluster, once the controller is there.

        Args:
          deadline: The time to give up, on the clock of ``time.monotonic``.

        Returns:
          The welcome of the controller.

        Raises:
          ClusterStartError: The controller did not answer in time, or refuses. It waits while an earlier run is ending.
        """
        started = reminded = foreign_until = time.monotonic()
        trouble: object = "not tried"
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise self._not_connected(now - started, trouble)
            if now - reminded >= 10:
                reminded = now
                log.warning(
                    "Has been waiting %.0f s for %s at %s: %s.",
                    now - started,
                    self._names[0],
                    self._address,
                    self._described(trouble),
                )
            try:
                self._connection, welcome = self._joined(min(deadline, now + _ANSWER_S))
                break
            except TokenError as error:
                trouble = error
                if (
                    now - started > EARLIER_RUN_S
                ):  # before that, an earlier run with another token may be ending there
                    raise self._not_connected(now - started, trouble) from error
                time.sleep(_RETRY_S)
            except (OSError, _RefusedForNow) as error:
                is_cut_short = isinstance(error, TimeoutError) and deadline - now < _ANSWER_S
                if not (is_cut_short and isinstance(trouble, (ForeignPeerError, TokenError, _RefusedForNow))):
                    trouble = error  # otherwise the last answer says more
                if not isinstance(trouble, OtherProgramError):
                    foreign_until = time.monotonic()
                elif (
                    now - foreign_until > EARLIER_RUN_S
                ):  # worker 0 cannot listen there while this program does
                    raise self._not_connected(now - started, trouble) from error
                time.sleep(_RETRY_S)
        self.is_newcomer = welcome["epoch"] > 0
        self._thread.start()
        return welcome

    def _not_connected(self, waited_s: float, trouble: object) -> ClusterStartError:
        if isinstance(trouble, TokenError):
            return ClusterStartError(
                f"The token of {self._me} does not match that of {self._names[0]} at {self._address}: {trouble}. Give all tasks "
                "of the cluster the same token (REPLICAX_TOKEN). If another job listens there, choose another port in TF_CONFIG, "
                "on all tasks."
            )
        more_time = "allow more time with REPLICAX_START_TIMEOUT_S."
        if isinstance(trouble, _RefusedForNow):
            return ClusterStartError(
                f"{self._me} waited {waited_s:.0f} s for an earlier run of the job to end. {self._names[0]} at "
                f"{self._address} answers: {trouble} Or {more_time}"
            )
        described = str(trouble)
        if _may_be_of_other_program(trouble):
            occupant = occupant_of(self._address, _LOOK_AT_PROGRAM_S)
            if occupant.answers:
                return ClusterStartError(
                    f"Another program has the address of {self._names[0]}, {self._address}: {occupant.text}. {self._me} waited "
                    f"{waited_s:.0f} s for {self._names[0]} there. Stop that program, or choose another port in TF_CONFIG, on "
                    "all tasks."
                )
            described = f"{trouble}; {occupant.text}"
        return ClusterStartError(
            f"{self._me} waited {waited_s:.0f} s for {self._names[0]}, which does not answer at {self._address} "
            f"({described}). "
            "Start it, check the address and that the port is open between the machines (replicax doctor), or "
            f"{more_time}"
        )

    def _described(self, trouble: object) -> str:
        """Returns in words why the controller does not answer, and which other program does."""
        if not _may_be_of_other_program(trouble):
            return str(trouble)
        return f"{trouble}; {describe_other_program(self._address, _LOOK_AT_PROGRAM_S)}"

    def _joined(self, deadline: float) -> tuple[Connection, dict[str, Any]]:
        """Returns a connection that the controller has accepted, and its welcome."""
        connection = connect(self._address, self._security, deadline)
        try:
            hello = {"kind": "hello", "member": self._number, "cluster": self._cluster}
            send(connection, {**hello, "min_workers": self.min_workers}, deadline)
            answer = receive(connection, deadline)
            if answer["kind"] == "refused" and answer["is_temporary"]:
                raise _RefusedForNow(printable_lines(answer["text"]))
            if answer["kind"] == "refused":
                text = printable_lines(answer["text"])
                raise ClusterStartError(f"{self._names[0]} at {self._address} refuses {self._me}: {text}")
            if answer["kind"] != "welcome":
                raise ForeignPeerError("no job has begun there; does replicax doctor run on that machine?")
            return connection, answer
        except BaseException:
            connection.close()
            raise

    def leave(self) -> None:
        """Announces an orderly end of this process, unless an error was announced, and closes the connection."""
        if self._connection is None or self._is_closed:
            return
        self._note_end()
        self._send({"kind": "left", "status": {**self._status, "done": self._done}})
        self._is_closed = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)
        self._connection.close()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Sends a message of ``save_rounds.KINDS``, ``boundary_saves.KINDS`` or ``epochs.KINDS`` to the controller.

        The controller's messages about saving go to each listener of ``on_saving``, in the channel's thread. Each
        value that a listener returns is sent as its answer.
        """
        self._send(dict(message))

    def figures_of_tasks(self) -> list[dict[str, Any]]:
        """Returns the last figures of each task, by number, with its name and state. The controller sends them from the
        first call on.
        """
        if not self._is_watching:
            self._is_watching = True
            self._figures = [{"task": name, "state": "awaited"} for name in self._names]
            self._send({"kind": "watch"})
        return list(self._figures)

    def forget_figures(self) -> None:
        """Notes that another task gets the figures from now on. The next call of ``figures_of_tasks`` asks again."""
        self._is_watching = False

    def report_error(self, text: str) -> None:
        """Announces that this process ends with an error, which the other tasks will show."""
        self._has_raised = True
        self._note_end()
        self._send({"kind": "raised", "text": text[-8000:], "status": self._status})

    def give_up(self, text: str) -> None:
        """Announces that this process ends because of others, such as one that has not come, and the reason. Does
        nothing if the others have caused it by their own end, because all know that.
        """
        if self._failure is None:
            self._note_end()
            self._send({"kind": "gave_up", "text": text[-8000:], "status": self._status})

    # --- what it is for -----------------------------------------------------------------------------

    @property
    def moment(self) -> Moment:
        """The present moment, for the dates of all-gathers. Ask in the training thread."""
        standing = self.standing
        if standing is None:
            return Moment(0, self.is_newcomer)
        return Moment(standing.version or 0, self.is_newcomer and standing.is_solo)

    @property
    def failure(self) -> ClusterFailureError | None:
        """The reason why the tasks cannot continue together; None if they can. This process may still have to run
        programs that need none of the lost tasks; see ``failure_here``.
        """
        return self._failure

    @property
    def failure_here(self) -> ClusterFailureError | None:
        """The failure, if it affects this process's last program; None if the lost task had run that program too."""
        return self._failure if self._status["position"] > self._last_common else None

    def check(self, position: int | None = None) -> None:
        """Raises the failure of another task, if there is one.

        Args:
          position: The position of the program that this process runs next. A task that ran it before it left is not
            needed.

        Raises:
          ClusterFailureError: The tasks cannot continue together.
        """
        if self._failure is not None and (position is None or position > self._last_common):
            raise again(self._failure)

    def gather(
        self,
        key: str,
        value: Any,
        timeout_s: float,
        *,
        what: str,
        position: int | None = None,
        program: str | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
        every_s: float | None = None,
        date: int = 0,
    ) -> GatheredValues:
        """All-gathers ``value``: returns the values of all live processes, by number. All of them call it with the same
        keys.

        If failures are tolerated, it completes over the members of one epoch that take part since its date. While the
        owner waits in it, it serves. A process that is solo does not call it.

        Args:
          key: A key that was not used before.
          value: A value that JSON can hold.
          timeout_s: The longest wait for the other processes.
          what: The purpose, for messages: "to start".
          position: The position of the next program, if no process may run it before this all-gather. None in a thread
            that runs no programs.
          program: The name of the program that is about to run, if the value is about it.
          is_cancelled: Polled; the wait ends with an error if it returns True.
          every_s: The interval of log lines that name the missing tasks; by default ``stall_s``, doubled after each
            line.
          date: Its date; see ``control/dates.py``.

        Raises:
          PeerFailureError: A task is gone, or has not called it in time.
        """
        self.check()
        self._offer(key, value, what, position, program, date)
        started = time.monotonic()
        says_at = started + (every_s or self._stall_s)
        try:
            while True:
                self.serve_here()
                with self._changed:
                    if key in self._gathered:
                        return self._gathered.pop(key)
                    self.check()
                    now = time.monotonic()
                    if now - started >= timeout_s or is_cancelled():
                        raise self._out_of_time(key, timeout_s, what)
                    if now >= says_at:
                        says_at = now + (every_s or now - started)
                        log.warning(
                            "%s has been waiting %.0f s %s for %s.",
                            self._me,
                            now - started,
                            what,
                            self._missing_in(key),
                        )
                    if not self._must_serve:
                        self._changed.wait(min(started + timeout_s - now, _LOOK_S))
        finally:
            with self._changed:
                self._missing.pop(key, None)
                self._offers.gathered(key)

    def announce(self, key: str, *, what: str, position: int, date: int = 0) -> None:
        """Begins an all-gather of the sequence without waiting for it, so that others that do something else are found.
        See ``gather`` for the arguments.
        """
        self._offer(key, None, what, position, None, date)

    def _offer(
        self, key: str, value: Any, what: str, position: int | None, program: str | None, date: int
    ) -> None:
        offer: Mapping[str, Any] = {"kind": "offer", "key": key, "value": value}
        if position is not None:
            self._is_ordered = True
            status = {**self._status, **self._order, "at": user_line()}
            purpose = {"what": what} if program is None else {"program": program}
            offer = {**offer, "position": position, "purpose": purpose, "status": status}
        if self.min_workers is not None:
            with self._changed:
                offer = self._offers.offer({**offer, "since": date})
        self._send(offer)

    @property
    def _must_serve(self) -> bool:
        """True if messages wait for the calling thread, because it is the owner."""
        is_owner = self.serve is not None and threading.get_ident() == self._owner
        return is_owner and not self.epoch_messages.empty()

    def serve_here(self) -> None:
        """Takes the messages that are queued, if the calling thread is the owner."""
        if self._must_serve and self.serve is not None:
            self.serve()

    def wait_for_message(self, timeout_s: float) -> bool:
        """Waits until ``epoch_messages`` has a message. Returns False if none comes in time.

        Raises:
          ClusterFailureError: The run has failed, for all or for this process.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self.check()
                if not self.epoch_messages.empty():
                    return True
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, _LOOK_S))

    @property
    def missing_reports(self) -> str:
        """The tasks whose reports the next epoch needs, in words."""
        return self._missing_in(_NEXT_EPOCH)

    @property
    def _me(self) -> str:
        return self._names[self._number]

    def _missing_in(self, key: str) -> str:
        missing = self._missing.get(key)
        if missing is None:
            return "the other tasks"
        names = ", ".join(
            f"{self._names[number]} ({'has not come' if status is None else describe_status(status)})"
            for number, status in missing.items()
        )
        twins = ", ".join(self._names[number] for number in self._twins)
        return (
            f"{names}. Another process says that it is {twins} too: give each task its own index"
            if twins
            else names
        )

    def _out_of_time(self, key: str, timeout_s: float, what: str) -> ClusterFailureError:
        return PeerFailureError(
            f"{self._me} waited {timeout_s:.0f} s {what} for {self._missing_in(key)}. Start all tasks, and make the same "
            "calls of replicax in the same order in all of them.",
            tuple(self._names[number] for number in self._missing.get(key, ())),
        )

    def note_thread(self) -> None:
        """Notes that the calling thread is about to agree on a program or to begin it."""
        here = threading.get_ident()
        if here != self.program_thread:
            self.has_threads |= self._is_ordered
            self.program_thread = here
        self._is_ordered = True

    def begin(self, position: int, program: str) -> None:
        """Notes the start of a program. Sends a heartbeat at once if the program differs from the last one.

        Raises:
          ClusterFailureError: A task that the program needs is gone.
        """
        before = self._status.get("program")
        self._num_programs += 1
        self._status = {"position": position, "program": program, "doing": "in"}
        if program != before:
            self._send({"kind": "heartbeat", "status": {**self._status, **self._order, "at": user_line()}})
        self.check(position)  # a failure may have arrived while this process was between programs

    def end(self, is_done: bool = False) -> None:
        """Notes that the program has ended or has been dispatched.

        Args:
          is_done: True if the results are available. Tasks that run the program later then need nothing from this
            process.
        """
        self._status = {**self._status, "doing": "between"}
        if is_done:
            self._done = self._status["position"]

    def begin_reading(self, position: int, topic: str) -> None:
        """Notes that the thread that runs programs waits for a batch that all processes read together.

        Args:
          position: The position of the last program.
          topic: The dataset; empty if only this process counts it so.
        """
        self._reading = (position, self._dated_reads, topic)

    def end_reading(self) -> None:
        """Notes that the wait has ended."""
        self._reading = None

    def note_reads(self, num_reads: int) -> None:
        """Counts batches that the thread that runs programs has taken, or the end of the data."""
        self._reads = self._dated_reads + num_reads

    @property
    def _dated_reads(self) -> int:
        """The count of reads, in the form of a position; see ``control/dates.py``."""
        return max(self._reads, first_at(self.moment.date))

    def wait_for_failure(self, timeout_s: float) -> ClusterFailureError | None:
        """Waits up to ``timeout_s`` for a failure that affects this process's last program, and returns it; None if
        none comes.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self.failure_here is None and time.monotonic() < deadline:
                self._changed.wait(max(0.01, deadline - time.monotonic()))
        return self.failure_here

    # --- the thread ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        connection = self._connection
        assert connection is not None
        heard = time.monotonic()
        next_heartbeat = next_file = 0.0
        while not self._is_closed:
            now = time.monotonic()
            if now >= next_heartbeat:
                moment, wait_s = next_moment(time.time())
                next_heartbeat = now + wait_s
                self._heartbeat(moment)
            if self._status_file.is_wanted and now >= next_file:
                next_file = now + _STATUS_FILE_S
                self._write_status()
            if connection.wait(min(_WAKE_S, max(0.0, next_heartbeat - time.monotonic()))):
                try:
                    message = receive(connection, time.monotonic() + self._silence_s)
                except OSError:
                    self._lose("ended the connection")
                    return
                try:
                    self._receive(message)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                    log.debug("A message of the controller cannot be read: %r", message, exc_info=error)
                    self._lose("sent a message that is none of this version of replicax")
                    return
                heard = time.monotonic()
            elif time.monotonic() - heard > self._silence_s:
                self._lose(f"has not been heard of for {self._silence_s:.0f} s")
                return

    def _receive(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "gathered":
                with self._changed:
                    numbers = message.get("members", range(len(self._names)))
                    self._gathered[message["key"]] = GatheredValues(
                        message["values"], numbers, self._names, self._number
                    )
                    self._offers.gathered(message["key"])
                    self._changed.notify_all()
            case "form" | "end" | "waits" | "over" | "lost" | "given_up":
                self._follow(message)
            case "reminder":
                self._missing[message["key"]] = dict(message["missing"])
                self._twins = list(message["twins"])
            case "figures":
                if self._is_watching:
                    self._figures = message["tasks"]
            case "stalled":
                log.warning("%s", stall_text(self._names, message))
            case "timeout":
                self._fail(timeout_error(self._names, message))
            case "gone":
                last = message["status"].get("done", _NO_PROGRAM) if message["how"] == "left" else _NO_PROGRAM
                self._fail(self._of_gone(message), last)
            case "mismatch":
                self._fail(mismatch_error(self._names, message["statuses"]))
            case "preempted" | "pause" | "stop" | "resume" | "freeze" | "save_boundary" | "boundaries_over":
                for listener in self.on_saving:
                    answer = listener(message)
                    if answer is not None:
                        self.tell(answer)

    def _follow(self, message: Mapping[str, Any]) -> None:
        """Does at once what must not wait for the owner, and queues a message about epochs for it."""
        match message["kind"]:
            case "form":
                has_joined = self._epoch > 0
                with self._changed:
                    self._epoch, self.members = message["epoch"], tuple(message["members"])
                    self._missing.pop(_NEXT_EPOCH, None)
                    offers = self._offers.form(message["epoch"])
                for offer in offers:
                    self._send(offer)
                if not has_joined:
                    self._write_status()
            case "end":
                self.on_end(message["epoch"])
            case "over":
                self._is_over = True
            case "lost":
                self._fail(lost_error(self._names, self._number, message["reason"], message))
            case "given_up":
                self._is_out = True
                self._fail(lost_error(self._names, self._number, "given_up"))
        self._queue(message)

    def _queue(self, message: Mapping[str, Any] | None) -> None:
        with self._changed:
            self.epoch_messages.put(message)
            self._changed.notify_all()

    def _of_gone(self, message: dict[str, Any]) -> ClusterFailureError:
        number, how, theirs = message["member"], message["how"], message["status"]
        ours = self._status
        is_same_place = theirs.get("position", -1) == ours["position"] >= 0
        if how == "died" and is_same_place and theirs["program"] != ours["program"]:
            # gloo aborts a process when collectives of different sizes meet.
            return mismatch_error(self._names, sorted([(number, theirs), (self._number, ours)]))
        return gone_error(self._names, number, how, message["text"], theirs)

    def _heartbeat(self, moment: int) -> None:
        """Sends the figures of this process, its position and its line of code, and the line of a callback if it has
        not moved since the last heartbeat.
        """
        status, more = self._status, {"at": user_line_of_thread(self.program_thread)}
        has_moved, self._last_status = status is not self._last_status, status
        if not has_moved and status["doing"] == "in" and (callback := user_line_of_callback()) is not None:
            more["callback"] = callback
        reading = {"reading": self._reading}
        order = self._order  # last: the reads are at least those before the program at this position
        told = {"status": {**status, **more, **reading, **order}, "figures": {**figures(), "moment": moment}}
        self._send({"kind": "heartbeat", **told})

    @property
    def _order(self) -> dict[str, Any]:
        """What the controller compares besides the position."""
        is_solo = {"is_solo": True} if self.moment.is_solo else {}
        return {"reads": self._dated_reads, "has_threads": self.has_threads, **is_solo}

    def _write_status(self) -> None:
        """Tells the launcher how many programs this process has run."""
        num_programs = self._num_programs - (self._status["doing"] == "in")
        state = GIVEN_UP if self._is_out else "running" if num_programs else "starting"
        ending = RAISED if self._has_raised else "ending"
        state = SAVING if self._is_saving() else state if self._left_at is None else ending
        tolerates_failures = self._epoch > 0 and not self._has_run_failed  # a death in epoch 0 ends the run
        self._status_file.write(num_programs, state, self._left_at, tolerates_failures=tolerates_failures)

    def note_saving(self, is_saving: Callable[[], bool]) -> None:
        """Tells the launcher that this process must not be ended while ``is_saving`` returns True."""
        self._is_saving = is_saving
        self._write_status()

    def _note_end(self) -> None:
        """Notes the time at which this process begins to end, unless another failure is the cause.

        Call it before the other tasks are told, so that this time precedes theirs.
        """
        if self._left_at is None and self._failure is None:
            self._left_at = time.monotonic()
            self._write_status()

    def _send(self, message: Mapping[str, Any]) -> None:
        connection = self._connection
        if connection is None or self._is_closed or self.is_lost:
            return
        try:
            send(connection, message, time.monotonic() + _TAKE_MESSAGE_S)
        except OSError:
            connection.cancel()  # the message may be half sent; the thread sees the cancelled connection

    def _lose(self, how: str) -> None:
        if self._is_closed or self._is_over:
            return
        self.is_lost = True
        if self.min_workers is not None:
            self._is_out = True
            self._fail(lost_error(self._names, self._number, "cut_off"))
            self._queue(None)
            return
        self._fail(
            PeerFailureError(
                f"The controller of the cluster, beside {self._names[0]} at {self._address}, {how}: that machine or the network "
                "is down. End this process, and start the job again.",
                (self._names[0],),
            )
        )

    def _fail(self, failure: ClusterFailureError, last_common: int = _NO_PROGRAM) -> None:
        """Notes a failure. The tasks can run together only up to the program at ``last_common``."""
        if self.min_workers is not None and self._failure is None:
            self._has_run_failed = not self._is_out
            self._write_status()  # before this process can end
            self.on_end(ALL_EPOCHS)
        with self._changed:
            if self._failure is not None and last_common >= self._last_common:
                return
            self._last_common = last_common  # first: `check` takes no lock
            self._failure = failure
            self._changed.notify_all()
        if self._status["position"] > last_common:
            self.on_failure(failure)
