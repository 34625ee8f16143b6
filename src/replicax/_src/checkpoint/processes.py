"""Agreement among the processes of a cluster on checkpoints: the writer, the directory, the checkpoint, and the
states.
"""

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

# A network file system may show a file of another machine late.
_SHARED_WITHIN_S = 10.0
# Checksums of data in memory take about a second per GB, during which no file changes.
_UNCHANGED_WITHIN_S = 300.0
# The interval at which the writer reports that it is still writing. Waiting processes give up on a silent writer.
_TELL_S = 1.0
_checked: dict[str, str] = {}  # given directory -> shared directory


def is_chief() -> bool:
    """True if this process writes checkpoints: one process of a cluster does."""
    peers = joined_peers()
    if peers is not None:
        return peers.is_leader
    return not context.has_strategy() or context.get_strategy().is_chief


def is_alone() -> bool:
    """True if no other process trains with this one."""
    return joined_peers() is None


def gather(topic: str, value: Any) -> list[Any]:
    """Returns the values of all processes that train together. All must call it."""
    peers = joined_peers()
    return (
        [value] if peers is None else peers.gather(f"checkpoint {topic}", value, what=f"to agree on {topic}")
    )


def process_number() -> int:
    """Returns the number of this process among those that train together."""
    peers = joined_peers()
    return 0 if peers is None else peers.number


def agreed_state(states: Sequence[Any]) -> list[Any]:
    """Returns the states of all processes as they are saved: one if all are equal."""
    return [states[0]] if all(state == states[0] for state in states) else list(states)


def own_state(label: str, states: Sequence[Any]) -> Any:
    """Returns the state for this process, from the saved ones.

    Raises:
      NotResumableError: Another number of processes had a state each.
    """
    if len(states) == 1:
        return states[0]
    peers = joined_peers()
    num_processes = 1 if peers is None else len(peers)
    if len(states) != num_processes:
        raise NotResumableError(
            f"The checkpoint has a state of {label} for each of {len(states)} processes, but now there are "
            f"{num_processes}. A dataset of which each worker reads a part resumes only with the same number "
            "of workers. A dataset with the same position in all (rx.data.from_arrays, AutoShardPolicy.DATA) "
            "resumes with any number."
        )
    return states[process_number()]


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
    told = gather("the directory", {"directory": directory, "token": uuid.uuid4().hex})[0]
    name = f".replicax-{told['token']}"
    places = dict.fromkeys((directory, told["directory"]) if takes_chiefs else (directory,))
    marker = os.path.join(directory, name)
    if peers.is_leader:
        _write_marker(marker)
    gather("the directory's mark", True)
    shared = _appears_in(list(places), name)
    seen = gather("which processes see the directory", shared is not None)
    if peers.is_leader:
        os.remove(marker)
    blind = [name for name, sees in zip(peers.names, seen, strict=True) if not sees]
    if blind or shared is None:
        raise UnsharedDirectoryError(
            f"The processes do not share the directory {directory!r}: {peers.names[0]} has written a file "
            f"there that {', '.join(blind)} cannot see. {peers.names[0]} writes checkpoints, and all restore "
            "them. Give a directory on a disk that all machines share (NFS, Lustre, a mounted bucket)."
        )
    _checked[directory] = shared
    return shared


def check_same_checkpoint(path: str | None, manifest: str) -> None:
    """Checks that all processes restore the same checkpoint, whatever its path is for them. All call it.

    Raises:
      InvalidArgumentError: They were given different ones.
    """
    peers = joined_peers()
    given = gather("which checkpoint to restore", {"path": path, "manifest": zlib.crc32(manifest.encode())})
    if peers is None or all(each["manifest"] == given[0]["manifest"] for each in given):
        return
    listed = ", ".join(f"{name} {each['path']!r}" for name, each in zip(peers.names, given, strict=True))
    raise InvalidArgumentError(
        f"Checkpoint.restore was given different checkpoints: {listed}. All processes must restore the same one, "
        "from a shared directory; rx.CheckpointManager(...).restore_or_initialize() agrees on the latest intact one."
    )


def wait_for_chiefs(path: str) -> None:
    """Waits a little for a file that the chief sees, because a network file system may show it to others late."""
    if not is_chief():
        _appears(path)


def _write_marker(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("checkpoints of one cluster")


def _appears(path: str) -> bool:
    return _appears_in([os.path.dirname(path)], os.path.basename(path)) is not None


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


def together(what: str, action: Callable[[], Any]) -> Any:
    """Runs an action in each process, and raises in all if it fails in one.

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
        raise CheckpointError(f"{peers.names[number]} failed at {what}: {text}")
    return result


def write(what: str, task: Callable[[], Any]) -> None:
    """Runs a task of any length in the chief, while the others wait for it. All call it.

    Raises:
      CheckpointError: The task failed.
    """
    if joined_peers() is None:
        task()
        return
    background = Background()
    if is_chief():
        background.start(task)
    wait_for_chief(what, background)


def wait_for_chief(what: str, background: Background, timeout_s: float | None = None) -> None:
    """Waits until the chief's background task has ended. All call it, and get the outcome.

    Raises:
      CheckpointError: The task failed.
      TimeoutError: It has not ended within the chief's ``timeout_s``.
      ClusterFailureError: Another process is lost.
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
                return  # it is written, whatever happened to the others; code that needs them gets the error
            raise
        if error is not None:
            raise error
        if told == _LATE:
            raise TimeoutError(f"{peers.names[0]} has not finished {what} within {timeout_s} s.")
        if told == "":
            return
        if told != _BUSY:
            raise CheckpointError(f"{peers.names[0]} failed at {what}: {told}")


def wait_for_saves(path: str) -> None:
    """Waits until the saves that this process has started in a directory are on the disk. A process may call it
    alone.

    A process that does not write polls the disk until the chief's checkpoint is there.

    Args:
      path: The directory, or a checkpoint in it.

    Raises:
      CheckpointError: A save has failed. In a cluster each call raises it until ``manager.wait()`` has told all
        processes.
      ClusterFailureError: Another process is lost.
    """
    for save in saves_under(path):
        save.wait(keeps_failure=not is_alone())


def wait_for_saves_together(path: str) -> None:
    """Does the same as ``wait_for_saves``, called by all processes: they wait for the chief, and all get its failure.

    Raises:
      CheckpointError: A save has failed; raised once.
      ClusterFailureError: Another process is lost.
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
    """Waits until the chief's checkpoint is on the shared disk.

    Args:
      path: The path of the checkpoint.
      part: The prefix of the directories in which it is being written.
      before: The ``identity`` of ``path`` before the chief started.

    Raises:
      CheckpointError: The chief has not written it.
      ClusterFailureError: Another process is lost.
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
                    f"{peers.names[0]} has not written the checkpoint {path!r}. Call manager.wait() in all "
                    "processes, which raises the reason."
                )
        time.sleep(0.05)


def _files_of(folders: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Returns the names, sizes and times of the files in some folders. It skips files that are removed in the
    meantime.
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
    """Returns a value that changes when a new checkpoint appears at ``path``; None if there is none."""
    try:
        stat = os.stat(os.path.join(path, MANIFEST))
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


_BUSY, _LATE = "busy", "late"


def _outcome(background: Background, deadline: float | None) -> tuple[str, Exception | None]:
    """Returns the chief's report, which is empty when the task has ended, and the error of the task."""
    left_s = _TELL_S if deadline is None else min(_TELL_S, max(0.0, deadline - time.monotonic()))
    try:
        background.wait(left_s)
    except TimeoutError:
        return (_LATE if deadline is not None and time.monotonic() >= deadline else _BUSY), None
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}", error
    return "", None
