"""Which process writes, and what the processes of a cluster agree on: one directory, one checkpoint, states of each."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from replicax._src import context
from replicax._src.checkpoint.background import Background, saves_under
from replicax._src.checkpoint.contents import MANIFEST
from replicax._src.checkpoint.errors import CheckpointError, UnsharedDirectoryError
from replicax._src.cluster.failures import ClusterFailureError
from replicax._src.cluster.peers import joined_peers
from replicax._src.errors import InvalidArgumentError
from replicax._src.input.elements import NotResumableError

# A network's file system may show a file of another machine later.
_SHARED_WITHIN_S = 10.0
# Checksums of what is in memory take about a second per GB, in which nothing changes on the disk.
_UNCHANGED_WITHIN_S = 300.0
# How often who writes says that it still does: those who wait give up on somebody who says nothing.
_TELL_S = 1.0
_checked: dict[str, str] = {}  # what a process was given -> what all see


def is_chief() -> bool:
    """Whether this process writes checkpoints: one of a cluster does."""
    peers = joined_peers()
    if peers is not None:
        return peers.is_leader
    return not context.has_strategy() or context.get_strategy().is_chief


def is_alone() -> bool:
    """Whether no other process trains with this one."""
    return joined_peers() is None


def gather(topic: str, value: Any) -> list[Any]:
    """The values of all processes that train together; all call it."""
    peers = joined_peers()
    return (
        [value] if peers is None else peers.gather(f"checkpoint {topic}", value, what=f"to agree on {topic}")
    )


def process_number() -> int:
    """Of this process among those that train together."""
    peers = joined_peers()
    return 0 if peers is None else peers.number


def agreed_state(states: Sequence[Any]) -> list[Any]:
    """The states of all processes as they are saved: once, where all are the same."""
    return [states[0]] if all(state == states[0] for state in states) else list(states)


def own_state(label: str, states: Sequence[Any]) -> Any:
    """The state for this process, of those that were saved.

    Raises:
      NotResumableError: As many processes as now had other ones each.
    """
    if len(states) == 1:
        return states[0]
    peers = joined_peers()
    num_processes = 1 if peers is None else len(peers)
    if len(states) != num_processes:
        raise NotResumableError(
            f"The checkpoint has a state of {label} for each of {len(states)} processes, and now there are {num_processes}. A "
            "dataset that each worker reads a part of goes on with as many workers as before; one whose position is the same in "
            "all (rx.data.from_arrays, AutoShardPolicy.DATA) with any number."
        )
    return states[process_number()]


def check_shared(directory: str) -> None:
    """Makes sure that all processes see one directory. All call it; for a directory that is known it costs nothing.

    Raises:
      UnsharedDirectoryError: They see different ones.
    """
    shared_directory(directory, takes_chiefs=False)


def shared_directory(directory: str, *, takes_chiefs: bool = True) -> str:
    """The directory that all processes see. All call it; for a directory that is known it costs nothing.

    Programs of TensorFlow give each worker a directory of its own, as all of them write there.

    Args:
      directory: What this process was given.
      takes_chiefs: A process that was given another directory than the chief takes the chief's, if it sees that.

    Raises:
      UnsharedDirectoryError: They see different ones.
    """
    peers = joined_peers()
    if peers is None:
        return directory
    if directory in _checked:
        return _checked[directory]
    told = gather("the directory", {"directory": directory, "token": uuid.uuid4().hex})[0]
    name = f".replicax-{told['token']}"
    places = dict.fromkeys((directory, told["directory"]) if takes_chiefs else (directory,))
    marker = os.path.join(directory, name)
    if peers.is_leader:
        _write_marker(marker)
    gather("the directory's mark", True)
    shared = _appears_in(list(places), name)
    seen = gather("who sees the directory", shared is not None)
    if peers.is_leader:
        os.remove(marker)
    blind = [name for name, sees in zip(peers.names, seen, strict=True) if not sees]
    if blind or shared is None:
        raise UnsharedDirectoryError(
            f"The directory {directory!r} is not the same for all: {peers.names[0]} has written a file there that {', '.join(blind)} "
            f"cannot see. {peers.names[0]} writes checkpoints, and all restore them: give a directory on a disk that all machines "
            "share (NFS, Lustre, a bucket that is mounted)."
        )
    _checked[directory] = shared
    return shared


def check_same_checkpoint(path: str | None, manifest: str) -> None:
    """Makes sure that all processes restore one checkpoint, wherever they see it. All call it.

    Raises:
      InvalidArgumentError: They were given different ones.
    """
    peers = joined_peers()
    given = gather("which checkpoint to restore", {"path": path, "manifest": zlib.crc32(manifest.encode())})
    if peers is None or all(each["manifest"] == given[0]["manifest"] for each in given):
        return
    listed = ", ".join(f"{name} {each['path']!r}" for name, each in zip(peers.names, given, strict=True))
    raise InvalidArgumentError(
        f"Checkpoint.restore was given different checkpoints: {listed}. All processes restore one, from a directory that they share; "
        "rx.CheckpointManager(...).restore_or_initialize() agrees on the newest that is whole."
    )


def wait_for_chiefs(path: str) -> None:
    """Waits a little for what the chief sees, which a network's file system may show to others later."""
    if not is_chief():
        _appears(path)


def _write_marker(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("checkpoints of one cluster")


def _appears(path: str) -> bool:
    return _appears_in([os.path.dirname(path)], os.path.basename(path)) is not None


def _appears_in(directories: Sequence[str], name: str) -> str | None:
    """The first of the directories in which a file appears within some time."""
    deadline = time.monotonic() + _SHARED_WITHIN_S
    while True:
        for directory in directories:
            if os.path.exists(os.path.join(directory, name)):
                return directory
            if os.path.isdir(directory):
                os.listdir(directory)  # or NFS goes on saying what it has said
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def together(what: str, action: Callable[[], Any]) -> Any:
    """Does something that each process does by itself, and raises in all if it fails in one.

    Raises:
      CheckpointError: It failed in another process.
    """
    failure: Exception | None = None
    result = None
    try:
        result = action()
    except Exception as error:
        failure = error
    texts = gather(what, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [(number, text) for number, text in enumerate(texts) if text is not None]
    if failed:
        peers = joined_peers()
        assert peers is not None
        number, text = failed[0]
        raise CheckpointError(f"{peers.names[number]} could not go on with {what}: {text}")
    return result


def write(what: str, task: Callable[[], Any]) -> None:
    """The chief does something that may take any time; the others wait for it. All call it.

    Raises:
      CheckpointError: It failed.
    """
    if joined_peers() is None:
        task()
        return
    background = Background()
    if is_chief():
        background.start(task)
    wait_for_chief(what, background)


def wait_for_chief(what: str, background: Background, timeout_s: float | None = None) -> None:
    """Waits until what the chief has begun in the background has ended; all call it, and hear how.

    Raises:
      CheckpointError: It failed.
      TimeoutError: It has not ended in ``timeout_s``, the chief's.
      ClusterFailureError: Another process is gone.
    """
    peers = joined_peers()
    if peers is None:
        background.wait(timeout_s)
        return
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        outcome, error = _outcome(background, deadline) if is_chief() else ("", None)
        try:
            told = gather(f"{what}: how it went", outcome)[0]
        except ClusterFailureError:
            if is_chief() and outcome == "":
                return  # it is written, whatever has become of the others; who needs them will hear
            raise
        if error is not None:
            raise error
        if told == _LATE:
            raise TimeoutError(f"{peers.names[0]} has not ended {what} after {timeout_s} s.")
        if told == "":
            return
        if told != _BUSY:
            raise CheckpointError(f"{peers.names[0]} could not go on with {what}: {told}")


def wait_for_saves(path: str) -> None:
    """Waits until the saves that this process has started in a directory are on the disk.

    Any process may call it alone.

    A process that does not write looks at the disk until the chief's checkpoint is there.

    Args:
      path: Of the directory, or of a checkpoint in it.

    Raises:
      CheckpointError: A save has failed. In a cluster it is raised until ``manager.wait()`` has told all processes.
      ClusterFailureError: Another process is gone.
    """
    for save in saves_under(path):
        save.wait(keeps_failure=not is_alone())


def wait_for_saves_together(path: str) -> None:
    """As ``wait_for_saves``, called by all processes: they wait for the chief, and all hear of a failure.

    Raises:
      CheckpointError: A save has failed; raised once.
      ClusterFailureError: Another process is gone.
    """

    def wait_here() -> None:
        for save in saves_under(path):
            save.wait()

    try:
        write("writing a checkpoint", wait_here)
    finally:
        if not is_chief():
            for save in saves_under(path):
                save.forget()


def follow_chief(path: str, part: str, before: object) -> None:
    """Waits until the chief's checkpoint is on the disk that both see.

    Args:
      path: Of the checkpoint.
      part: How the names of the directories begin in which it is written.
      before: What ``identity`` said of ``path`` before the chief began.

    Raises:
      CheckpointError: The chief has not written it.
      ClusterFailureError: Another process is gone.
    """
    peers = joined_peers()
    assert peers is not None
    directory, begin = os.path.dirname(path), os.path.basename(part)
    seen, changed_at = {}, time.monotonic()
    look_at = changed_at + _SHARED_WITHIN_S
    while identity(path) == before:
        peers.check()
        parts = [name for name in os.listdir(directory) if name.startswith(begin)]
        now = time.monotonic()
        if now > look_at:
            look_at = now + _SHARED_WITHIN_S
            files = _files_of(os.path.join(directory, name) for name in parts)
            if files != seen:
                seen, changed_at = files, now
            elif not files or now - changed_at > _UNCHANGED_WITHIN_S:
                raise CheckpointError(
                    f"{peers.names[0]} has not written the checkpoint {path!r}. Call manager.wait() in all processes: it raises "
                    "the reason."
                )
        time.sleep(0.05)


def _files_of(folders: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Returns the names, sizes and times of the files in some folders; files that are removed meanwhile are left
    out.
    """
    found = {}
    for top in folders:
        for folder, _, names in os.walk(top):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                with contextlib.suppress(OSError):
                    stat = os.stat(path)
                    found[path] = stat.st_size, stat.st_mtime_ns
    return found


def identity(path: str) -> object:
    """Something that changes when a checkpoint takes its place at ``path``; None where there is none."""
    try:
        stat = os.stat(os.path.join(path, MANIFEST))
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


_BUSY, _LATE = "busy", "late"


def _outcome(background: Background, deadline: float | None) -> tuple[str, Exception | None]:
    """What the chief tells: nothing, when it has ended; and what it raises."""
    left_s = _TELL_S if deadline is None else min(_TELL_S, max(0.0, deadline - time.monotonic()))
    try:
        background.wait(left_s)
    except TimeoutError:
        return (_LATE if deadline is not None and time.monotonic() >= deadline else _BUSY), None
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}", error
    return "", None
