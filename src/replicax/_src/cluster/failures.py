"""The errors that the tasks of a cluster cause each other; each names the task. docs/reference/errors.md lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from replicax._src.cluster.environ import STUCK_LIMIT
from replicax._src.control.dates import position_in_words
from replicax._src.drawing.text import printable, printable_lines
from replicax._src.vocabulary.errors import ReplicaxError

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


class StateLostError(ClusterFailureError):
    """No task that is left has the state of the training, so the others cannot continue without a restart."""


class StateMismatchError(ClusterFailureError):
    """Two tasks report different sums of the same step, or different numbers of steps. Or a replacement has other
    values than the others before its first step.
    """


def gone_error(
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


def lost_error(
    names: Sequence[str], number: int, reason: str, message: Mapping[str, Any] = MappingProxyType({})
) -> ClusterFailureError:
    """Returns the error for a process that stops although failures are tolerated; see ``epoch_member.Stop``.

    Args:
      names: The names of all tasks.
      number: The number of this process's task.
      reason: The controller's reason, or ``"given_up"`` or ``"cut_off"``.
      message: The controller's message: the numbers of the tasks at fault, and figures.
    """
    members: Sequence[int] = message.get("members", ())
    tasks = tuple(names[member] for member in members)
    are = "is" if len(tasks) == 1 else "are"
    num_left = message.get("num_left", 0)
    text = _LOST[reason].format(
        me=names[number],
        tasks=" and ".join(tasks) or "the others",
        are=are,
        left="1 task is left" if num_left == 1 else f"{num_left} tasks are left",
        min_workers=message.get("min_workers"),
        again=_RESTART,
    )
    match reason:
        case "state":
            return StateLostError(text)
        case "differs":
            return StateMismatchError(text)
        case _:
            return PeerFailureError(text, tasks)


_RESTART = "End this process, and start the job again: it resumes from its newest checkpoint."
_LOST = {
    "state": "No task that is left has the state of the training: {tasks} had it, and {are} gone. {again}",
    "differs": "{tasks} report different states of one step, or numbers of steps that cannot both be right. All tasks must run "
    "the same code on the same data, of the same versions. Look for an `if` on the task, local data or unseeded "
    "randomness. {again}",
    "few": "{left}, and `min_workers` is {min_workers}: {tasks} {are} gone. {again} To continue with fewer tasks, give "
    "FaultToleranceOptions(min_workers=...) a smaller number.",
    "start": "{tasks} ended before all tasks had started. {again}",
    "unreachable": "Step after step fails, and no task is gone: connections between the tasks end again and again. Check the "
    "network between their machines. {again}",
    "given_up": "{me} was silent for too long, could not be reached by the others, or did not come to its first step in time, and "
    "the others continue without it. This process must end: its state is no part of the training any more.",
    "cut_off": "{me} has lost its connection to the controller of the cluster: the controller has ended, or the network between "
    "them is down. The others may continue without this process. It must end.",
}
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


def mismatch_error(
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


def timeout_error(names: Sequence[str], message: Mapping[str, Any]) -> PeerFailureError:
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
    program = printable(f"its program number {position_in_words(status['position'])}, {status['program']}")
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
            return f"about to run its program number {position_in_words(number)}, {purpose['program']}"
        return f"waiting {purpose['what']}, before its program number {position_in_words(number)}"
    reading = status.get("reading")
    if reading is not None and position is not None and reading[0] >= position:
        following = position_in_words(reading[0] + 1)
        return f"waiting to read the next batch of a dataset, before its program number {following}"
    if program is None or position is None or position < 0:
        return "before its first program"
    where = "in" if status.get("doing") == "in" else "after"
    return f"{where} its program number {position_in_words(position)}, {program}"


def again(failure: ClusterFailureError) -> ClusterFailureError:
    """Returns a copy of a failure to raise again, without the traceback of the first time."""
    if isinstance(failure, PeerFailureError):
        return PeerFailureError(str(failure), failure.tasks)
    return type(failure)(str(failure))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())
