"""The control channel of one process: it heartbeats, gathers values from all tasks, and hears who is gone.

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
from replicax._src.cluster.status_file import STATUS_FILE_VARIABLE, StatusFile
from replicax._src.user_code import user_line_of_main_thread
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import ForeignPeerError, TokenError
from replicax._src.wire.security import Security

log = logging.getLogger("replicax")
_BEAT_S = 1.0
_STATUS_FILE_S = 0.5
_RETRY_S = 0.1
_ANSWER_S = 10.0  # three round trips: two to authenticate each other, one to join
EARLIER_RUN_S = 35.0
"""For so long the controller of an earlier run may be at the address, with another token."""
_TAKE_MESSAGE_S = 10.0
_LOOK_S = 0.2
# How often the thread looks whether the process leaves, while nothing comes.
_WAKE_S = 0.25
_NO_PROGRAM = -2  # before the position of who has run none


class _RefusedForNow(Exception):
    """The controller is that of an earlier run, which is ending."""


@final
class Channel:
    """A connection to the controller, with a thread of its own that listens and heartbeats.

    Args:
      membership: The tasks, and which of them this process is. The controller is at the leader's address.
      security: What the controller must know, and asks for.
      silence_s: After how many seconds without a word from the controller it counts as gone.
      stall_s: After how many seconds it says for whom it waits.

    Attributes:
      is_lost: True once the controller has ended the connection, or has been silent for too long.
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
        self._failure: ClusterFailureError | None = None
        self._last_common = _NO_PROGRAM
        self._done = _NO_PROGRAM
        self._is_closed = False
        self.is_lost = False
        self._status: dict[str, Any] = {"position": -1, "program": None, "doing": "starting"}
        self._left_at: float | None = None
        self._status_file = StatusFile(os.environ.get(STATUS_FILE_VARIABLE))
        self._last_status: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._listen, name="replicax-channel", daemon=True)
        self.on_failure: Callable[[ClusterFailureError], None] = lambda failure: None
        self.on_saving: tuple[Callable[[Mapping[str, Any]], Mapping[str, Any] | None], ...] = ()

    # --- life ---------------------------------------------------------------------------------------

    def connect(self, deadline: float) -> dict[str, Any]:
        """Joins the cluster, once the controller is there.

        Args:
          deadline: When to give up, on the clock of ``time.monotonic``.

        Returns:
          What the controller tells who joins.

        Raises:
          ClusterStartError: It did not answer in time, or refuses. That of an earlier run, which is ending, is waited
            for.
        """
        started = reminded = time.monotonic()
        trouble: object = "not tried"
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise self._not_connected(now - started, trouble)
            if now - reminded >= 10:
                reminded = now
                log.warning(
                    "Waiting for %s at %s since %.0f s: %s.",
                    self._names[0],
                    self._address,
                    now - started,
                    trouble,
                )
            try:
                self._connection, welcome = self._joined(min(deadline, now + _ANSWER_S))
                break
            except TokenError as error:
                trouble = error
                if (
                    now - started > EARLIER_RUN_S
                ):  # until then an earlier run with another token may be ending there
                    raise self._not_connected(now - started, trouble) from error
                time.sleep(_RETRY_S)
            except (OSError, _RefusedForNow) as error:
                is_cut_short = isinstance(error, TimeoutError) and deadline - now < _ANSWER_S
                if not (is_cut_short and isinstance(trouble, (ForeignPeerError, _RefusedForNow))):
                    trouble = error  # else what was answered says more
                time.sleep(_RETRY_S)
        self._thread.start()
        return welcome

    def _not_connected(self, waited_s: float, trouble: object) -> ClusterStartError:
        if isinstance(trouble, TokenError):
            return ClusterStartError(
                f"The token of {self._me} does not fit that of {self._names[0]} at {self._address}: {trouble}. Give all tasks "
                "of the cluster the same token (REPLICAX_TOKEN)."
            )
        more_time = "allow more time with REPLICAX_START_TIMEOUT_S."
        if isinstance(trouble, _RefusedForNow):
            return ClusterStartError(
                f"{self._me} waited {waited_s:.0f} s for an earlier run of the job to end, of which {self._names[0]} at "
                f"{self._address} says: {trouble} Or {more_time}"
            )
        return ClusterStartError(
            f"{self._me} waited {waited_s:.0f} s for {self._names[0]}, which does not answer at {self._address} ({trouble}). "
            "Start it, look whether the address is right and the port open between the machines (replicax doctor), or "
            f"{more_time}"
        )

    def _joined(self, deadline: float) -> tuple[Connection, dict[str, Any]]:
        """A connection that the controller has welcomed, and the welcome."""
        connection = connect(self._address, self._security, deadline)
        try:
            hello = {"kind": "hello", "member": self._number, "cluster": self._cluster}
            send(connection, hello, deadline)
            answer = receive(connection, deadline)
            if answer["kind"] == "refused" and answer["is_temporary"]:
                raise _RefusedForNow(answer["text"])
            if answer["kind"] == "refused":
                raise ClusterStartError(
                    f"{self._names[0]} at {self._address} refuses {self._me}: {answer['text']}"
                )
            if answer["kind"] != "welcome":
                raise ForeignPeerError("no job has begun there; does replicax doctor run on that machine?")
            return connection, answer
        except BaseException:
            connection.close()
            raise

    def leave(self) -> None:
        """Says that this process ends in order, unless it has said otherwise, and ends the connection."""
        if self._connection is None or self._is_closed:
            return
        self._note_end()
        self._send({"kind": "left", "status": {**self._status, "done": self._done}})
        self._is_closed = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)
        self._connection.close()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Says something of ``save_rounds.KINDS`` to the controller. What it says of that is given to all of
        ``on_saving``, in the channel's thread; what they return is the answer."""
        self._send(dict(message))

    def tell_error(self, text: str) -> None:
        """Says that this process ends with an error, which the others will show."""
        self._note_end()
        self._send({"kind": "raised", "text": text[-8000:], "status": self._status})

    # --- what it is for -----------------------------------------------------------------------------

    @property
    def failure(self) -> ClusterFailureError | None:
        """Why the tasks cannot go on together, if they cannot; perhaps only after programs that this one has yet to
        run.
        """
        return self._failure

    @property
    def failure_here(self) -> ClusterFailureError | None:
        """The same, where it is of this process's last program: who has left, having run that too, was not needed for
        it.
        """
        return self._failure if self._status["position"] > self._last_common else None

    def check(self, position: int | None = None) -> None:
        """Raises what has happened to the others.

        Args:
          position: Of a program that this process runs next. Who has run it and has left is not needed for it: this
            process is behind, in programs in which nobody waits for another.

        Raises:
          ClusterFailureError: They cannot go on.
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
        is_cancelled: Callable[[], bool] = lambda: False,
        every_s: float | None = None,
    ) -> list[Any]:
        """Gives ``value`` and gets the values of all, by number. All processes call it, with the same keys.

        Args:
          key: Not used before.
          value: As JSON has it.
          timeout_s: How long the others may take.
          what: What they wait to do, for messages: "to start".
          position: Of the program that is about to run, if it is about that.
          is_cancelled: Asked now and then; the wait ends, with an error, if so.
          every_s: How often it is said for whom it waits; by default after ``stall_s``, then after twice the time each.

        Raises:
          PeerFailureError: Somebody is gone, or missing for too long.
        """
        self.check()
        self._send({"kind": "offer", "key": key, "value": value, "position": position})
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
                        "%s waits since %.0f s %s, for %s.",
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
        return ", ".join(
            f"{self._names[number]} ({'has not come' if status is None else describe_status(status)})"
            for number, status in missing.items()
        )

    def _out_of_time(self, key: str, timeout_s: float, what: str) -> ClusterFailureError:
        return PeerFailureError(
            f"{self._me} waited {timeout_s:.0f} s {what}, for {self._missing_in(key)}. All tasks must be started, and make "
            "the same calls of replicax in the same order.",
            tuple(self._names[number] for number in self._missing.get(key, ())),
        )

    def begin(self, position: int, program: str) -> None:
        """A program begins; if it is another one than before the others hear of it at once.

        Raises:
          ClusterFailureError: Somebody is gone who is needed for it.
        """
        before = self._status.get("program")
        self._status = {"position": position, "program": program, "doing": "in"}
        if program != before:
            self._send({"kind": "heartbeat", "status": self._status})
        self.check(position)  # what came since may have found this process between programs

    def end(self, is_done: bool = False) -> None:
        """The program has ended, or has been dispatched.

        Args:
          is_done: Its results are there: whoever else has not run it yet needs nothing of this process for it.
        """
        self._status = {**self._status, "doing": "between"}
        if is_done:
            self._done = self._status["position"]

    def wait_for_failure(self, timeout_s: float) -> ClusterFailureError | None:
        """What has happened to others that are needed where this process is, or will be known in so many seconds."""
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
                next_heartbeat = now + _BEAT_S
                self._heartbeat()
            if self._status_file.is_wanted and now >= next_file:
                next_file = now + _STATUS_FILE_S
                self._write_status()
            if connection.wait(_WAKE_S):
                try:
                    message = receive(connection, time.monotonic() + self._silence_s)
                except OSError:
                    self._lose("ended the connection")
                    return
                self._receive(message)
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
            # Collectives of different sizes have met, of which gloo aborts a process.
            return of_mismatch(self._names, sorted([(number, theirs), (self._number, ours)]))
        return of_gone(self._names, number, how, message["text"], theirs)

    def _heartbeat(self) -> None:
        """Says where this process is; with the line of code, where it has not moved since the last time."""
        status = self._status
        at = {"at": user_line_of_main_thread()} if status is self._last_status else {}
        self._last_status = status
        self._send({"kind": "heartbeat", "status": {**status, **at}})

    def _write_status(self) -> None:
        """For the launcher: how many programs this process has run."""
        num_programs = max(0, self._status["position"] + (self._status["doing"] != "in"))
        state = "running" if num_programs else "starting"
        self._status_file.write(num_programs, state if self._left_at is None else "ending", self._left_at)

    def _note_end(self) -> None:
        """Before the others hear of it: what they do then comes later.

        Who ends because another has failed was not first.
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
            connection.cancel()  # half of it may have been sent; the thread notices

    def _lose(self, how: str) -> None:
        if self._is_closed:
            return
        self.is_lost = True
        self._fail(
            PeerFailureError(
                f"The controller of the cluster, beside {self._names[0]} at {self._address}, {how}: that machine, or the network "
                "between, is down. End this process, and start the job again.",
                (self._names[0],),
            )
        )

    def _fail(self, failure: ClusterFailureError, last_common: int = _NO_PROGRAM) -> None:
        """The tasks can go on together no longer, or only up to the program at ``last_common``."""
        with self._changed:
            if self._failure is not None and last_common >= self._last_common:
                return
            self._last_common = last_common  # first: `check` takes no lock
            self._failure = failure
            self._changed.notify_all()
        if self._status["position"] > last_common:
            self.on_failure(failure)
