"""``rx.Checkpoint``: saves and restores objects by name.

``rx.CheckpointManager`` keeps several checkpoints.

The public interface, as TensorFlow's ``tf.train.Checkpoint``::

    checkpoint = rx.Checkpoint(step=step, model=model, optimizer=optimizer)
    checkpoint.save("training/ckpt")       # -> ".../training/ckpt-1"; blocks until it is on the disk
    checkpoint.write("training/exact")     # -> ".../training/exact"
    status = checkpoint.restore(path)      # or read(path), for what write has written
    status.assert_consumed()               # assert_existing_objects_matched, assert_nontrivial_match, expect_partial

In a cluster every process makes the same calls. Only the chief writes, and each process restores on its own.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

from replicax._src import context, jax_compat
from replicax._src.checkpoint import processes
from replicax._src.checkpoint.arrays import ArrayLeaf
from replicax._src.checkpoint.contents import SavedObject
from replicax._src.checkpoint.errors import CheckpointWriteError
from replicax._src.checkpoint.graph import Graph, kind_of
from replicax._src.checkpoint.host_copy import HostArray, HostBuffers, copy_to_host
from replicax._src.checkpoint.orbax_files import orbax
from replicax._src.checkpoint.pytrees import Holder
from replicax._src.checkpoint.restoring import Restoration, advance_all
from replicax._src.checkpoint.saved import SavedCheckpoint
from replicax._src.checkpoint.status import LoadStatus
from replicax._src.checkpoint.tracked import Growing, Leaf, Parts, Trackable
from replicax._src.checkpoint.trees import StateLeaf
from replicax._src.checkpoint.writing import Snapshot, new_part, write
from replicax._src.errors import CrossReplicaContextError, InvalidArgumentError
from replicax._src.framework import trackings, use_imported
from replicax._src.options import path_of
from replicax._src.tracing.capture import current_capture

log = logging.getLogger("replicax")


@final
class Checkpoint(Trackable, Growing):
    """Saves and restores objects by the names that they have here.

    It saves ``rx.Variable`` and ``ShardedVariable``, Keras models, layers, optimizers, metrics and seed generators,
    ``flax.nnx`` modules, iterators of distributed datasets, objects with ``get_state`` and ``set_state``, and
    pytrees of arrays and numbers. A restore replaces a pytree: set ``checkpoint.state = state`` before saving, and
    ``state = checkpoint.state`` after restoring. Variables are identified by structure, that is, by names of
    attributes and positions in lists, and not by the numbered names of Keras. Attributes may be set later, too.

    Full values are saved under every strategy. So a checkpoint can be restored with other numbers of replicas,
    workers, parameter servers and shards, and under other strategies, and plain orbax can read it. For variables
    with a value on each replica (ON_READ), the combined value is saved, and also the components, which are restored
    if the number of replicas is the same.

    Args:
      root: An object to save under the name "root".
      **kwargs: The objects to save, by name.

    Raises:
      UntrackableError: An object cannot be saved.
      InvalidArgumentError: A name is reserved for the checkpoint itself.

    Source: TensorFlow, ``tf.train.Checkpoint``.

    >>> import replicax as rx, tempfile
    >>> v = rx.Variable([1.0, 2.0])
    >>> checkpoint = rx.Checkpoint(v=v)
    >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
    >>> _ = v.assign([0.0, 0.0])
    >>> _ = checkpoint.restore(path).assert_consumed()
    >>> v.numpy().tolist()
    [1.0, 2.0]
    """

    def __init__(self, root: Any = None, **kwargs: Any):
        self._holder = Holder(vars(self))
        self._restoration: Restoration | None = None
        self._waiting: set[Restoration] = set()  # also restorations of checkpoints that contain this one
        self._buffers = HostBuffers()
        self.save_counter: int = 0
        named = kwargs if root is None else {"root": root, **kwargs}
        for name, value in named.items():
            _check_name(name, is_counter_own=False)
            setattr(self, name, value)
        use_imported()
        self.parts()  # raises for an object that cannot be saved

    if TYPE_CHECKING:  # the tracked objects, by name

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setattr__(name, value)
        if name.startswith("_") or name == "save_counter":
            return
        try:
            if self._waiting:
                use_imported()  # the value may belong to a framework that was imported since
            advance_all(self._waiting)
        finally:
            self._waiting = {each for each in self._waiting if not each.has_ended}

    @property
    def is_growing(self) -> bool:
        """False, because it is unknown if attributes will be set later. Private."""
        return False

    def awaits(self, restoration: Restoration) -> None:
        """Makes a restoration continue when an attribute is set. Private."""
        self._waiting.add(restoration)

    def parts(self) -> Parts:
        """Returns the tracked objects by name, including leaves of pytrees."""
        names = [name for name in vars(self) if not name.startswith("_") and name != "save_counter"]
        return {name: self._holder.part(name) for name in names}

    # --- saving -------------------------------------------------------------------------------------------

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Writes a checkpoint, named by the prefix and a count. Every process calls it. It blocks until the checkpoint
        is written.

        Args:
          file_prefix: ``"training/ckpt"`` for ``training/ckpt-1``, ``training/ckpt-2``, …

        Returns:
          The path of the checkpoint, a directory.

        Raises:
          CheckpointWriteError: The disk is full, or read-only. Earlier checkpoints are unchanged.
          CrossReplicaContextError: It is called in a replica function, or in an ``rx.function``.
          DonatedError: An array of a pytree has been donated to a program.
          UnsharedDirectoryError: The processes do not share the directory.
          MissingExtraError: orbax is not installed.
        """
        prefix = path_of(file_prefix, "file_prefix", "training/ckpt")
        self.save_counter += 1
        try:
            return self._write(f"{prefix}-{self.save_counter}", self.save_counter)
        except BaseException:
            self.save_counter -= 1
            raise

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Works like ``save``, but writes at exactly this path, and does not count.

        An existing checkpoint is replaced once the new one is complete.
        """
        return self._write(path_of(file_prefix, "file_prefix", "training/exact"), self.save_counter)

    def _write(self, path: str, number: int) -> str:
        _check_context("save")
        path = os.path.abspath(path)
        processes.check_shared(os.path.dirname(path))
        task = self.snapshot(path, number=number)
        processes.write(f"writing {os.path.basename(path)}", task)
        return path

    def snapshot(
        self, path: str, *, number: int = 0, order: int = 0, metrics: Any = None
    ) -> Callable[[], Any]:
        """Copies everything to the host. Returns a function that writes it, in any thread. Every process calls it.

        Training may continue after this call. Private; ``save``, ``write`` and ``CheckpointManager`` use it.
        """
        _check_context("save")
        use_imported()
        orbax()
        self._tell_of_unused()
        writes, part, failure = _opened(path)
        try:
            objects, arrays, states = self._copied(part, is_kept=writes)
        except BaseException:
            if writes:
                shutil.rmtree(part, ignore_errors=True)
            raise
        if not writes:
            return functools.partial(_end_without_writing, failure)
        snapshot = Snapshot(objects, arrays, states, number, order, time.time(), metrics)
        return lambda: write(path, part, snapshot)

    def _copied(
        self, part: str, *, is_kept: bool
    ) -> tuple[tuple[SavedObject, ...], dict[str, HostArray], dict[str, list[Any]]]:
        """Returns the graph of the tracked objects, and copies of their arrays and states."""
        graph = Graph(self)
        for node in graph.nodes:
            for tracking in trackings():
                tracking.prepare(node.object)
        leaves = dict(graph.leaves())
        states = self._states(leaves)
        arrays = copy_to_host(
            {key: leaf for key, leaf in leaves.items() if isinstance(leaf, ArrayLeaf)},
            self._buffers,
            part,
            is_kept=is_kept,
        )
        known = arrays.keys() | states.keys()
        objects = tuple(
            SavedObject(dict(node.children), node.key if node.leaf is not None else "", kind_of(node.object))
            for node in graph.nodes
        )
        valueless = {node.key for node in graph.nodes if node.leaf is not None} - known
        return _without(objects, valueless), arrays, states

    def _states(self, leaves: Mapping[str, Leaf]) -> dict[str, list[Any]]:
        own = {key: leaf.take() for key, leaf in leaves.items() if isinstance(leaf, StateLeaf)}
        of_all = processes.gather("the states", own)
        return {key: processes.agreed_state([states[key] for states in of_all]) for key in own}

    def _tell_of_unused(self) -> None:
        restoration = self._restoration
        if restoration is None:
            return
        unused = restoration.unrestored()
        if unused and not restoration.is_asked:
            log.warning(
                "Values of the checkpoint %r were not used: %s%s. If this is intended, call expect_partial() "
                "on the result of restore(). Otherwise call assert_consumed() to see why.",
                restoration.saved.path,
                ", ".join(unused[:5]),
                f" and {len(unused) - 5} more" if len(unused) > 5 else "",
            )
        restoration.is_asked = True

    @property
    def path_in_use(self) -> str | None:
        """The path of a checkpoint from which objects will still be restored when they are made."""
        restoration = self._restoration
        return None if restoration is None or restoration.is_whole else restoration.saved.path

    def release(self) -> None:
        """Frees the memory of the last saved copy. The next save allocates it again."""
        self._buffers.clear()

    # --- restoring ------------------------------------------------------------------------------------------

    def restore(self, save_path: str | os.PathLike[str] | None) -> LoadStatus:
        """Restores a checkpoint that ``save`` has written, and its count. Every process calls it.

        It first verifies all files, and compares shapes and dtypes. Then it restores either all values that have a
        counterpart, or nothing. Values of objects that do not exist yet (an optimizer's slots, layers that are not
        built) are restored when these are made.

        Args:
          save_path: The result of ``save``, or of ``rx.checkpoint.latest_checkpoint(directory)``. Does nothing if
            it is None, as in TensorFlow, which is the result if there is no checkpoint.

        Returns:
          A ``LoadStatus``. Its ``assert_consumed()`` checks that no value is missing on either side.

        Raises:
          CheckpointNotFoundError: There is no checkpoint.
          CorruptCheckpointError: Files are missing, truncated or changed; the message names them.
          CheckpointMismatchError: Variables have other shapes or dtypes; the message names them.
          InvalidArgumentError: Processes were given different checkpoints; raised in all.
          CheckpointError: Another process could not restore the checkpoint.
          CrossReplicaContextError: It is called in a replica function, or in an ``rx.function``.
        """
        return self._read(save_path, is_counting=True)

    def read(self, save_path: str | os.PathLike[str] | None) -> LoadStatus:
        """Works like ``restore``, for a checkpoint that ``write`` has written. The count stays."""
        return self._read(save_path, is_counting=False)

    def _read(self, save_path: str | os.PathLike[str] | None, *, is_counting: bool) -> LoadStatus:
        _check_context("restore")
        path = (
            None if save_path is None else os.path.abspath(path_of(save_path, "save_path", "training/ckpt-3"))
        )
        if path is not None or not processes.is_alone():
            processes.wait_for_saves_together(path or "")
        saved = processes.together("opening a checkpoint", lambda: None if path is None else _verified(path))
        processes.check_same_checkpoint(path, "" if saved is None else saved.contents.to_text())
        if saved is None:
            return LoadStatus(None)
        status = processes.together(
            f"restoring {os.path.basename(saved.path)}", lambda: self.restore_saved(saved)
        )
        if is_counting:
            self.save_counter = saved.contents.number
        return status

    def restore_saved(self, saved: SavedCheckpoint, *, is_strict: bool = False) -> LoadStatus:
        """Restores a verified checkpoint. A strict restore refuses a checkpoint of another model. Private."""
        _check_context("restore")
        use_imported()
        restoration = Restoration(saved, self, processes.own_state)
        restoration.advance(is_strict=is_strict)
        if self._restoration is not None:  # a failure changes nothing: the previous restoration stays active
            self._restoration.drop()
        self._restoration = None if restoration.is_whole else restoration
        return LoadStatus(restoration)

    def __repr__(self) -> str:
        names = ", ".join(name for name in vars(self) if not name.startswith("_") and name != "save_counter")
        return f"Checkpoint({names}, save_counter={self.save_counter})"


_OWN_NAMES = {"_holder", "_restoration", "_waiting", "_buffers"}


def _check_name(name: str, *, is_counter_own: bool = True) -> None:
    """Refuses names that are not saved, or would hide a method."""
    is_taken = name in vars(Checkpoint) or (name == "save_counter" and not is_counter_own)
    if is_taken or (name.startswith("_") and name not in _OWN_NAMES):
        why = "Checkpoint uses this name" if is_taken else "names that begin with an underscore are reserved"
        raise InvalidArgumentError(
            f"rx.Checkpoint cannot save an object as {name!r}: {why}. Give it another name, such as "
            f"'my_{name.lstrip('_')}'."
        )


def _verified(path: str) -> SavedCheckpoint:
    saved = SavedCheckpoint(path)
    saved.verify()
    return saved


def _opened(path: str) -> tuple[bool, str, CheckpointWriteError | None]:
    """Returns if this process writes, the directory, and an error, which in a cluster is raised after the copy, by
    all.
    """
    if not processes.is_chief():
        return False, os.path.dirname(path), None
    try:
        return True, new_part(path), None
    except CheckpointWriteError as error:
        if processes.is_alone():
            raise
        return False, os.path.dirname(path), error


def _end_without_writing(failure: CheckpointWriteError | None) -> None:
    if failure is not None:
        raise failure


def _check_context(what: str) -> None:
    if context.in_replica_function():
        raise CrossReplicaContextError(
            f"Checkpoint.{what} was called in a function that strategy.run runs. Call it between steps, outside of run."
        )
    if current_capture() is not None or not jax_compat.is_evaluating():
        raise CrossReplicaContextError(
            f"Checkpoint.{what} was called in a function that is traced (an rx.function, or jax.jit). It "
            "would run once, at tracing, and not in each call. Call it outside."
        )


def _without(objects: tuple[SavedObject, ...], keys: set[str]) -> tuple[SavedObject, ...]:
    """Returns the graph without leaves that have no value yet."""
    dropped = {number for number, node in enumerate(objects) if node.key and node.key in keys}
    return tuple(
        SavedObject(
            {name: child for name, child in node.children.items() if child not in dropped},
            "" if number in dropped else node.key,
            node.kind,
        )
        for number, node in enumerate(objects)
    )
