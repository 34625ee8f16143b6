"""The control channel of one process: sends heartbeats, all-gathers values, and learns which tasks are gone.

See controller.py for the rules.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from replicax._src.cluster.failures import (
    ClusterFailureError,
    ClusterStartError,
    PeerFailureError,
    again,
    describe_status,
    of_gone,
    of_mismatch,
    of_timeout,
    stall_text,
)
from replicax._src.cluster.frames import connect, receive, send
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.moments import next_moment
from replicax._src.cluster.occupants import describe_other_program, occupant_of
from replicax._src.cluster.status_file import STATUS_FILE_VARIABLE, StatusFile
from replicax._src.drawing.text import printable_lines
from replicax._src.status.figures import figures
from replicax._src.user_code import user_line, user_line_of_callback, user_line_of_thread
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

    Attributes:
      is_lost: True once the controller has ended the connection, or has been silent for too long.
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
    ):
        self._address, self._number = membership.leader_address, membership.id_in_cluster
        self._names, self._cluster = membership.names, membership.described
        self._silence_s, self._stall_s = silence_s, stall_s
        self._security = security
        self._connection: Connection | None = None
        self._changed = threading.Condition()
        self._gathered: dict[str, list[Any]] = {}
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
        self._reads = 0
        self._reading: tuple[int, int, str] | None = None
        self._left_at: float | None = None
        self._status_file = StatusFile(os.environ.get(STATUS_FILE_VARIABLE))
        self._last_status: dict[str, Any] | None = None
        self._figures: list[dict[str, Any]] = []
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
                if not (is_cut_short and isinstance(trouble, (ForeignPeerError, _RefusedForNow))):
                    trouble = error  # otherwise the last answer says more
                if not isinstance(trouble, OtherProgramError):
                    foreign_until = time.monotonic()
                elif (
                    now - foreign_until > EARLIER_RUN_S
                ):  # worker 0 cannot listen there while this program does
                    raise self._not_connected(now - started, trouble) from error
                time.sleep(_RETRY_S)
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
            send(connection, hello, deadline)
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
        """Sends a message of ``save_rounds.KINDS`` to the controller.

        The controller's messages about saving go to each listener of ``on_saving``, in the channel's thread. Each
        value that a listener returns is sent as its answer.
        """
        self._send(dict(message))

    def figures_of_tasks(self) -> list[dict[str, Any]]:
        """Returns the last figures of each task, by number, with its name and state. The controller sends them from the
        first call on.
        """
        if not self._figures:
            self._figures = [{"task": name, "state": "awaited"} for name in self._names]
            self._send({"kind": "watch"})
        return list(self._figures)

    def tell_error(self, text: str) -> None:
        """Announces that this process ends with an error, which the other tasks will show."""
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
    ) -> list[Any]:
        """All-gathers ``value``: returns the values of all processes, by number. All processes call it with the same
        keys.

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

        Raises:
          PeerFailureError: A task is gone, or has not called it in time.
        """
        self.check()
        offer: dict[str, Any] = {"kind": "offer", "key": key, "value": value}
        if position is not None:
            self._is_ordered = True
            status = {**self._status, **self._order, "at": user_line()}
            purpose = {"what": what} if program is None else {"program": program}
            offer |= {"position": position, "purpose": purpose, "status": status}
        self._send(offer)
        started = time.monotonic()
        says_at = started + (every_s or self._stall_s)
        with self._changed:
            while key not in self._gathered:
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
                self._changed.wait(min(started + timeout_s - now, _LOOK_S))
            self._missing.pop(key, None)
            return self._gathered.pop(key)

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
          topic: The dataset.
        """
        self._reading = (position, self._reads, topic)

    def end_reading(self) -> None:
        """Notes that the wait has ended."""
        self._reading = None

    def note_reads(self, num_reads: int) -> None:
        """Counts batches that the thread that runs programs has taken, or the end of the data."""
        self._reads += num_reads

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
                    self._gathered[message["key"]] = message["values"]
                    self._changed.notify_all()
            case "reminder":
                self._missing[message["key"]] = dict(message["missing"])
                self._twins = list(message["twins"])
            case "figures":
                self._figures = message["tasks"]
            case "stalled":
                log.warning("%s", stall_text(self._names, message))
            case "timeout":
                self._fail(of_timeout(self._names, message))
            case "gone":
                last = message["status"].get("done", _NO_PROGRAM) if message["how"] == "left" else _NO_PROGRAM
                self._fail(self._of_gone(message), last)
            case "mismatch":
                self._fail(of_mismatch(self._names, message["statuses"]))
            case "preempted" | "pause" | "stop" | "resume":
                for listener in self.on_saving:
                    answer = listener(message)
                    if answer is not None:
                        self.tell(answer)

    def _of_gone(self, message: dict[str, Any]) -> ClusterFailureError:
        number, how, theirs = message["member"], message["how"], message["status"]
        ours = self._status
        is_same_place = theirs.get("position", -1) == ours["position"] >= 0
        if how == "died" and is_same_place and theirs["program"] != ours["program"]:
            # gloo aborts a process when collectives of different sizes meet.
            return of_mismatch(self._names, sorted([(number, theirs), (self._number, ours)]))
        return of_gone(self._names, number, how, message["text"], theirs)

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
        return {"reads": self._reads, "has_threads": self.has_threads}

    def _write_status(self) -> None:
        """Tells the launcher how many programs this process has run."""
        num_programs = max(0, self._status["position"] + (self._status["doing"] != "in"))
        state = "running" if num_programs else "starting"
        self._status_file.write(num_programs, state if self._left_at is None else "ending", self._left_at)

    def _note_end(self) -> None:
        """Notes the time at which this process begins to end, unless another failure is the cause.

        Call it before the other tasks are told, so that this time precedes theirs.
        """
        if self._left_at is None and self._failure is None:
            self._left_at = time.monotonic()
            self._write_status()

    def _send(self, message: dict[str, Any]) -> None:
        connection = self._connection
        if connection is None or self._is_closed or self.is_lost:
            return
        try:
            send(connection, message, time.monotonic() + _TAKE_MESSAGE_S)
        except OSError:
            connection.cancel()  # the message may be half sent; the thread sees the cancelled connection

    def _lose(self, how: str) -> None:
        if self._is_closed:
            return
        self.is_lost = True
        self._fail(
            PeerFailureError(
                f"The controller of the cluster, beside {self._names[0]} at {self._address}, {how}: that machine or the network "
                "is down. End this process, and start the job again.",
                (self._names[0],),
            )
        )

    def _fail(self, failure: ClusterFailureError, last_common: int = _NO_PROGRAM) -> None:
        """Notes a failure. The tasks can run together only up to the program at ``last_common``."""
        with self._changed:
            if self._failure is not None and last_common >= self._last_common:
                return
            self._last_common = last_common  # first: `check` takes no lock
            self._failure = failure
            self._changed.notify_all()
        if self._status["position"] > last_common:
            self.on_failure(failure)
