"""Agreement among the processes of a cluster on checkpoints: the directory, the states, and failures."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from replicax._src.checkpoint.background import saves_under
from replicax._src.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    UnsharedDirectoryError,
)
from replicax._src.cluster.admission import Admission
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.cluster.leading import value_of_leader
from replicax._src.cluster.peers import joined_peers
from replicax._src.control.standing import Moment
from replicax._src.input.elements import NotResumableError
from replicax._src.scope import context

# A network file system may show a file of another machine late.
_SHARED_WITHIN_S = 10.0
_checked: dict[str, str] = {}  # given directory -> shared directory
# shared directory -> number of a process -> the directory that it was given
_given: dict[str, dict[str, str]] = {}


def is_chief() -> bool:
    """True if this process commits checkpoints: one process of a cluster does. If the others continue after its death,
    it is another one from then on, so ask again each time.
    """
    peers = joined_peers()
    if peers is not None:
        return peers.is_leader
    return not context.has_strategy() or context.get_strategy().is_chief


def is_alone() -> bool:
    """True if no other process trains with this one."""
    return joined_peers() is None


def is_solo() -> bool:
    """True in the replacement of a dead process until its first step with the others. It saves nothing."""
    peers = joined_peers()
    return peers is not None and peers.tolerates_failures and peers.is_solo


def moment() -> Moment:
    """Returns the present moment, to which all-gathers in background threads belong. Call it in the training thread."""
    peers = joined_peers()
    return peers.moment() if peers is not None and peers.tolerates_failures else Moment()


def tolerates_failures() -> bool:
    """True if the live processes continue after the death of another one, because each has the whole state."""
    peers = joined_peers()
    return peers is not None and peers.tolerates_failures


def admission() -> Admission | None:
    """Returns the way by which replacements of dead processes enter; None if there is none."""
    peers = joined_peers()
    return None if peers is None else peers.admission


def last_entry() -> int | None:
    """Returns the version of the state with which the last replacement entered that has taken part in a step; None if
    there is none. Equal in all processes that take part.
    """
    peers = joined_peers()
    return None if peers is None else peers.last_entry


def own_name() -> str:
    """Returns the name of this process among those that train together."""
    return names()[process_number()]


def gather(topic: str, value: Any, *, once: str | None = None, since: Moment | None = None) -> GatheredValues:
    """Returns the values of all live processes that train together. All must call it.

    Args:
      topic: The subject.
      value: A value that JSON can hold.
      once: A topic that is used once, for calls in background threads.
      since: For such calls: the moment at which the thread was started.
    """
    peers = joined_peers()
    if peers is None:
        return GatheredValues([value], (0,), names(), 0)
    if once is not None:
        return peers.gather_once(f"checkpoint {once}", value, what=f"for {topic}", since=since)
    return peers.gather(f"checkpoint {topic}", value, what=f"to agree on {topic} (checkpoint)")


def names() -> tuple[str, ...]:
    """Returns the names of the processes that train together, by number, also of those that have died."""
    peers = joined_peers()
    return ("this process",) if peers is None else tuple(peers.names)


def process_number() -> int:
    """Returns the number of this process among those that train together."""
    peers = joined_peers()
    return 0 if peers is None else peers.number


def share_of_verifying() -> tuple[int, int]:
    """Returns the position of this process among the live ones, and their number."""
    peers = joined_peers()
    return (0, 1) if peers is None else (peers.members.index(peers.number), len(peers.members))


def agreed_state(states: Sequence[Any], numbers: Sequence[int] | None = None) -> list[Any]:
    """Returns the states of all processes as they are saved: one if all are equal. A process that has died gets the
    state of the first one.

    Args:
      states: The states.
      numbers: The numbers of the processes that gave them; None for all.
    """
    if all(state == states[0] for state in states):
        return [states[0]]
    if numbers is None:
        return list(states)
    of_live = dict(zip(numbers, states, strict=True))
    return [of_live.get(number, states[0]) for number in range(len(names()))]


def own_state(label: str, states: Sequence[Any], merge: Callable[[Sequence[Any]], Any]) -> Any:
    """Returns the state for this process, from the saved ones.

    Args:
      merge: Returns one state for any process from those of another number of processes, or None.

    Raises:
      NotResumableError: Another number of processes had a state each, and they cannot be merged.
    """
    if len(states) == 1:
        return states[0]
    peers = joined_peers()
    num_processes = 1 if peers is None else len(peers)
    if len(states) == num_processes:
        return states[process_number()]
    merged = merge(states)
    if merged is None:
        raise NotResumableError(
            f"The checkpoint has a state of {label} for each of {len(states)} processes, but now there are "
            f"{num_processes}. Positions of distributed datasets of files (rx.data.from_...) resume on any number, and "
            "so do states that are equal in all processes."
        )
    return merged


def check_shared(directory: str) -> None:
    """Checks that all processes share a directory. All call it; for a known directory it costs nothing.

    Raises:
      UnsharedDirectoryError: They do not share it.
    """
    shared_directory(directory, takes_chiefs=False)


def shared_directory(directory: str, *, takes_chiefs: bool = True) -> str:
    """Returns the directory that all processes share. All call it; for a known directory it costs nothing.

    Programs of TensorFlow give each worker a directory of its own, because all of them write there.

    Args:
      directory: The directory that this process was given.
      takes_chiefs: True if a process with another directory than the chief uses the chief's, if it can see that.

    Raises:
      UnsharedDirectoryError: They do not share it.
    """
    peers = joined_peers()
    if peers is None:
        return directory
    if directory in _checked:
        return _checked[directory]
    if is_solo():  # the others have agreed: `take_directories`
        return directory
    while True:
        told = gather("the directory", {"directory": directory, "token": uuid.uuid4().hex})
        leader, name = told.numbers[0], f".replicax-{told[0]['token']}"
        if leader == peers.number:
            os.makedirs(directory, exist_ok=True)
            with open(os.path.join(directory, name), "w") as file:
                file.write("checkpoints of one cluster")
        if leader in gather("the directory's mark", True).numbers:
            break  # otherwise it has died, and may not have written the file
    places = dict.fromkeys((directory, told[0]["directory"]) if takes_chiefs else (directory,))
    shared = _appears_in(list(places), name)
    seen = gather("which processes see the directory", shared is not None)
    if seen.own == 0:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(shared or directory, name))
    blind = [name for name, sees in seen.named() if not sees]
    if blind or shared is None:
        raise UnsharedDirectoryError(
            f"The processes do not share the directory {directory!r}: {told.names[0]} has written a file "
            f"there that {', '.join(blind)} cannot see. All processes write and read the files of a checkpoint. "
            "Give a directory on a disk that all machines share (NFS, Lustre, a mounted bucket)."
        )
    _checked[directory] = shared
    of_all = {str(number): each["directory"] for number, each in zip(told.numbers, told, strict=True)}
    _given.setdefault(shared, {}).update(of_all)
    return shared


def directories() -> list[tuple[str, dict[str, str]]]:
    """Returns the shared directories, each with those that the processes were given for it, by their numbers."""
    return [(shared, dict(given)) for shared, given in _given.items()]


def take_directories(of_all: Sequence[tuple[str, dict[str, str]]]) -> None:
    """Takes what the others have agreed on, in a replacement."""
    own = str(process_number())
    for shared, given in of_all:
        _given.setdefault(shared, {}).update(given)
        _checked[given.get(own, shared)] = shared


def known_directory(directory: str) -> str:
    """Returns the directory that all processes share, as far as this process knows. It does not communicate."""
    return _checked.get(directory, directory)


def wait_for_chiefs(path: str) -> None:
    """Waits a little for a file that the chief sees, because a network file system may show it to others late."""
    if not is_chief():
        _appears_in([os.path.dirname(path)], os.path.basename(path))


def _appears_in(directories: Sequence[str], name: str) -> str | None:
    """Returns the first of the directories in which a file appears within some time."""
    deadline = time.monotonic() + _SHARED_WITHIN_S
    while True:
        for directory in directories:
            if os.path.exists(os.path.join(directory, name)):
                return directory
            if os.path.isdir(directory):
                os.listdir(directory)  # otherwise NFS answers from its cache
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def together(what: str, action: Callable[[], Any], *, once: str | None = None) -> Any:
    """Runs an action in each process, and raises in all if it fails in one. All call it.

    Args:
      what: The purpose, for messages.
      action: The action.
      once: A topic that is used once, for calls in background threads.

    Returns:
      The action's result in this process.

    Raises:
      CheckpointError: It failed in another process; of the same type if that is one of a checkpoint's errors.
      ClusterFailureError: Another process is lost.
    """
    return gather_results(what, action, lambda result: None, once=once)[0]


def chiefs_value(what: str, action: Callable[[], Any]) -> Any:
    """Returns in each process the value, as JSON, that the action returns in the chief. All call it.

    The action runs in another process if the chief dies meanwhile.

    Raises:
      CheckpointError: It failed; of the same type if that is one of a checkpoint's errors.
      ClusterFailureError: Another process is lost.
    """

    def gathered(value: Callable[[], Any]) -> GatheredValues:
        return gather_results(what, value, lambda value: value)[1]

    return value_of_leader(gathered, is_chief, action)


def gather_results(
    what: str,
    action: Callable[[], Any],
    tell: Callable[[Any], Any],
    *,
    once: str | None = None,
    since: Moment | None = None,
) -> tuple[Any, GatheredValues]:
    """Does the same as ``together``, and also returns what ``tell`` returns in each process, as JSON."""
    failure: Exception | None = None
    result = value = None
    try:
        result = action()
        value = tell(result)
    except Exception as error:
        failure = error
    of_all = gather(what, {"value": value, "failure": _described(failure)}, once=once, since=since)
    failed = next(
        ((name, each["failure"]) for name, each in of_all.named() if each["failure"] is not None), None
    )
    if failed is None:
        return result, of_all.with_values([each["value"] for each in of_all])
    name, (kind, number, text) = failed
    if failure is not None and type(failure).__name__ == kind:
        raise failure
    text = f"{name} failed at {what}: {text}"
    raise (
        _TOLD[kind](number, text)
        if kind == CheckpointWriteError.__name__
        else _TOLD.get(kind, CheckpointError)(text)
    )


_TOLD = {
    kind.__name__: kind
    for kind in (
        CheckpointMismatchError,
        CheckpointNotFoundError,
        CheckpointWriteError,
        CorruptCheckpointError,
    )
}


def _described(failure: Exception | None) -> list[Any] | None:
    if failure is None:
        return None
    kind = type(failure).__name__
    if isinstance(failure, CheckpointWriteError):
        return [kind, failure.errno, failure.strerror]
    return [kind, 0, str(failure) if kind in _TOLD else f"{kind}: {failure}"]


def wait_for_saves(path: str) -> None:
    """Waits until the saves that this process has started in a directory are on the disk. A process may call it
    alone.

    Args:
      path: The directory, or a checkpoint in it.

    Raises:
      CheckpointError: A save has failed. In a cluster each call raises it until all processes have been told, in
        ``manager.wait()`` for example.
      ClusterFailureError: Another process is lost.
    """
    for save in saves_under(path):
        save.wait(keeps_failure=not is_alone())


def finish_saves(path: str) -> None:
    """Does the same, called by all processes. A failure is raised once."""
    for save in saves_under(path):
        save.wait()
