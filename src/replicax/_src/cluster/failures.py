"""The errors that the tasks of a cluster cause each other; each names the task. docs/reference/errors.md lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replicax._src.cluster.environ import STUCK_LIMIT
from replicax._src.drawing.text import printable, printable_lines
from replicax._src.errors import ReplicaxError

_WORTH_SAYING_S = 2


class ClusterFailureError(ReplicaxError, RuntimeError):
    """The tasks of a cluster cannot continue together. End this process, and start the job again."""


class ClusterStartError(ClusterFailureError):
    """The tasks of a cluster did not find each other, or do not match."""


class PeerFailureError(ClusterFailureError):
    """Another task died, raised an error, went silent, or ended its program while this process needed it.

    Attributes:
      tasks: The names of the tasks: ``("worker 1",)``.
    """

    def __init__(self, message: str, tasks: tuple[str, ...] = ()):
        super().__init__(message)
        self.tasks = tasks


class ProgramMismatchError(ClusterFailureError):
    """Tasks run different programs, or the same programs in a different order."""


def of_gone(
    names: Sequence[str], number: int, how: str, text: str, status: Mapping[str, Any]
) -> PeerFailureError:
    """Returns the error for another task that is gone.

    Args:
      names: The names of all tasks.
      number: The number of the task that is gone.
      how: The way in which it ended; see controller.py.
      text: Its error, or the seconds for which it has been silent.
      status: The status of its last heartbeat.
    """
    text = printable_lines(text)
    indented = _indented(text) if how == "raised" else text
    told = _GONE[how].format(text=indented, where=describe_status(status), again=_AGAIN)
    return PeerFailureError(f"{names[number]} {told}", (names[number],))


_AGAIN = "This process cannot continue without it: end it, and start the job again."
_GONE = {
    "raised": "raised an error ({where}):\n{text}\n{again}",
    "gave_up": "gave up ({where}): {text}\n{again}",
    "failed": "ended before all had joined: {text}\n{again}",
    "left": "has ended its program, and this process still needs it. All tasks must run the same steps: look for code that only "
    "some of them run (an early return, a different number of epochs or batches). It was {where}.",
    "silent": "has been silent for {text} s: it is stopped, its machine hangs, or the network is down. It was {where}. {again}",
    "died": "died without a word: it was killed (out of memory?) or crashed; its own output may say more. It was {where}. "
    "{again}",
}


def of_mismatch(
    names: Sequence[str], statuses: Sequence[tuple[int, Mapping[str, Any]]]
) -> ProgramMismatchError:
    """Returns the error for two tasks that run different programs."""
    lines = "\n".join(f"  {names[number]}: {describe_status(status)}" for number, status in statuses)
    return ProgramMismatchError(
        "The tasks do not make the same calls in the same order, and would wait for each other forever:\n"
        f"{lines}\n"
        "Every task must make the same calls of replicax (run, reduce, gather, fit, evaluate, predict, reading distributed "
        "datasets and ON_READ variables, saving and restoring checkpoints, making variables) in the same order. Look for an "
        "`if` on the task, the chief or local data around one of them."
    )


def stall_text(names: Sequence[str], message: Mapping[str, Any]) -> str:
    """Returns a warning that a task waits in a program; ``message`` is the controller's."""
    option = STUCK_LIMIT if message["is_stuck"] else "timeout_seconds"
    return f"{_wait_of(names, message)} It fails after {message['limit_s']:g} s ({option})."


def of_timeout(names: Sequence[str], message: Mapping[str, Any]) -> PeerFailureError:
    """Returns the error for a task that waited too long in a program; ``message`` is the controller's."""
    advice = (
        f"If one program needs this long, allow more time with {STUCK_LIMIT}."
        if message["is_stuck"]
        else "Check that all tasks run the same steps. If they do, and need this long, allow more time with "
        "CommunicationOptions(timeout_seconds=...)."
    )
    return PeerFailureError(
        f"{_wait_of(names, message)} This is the limit. {advice} This process cannot continue: end it, and start the job again.",
        tuple(names[int(number)] for number, _ in message["named"]),
    )


def _wait_of(names: Sequence[str], message: Mapping[str, Any]) -> str:
    number, status = message["waiting"]
    program = printable(f"its program number {status['position']}, {status['program']}")
    waits = f"{names[number]} has waited {message['waited_s']} s in {program}"
    if message["is_stuck"]:
        stuck = "; ".join(f"{names[n]} is {describe_status(s)}" for n, s in message["named"])
        return f"{waits}, which all tasks have reached, and which does not end: {stuck}."
    late = ", ".join(
        f"{names[n]}, which has not reached it: it is {describe_status(s)}" for n, s in message["named"]
    )
    return f"{waits}, for {late}."


def describe_status(status: Mapping[str, Any]) -> str:
    """Describes in words where a task is."""
    parts = [_place(status)]
    if status.get("for_s", 0) >= _WORTH_SAYING_S:
        parts.append(f"for {status['for_s']} s")
    if "callback" in status:
        parts.append(f"running the callback {status['callback']}")
    elif "at" in status:
        parts.append(f"at {status['at']}")
    if "silent_s" in status:
        parts.append(f"and has been silent for {status['silent_s']} s")
    return printable(", ".join(parts))


def _place(status: Mapping[str, Any]) -> str:
    position, program = status.get("position"), status.get("program")
    if "next" in status:
        number, purpose = status["next"]
        if "program" in purpose:
            return f"about to run its program number {number}, {purpose['program']}"
        return f"waiting {purpose['what']}, before its program number {number}"
    reading = status.get("reading")
    if reading is not None and position is not None and reading[0] == position:
        return f"waiting to read the next batch of a dataset, before its program number {position + 1}"
    if program is None or position is None or position < 0:
        return "before its first program"
    where = "in" if status.get("doing") == "in" else "after"
    return f"{where} its program number {position}, {program}"


def again(failure: ClusterFailureError) -> ClusterFailureError:
    """Returns a copy of a failure to raise again, without the traceback of the first time."""
    if isinstance(failure, PeerFailureError):
        return PeerFailureError(str(failure), failure.tasks)
    return type(failure)(str(failure))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())
