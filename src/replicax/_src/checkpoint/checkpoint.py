"""``rx.Checkpoint``: saves and restores objects by name.

``rx.CheckpointManager`` keeps several checkpoints.

The public interface, as TensorFlow's ``tf.train.Checkpoint``::

    checkpoint = rx.Checkpoint(step=step, model=model, optimizer=optimizer)
    checkpoint.save("training/ckpt")       # -> ".../training/ckpt-1"; blocks until it is on the disk
    checkpoint.write("training/exact")     # -> ".../training/exact"
    status = checkpoint.restore(path)      # or read(path), for what write has written
    status.assert_consumed()               # assert_existing_objects_matched, assert_nontrivial_match, expect_partial

In a cluster every process makes the same calls. Each writes what its devices hold, and reads what they need.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from replicax._src.checkpoint import agreement
from replicax._src.checkpoint.array_files import tensorstore
from replicax._src.checkpoint.array_leaves import ArrayLeaf, VariableLeaf
from replicax._src.checkpoint.boundary import objects_of
from replicax._src.checkpoint.contents import Contents, SavedObject
from replicax._src.checkpoint.directory import later_time
from replicax._src.checkpoint.errors import enumerated
from replicax._src.checkpoint.graph import Graph
from replicax._src.checkpoint.host_buffers import HostBuffers
from replicax._src.checkpoint.host_copy import HostCopy, copy_to_host, memory_for
from replicax._src.checkpoint.in_memory import ReadableCheckpoint, described
from replicax._src.checkpoint.load_status import LoadStatus
from replicax._src.checkpoint.pytrees import Holder
from replicax._src.checkpoint.restoring import Restoration, advance_all
from replicax._src.checkpoint.same_objects import SavedKinds
from replicax._src.checkpoint.saved import SavedCheckpoint
from replicax._src.checkpoint.tracked import Growing, Parts, Trackable, escaped
from replicax._src.checkpoint.trees import StateLeaf
from replicax._src.checkpoint.writing import PendingCheckpoint, check_space, new_part, write, write_error
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.control.standing import Moment
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.held_state import arrays_of_programs
from replicax._src.lowering.spmd import BindingGroup
from replicax._src.scope import context
from replicax._src.tracing.bindings import is_adopted
from replicax._src.tracing.capture import current_capture
from replicax._src.values.framework import trackings, use_imported
from replicax._src.vocabulary.errors import CrossReplicaContextError, InvalidArgumentError
from replicax._src.vocabulary.options import path_of

log = logging.getLogger("replicax")


@final
@dataclass(frozen=True)
class CopiedState:
    """The state on the host. A call writes it, in any thread, and returns the number of bytes.

    Attributes:
      write: Writes it.
      save: The identity of the save, equal in all processes.
      moment: The moment at which the save has begun.
    """

    write: Callable[[], int]
    save: str = ""
    moment: Moment = field(default_factory=Moment)

    def __call__(self) -> int:
        return self.write()


@final
class Checkpoint(Trackable, Growing):
    """Saves and restores objects by the names that they have here.

    It saves ``rx.Variable`` and ``ShardedVariable``, Keras models, layers, optimizers, metrics and seed generators,
    ``flax.nnx`` modules, iterators of distributed datasets, objects with ``get_state`` and ``set_state``, and
    pytrees of arrays and numbers. A restore replaces a pytree: set ``checkpoint.state = state`` before saving, and
    ``state = checkpoint.state`` after restoring. Variables are identified by structure, that is, by names of
    attributes and positions in lists, and not by the numbered names of Keras. Attributes may be set later, too.

    No process needs memory for a full value that is divided: it copies and writes what its devices hold. A checkpoint
    can be restored with other numbers of replicas, workers, parameter servers and shards, and under other strategies.
    Of variables with a value on each replica (ON_READ), these components are saved. They are restored if the number of
    replicas is the same, and otherwise the value that they combine to.

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
        self._time_s = 0.0  # of the latest checkpoint that it has saved or restored
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

    def awaits(self, restoration: Restoration) -> None:
        """Makes a restoration continue when an attribute is set. Private."""
        self._waiting.add(restoration)

    def parts(self) -> Parts:
        """Returns the tracked objects by name, including leaves of pytrees."""
        names = [name for name in vars(self) if not name.startswith("_") and name != "save_counter"]
        return {escaped(name): self._holder.part(name) for name in names}

    # --- saving -------------------------------------------------------------------------------------------

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Writes a checkpoint, named by the prefix and a count. Every process calls it. It blocks until the checkpoint
        is written.

        Args:
          file_prefix: ``"training/ckpt"`` for ``training/ckpt-1``, ``training/ckpt-2``, …

        Returns:
          The path of the checkpoint, a directory.

        Raises:
          CheckpointWriteError: The disk is full or read-only, or something else than a checkpoint is at the path.
            Earlier checkpoints are unchanged.
          CrossReplicaContextError: It is called in a replica function, or in an ``rx.function``.
          DonatedError: An array of a pytree has been donated to a program.
          InvalidArgumentError: The processes save different objects; raised in all.
          UnsharedDirectoryError: The processes do not share the directory.
          MissingExtraError: tensorstore is not installed.
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
        agreement.check_shared(os.path.dirname(path))
        self.snapshot(path, number=number)()
        return path

    def snapshot(
        self, path: str, *, number: int = 0, metrics: Any = None, is_own: bool = False
    ) -> CopiedState:
        """Copies to the host what this process writes. Returns a function that writes it, in any thread. Every process
        calls both. With ``is_own`` each writes a checkpoint of its own, of all that its devices hold.

        Training may continue after this call. Private; ``save``, ``write`` and ``CheckpointManager`` use it.
        """
        _check_context("save")
        use_imported()
        tensorstore()
        self._tell_of_unused()
        if not _takes_part():
            return CopiedState(lambda: 0)
        self._buffers.reserve()
        try:
            snapshot = self._agreed(path, is_own, number, metrics)
        except BaseException:
            self._buffers.free()
            raise

        def run() -> int:
            try:
                return write(path, snapshot)
            finally:
                self._buffers.free()

        return CopiedState(run, snapshot.contents.save, snapshot.moment)

    def prepare_memory(self) -> None:
        """Allocates the memory of the next ``snapshot`` in a thread, as far as the values exist. It does not
        communicate. Private; ``CheckpointManager`` uses it.
        """
        if not _takes_part():
            return
        arrays = {key: leaf for key, leaf in Graph(self).leaves() if isinstance(leaf, ArrayLeaf)}
        has_rest = agreement.is_chief() or agreement.tolerates_failures()
        self._buffers.prepare(memory_for(arrays, agreement.process_number(), has_rest=has_rest))

    def _agreed(self, path: str, is_own: bool, number: int, metrics: Any) -> PendingCheckpoint:
        """Returns what will be saved, of which all processes have been told. It communicates once, and once more if the
        chief dies meanwhile.
        """
        part, time_s = "", 0.0
        try:

            def begin() -> tuple[tuple[SavedObject, ...], HostCopy, dict[str, Any]]:
                nonlocal part, time_s
                if is_own or agreement.is_chief():
                    part, time_s = new_part(path), self._later_time(os.path.dirname(path))
                return self._copied(path, part, is_own)

            while True:
                (objects, copy, states), told = agreement.gather_results(
                    f"copying for {os.path.basename(path)}",
                    begin,
                    lambda copied: {
                        "path": path,
                        "part": part,
                        "time_s": time_s,
                        "objects": SavedKinds.of_copy(copied[1].arrays, copied[2]).digest,
                        "turns": copied[1].turns,
                        "states": copied[2],
                    },
                )
                leading = [number for number, each in zip(told.numbers, told, strict=True) if each["part"]]
                if leading:
                    break
            _check_equal(told, SavedKinds.of_copy(copy.arrays, states))
        except BaseException:
            if part:
                shutil.rmtree(part, ignore_errors=True)
            raise
        agreed = {
            key: agreement.agreed_state([each["states"].get(key) for each in told], told.numbers)
            for key in states
        }
        chiefs = told[told.numbers.index(leading[0])]
        if not is_own:
            time_s = self._time_s = chiefs["time_s"]
        contents = Contents(
            objects,
            copy.arrays,
            agreed,
            save=os.path.basename(chiefs["part"]),
            processes=agreement.names(),
            number=number,
            time_s=time_s,
            metrics=metrics,
            part_of=agreement.process_number() if is_own else None,
        )
        return PendingCheckpoint(
            part if is_own else chiefs["part"],
            contents,
            copy.pieces,
            copy.written,
            leading[0],
            agreement.tolerates_failures(),
        )

    def in_memory(self, number: int) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Returns the checkpoint as the arguments of ``CheckpointInMemory``. No save may be running. It does not
        communicate. The arrays stay unchanged until the next save. Private.
        """
        _check_context("save")
        use_imported()
        self._buffers.reserve()
        try:
            objects, copy, states = self._copied("", "", False, is_alone=True)
        finally:
            self._buffers.free()
        contents = Contents(
            objects,
            copy.arrays,
            {key: [state] for key, state in states.items()},
            save="",
            processes=agreement.names(),
            number=number,
            time_s=self._time_s,
        )
        return described(contents, copy.pieces, self._compared())

    def _compared(self) -> dict[str, tuple[bool, bool]]:
        """Returns for each variable whether other processes need no comparison of its value; see ``note_compared``."""
        graph = Graph(self)
        BindingGroup.update_bindings()  # it puts off noting what the last program has written
        in_loops, of_programs = _values_in_loops(graph), arrays_of_programs()
        compared: dict[str, tuple[bool, bool]] = {}
        for key, leaf in graph.leaves():
            if isinstance(leaf, VariableLeaf):
                value = in_loops.get(id(leaf.of)) if leaf.stored is None else leaf.stored
                compared[key] = is_adopted(leaf.binding), id(value) in of_programs
        return compared

    def _later_time(self, directory: str) -> float:
        """Returns the time, or a little more than that of the latest checkpoint if the clock was set back."""
        self._time_s = later_time(directory, self._time_s)
        return self._time_s

    def _copied(
        self, path: str, part: str, is_own: bool, *, is_alone: bool = False
    ) -> tuple[tuple[SavedObject, ...], HostCopy, dict[str, Any]]:
        """Returns the graph of the tracked objects, and copies of their arrays and states.

        With ``is_alone`` only this process copies. A framework's loop then keeps its values: if one process gave them
        to the variables, it alone would compare them before the next step.
        """
        graph = Graph(self)
        in_loops = _values_in_loops(graph) if is_alone else {}
        for node in () if is_alone else graph.nodes:
            for tracking in trackings():
                tracking.prepare(node.object)
        leaves = dict(graph.leaves())
        states = {key: leaf.take() for key, leaf in leaves.items() if isinstance(leaf, StateLeaf)}
        arrays = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, ArrayLeaf)}
        try:
            copy = copy_to_host(
                arrays,
                self._buffers,
                part,
                agreement.process_number(),
                is_own=is_own,
                has_rest=bool(part) or agreement.tolerates_failures(),
                in_loops=in_loops,
            )
        except OSError as error:
            raise write_error(path, error) from error
        if part:
            check_space(path, copy.num_bytes)
        known = copy.arrays.keys() | states.keys()
        objects = objects_of(graph, known)  # other leaves have no value yet
        return objects, copy, states

    def _tell_of_unused(self) -> None:
        restoration = self._restoration
        if restoration is None:
            return
        unused = restoration.unrestored()
        if unused and not restoration.is_asked:
            log.warning(
                "Values of the checkpoint %r were not used: %s. If this is intended, call expect_partial() "
                "on the result of restore(). Otherwise call assert_consumed() to see why.",
                restoration.saved.path,
                enumerated(unused),
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

        It first compares shapes and dtypes, and reads into memory. Reading verifies: each process reads what its
        devices need, and what nobody needs is only verified. Then it restores either all values that have a
        counterpart, or nothing. Values of objects that do not exist yet (an optimizer's slots, layers that are not
        built) are restored when these are made. A warning names the program's values that the checkpoint lacks.

        Args:
          save_path: The result of ``save``, or of ``rx.checkpoint.latest_checkpoint(directory)``. Does nothing if
            it is None, as in TensorFlow, which is the result if there is no checkpoint.

        Returns:
          A ``LoadStatus``. Its ``assert_consumed()`` checks that no value is missing on either side.

        Raises:
          CheckpointNotFoundError: There is no checkpoint.
          CorruptCheckpointError: Files are missing, truncated or changed; the message names them.
          CheckpointMismatchError: Variables have other shapes or dtypes, or no value has a counterpart; the message
            names them.
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
        if path is None and agreement.is_alone():
            return LoadStatus(None)
        saved = self._opened(path)
        if saved is None:
            return LoadStatus(None)
        status = self.restore_saved(saved)
        if is_counting:
            self.save_counter = saved.contents.number
        return status

    def _opened(self, path: str | None) -> SavedCheckpoint | None:
        def open_here() -> SavedCheckpoint | None:
            if path is None:
                return None
            agreement.finish_saves(path)
            return SavedCheckpoint(path)

        def identity(saved: SavedCheckpoint | None) -> list[Any]:
            return [path, None if saved is None else [saved.contents.save, saved.contents.time_s]]

        saved, told = agreement.gather_results("opening a checkpoint", open_here, identity)
        if any(each[1] != told[0][1] for each in told):
            listed = ", ".join(f"{name} {given!r}" for name, (given, _) in told.named())
            raise InvalidArgumentError(
                f"Checkpoint.restore was given different checkpoints: {listed}. All processes must restore the same "
                "one, from a shared directory; rx.CheckpointManager(...).restore_or_initialize() agrees on the latest "
                "intact one."
            )
        return saved

    def restore_saved(self, saved: ReadableCheckpoint, *, is_strict: bool = False) -> LoadStatus:
        """Restores a checkpoint. Every process calls it. A strict restore refuses a checkpoint of another model.
        Private.
        """
        _check_context("restore")
        use_imported()
        restoration = Restoration(saved, self, agreement.own_state, agreement.share_of_verifying())
        what = f"restoring {os.path.basename(saved.path)}"
        restoration.advance(is_strict=is_strict, together=functools.partial(agreement.together, what))
        if self._restoration is not None:  # a failure changes nothing: the previous restoration stays active
            self._restoration.drop()
        self._restoration = None if restoration.is_whole else restoration
        self._time_s = max(self._time_s, saved.contents.time_s)
        return LoadStatus(restoration)

    def __repr__(self) -> str:
        names = ", ".join(name for name in vars(self) if not name.startswith("_") and name != "save_counter")
        return f"Checkpoint({names}, save_counter={self.save_counter})"


def _takes_part() -> bool:
    """False if other processes save what this one has."""
    return (agreement.is_chief() or not agreement.is_alone()) and not agreement.is_solo()


def _values_in_loops(graph: Graph) -> dict[int, Any]:
    """Returns the values that a framework's loop holds in place of variables, by the identity of the variable."""
    readers = (tracking.in_loop(node.object) for node in graph.nodes for tracking in trackings())
    return {number: value for read in readers if read is not None for number, value in read().items()}


_OWN_NAMES = {"_holder", "_restoration", "_waiting", "_buffers", "_time_s"}


def _check_name(name: str, *, is_counter_own: bool = True) -> None:
    """Refuses names that are not saved, or would hide a method."""
    is_taken = name in vars(Checkpoint) or (name == "save_counter" and not is_counter_own)
    if is_taken or (name.startswith("_") and name not in _OWN_NAMES):
        why = "Checkpoint uses this name" if is_taken else "names that begin with an underscore are reserved"
        raise InvalidArgumentError(
            f"rx.Checkpoint cannot save an object as {name!r}: {why}. Give it another name, such as "
            f"'my_{name.lstrip('_')}'."
        )


def _check_equal(told: GatheredValues, own: SavedKinds) -> None:
    """Checks that all processes save the same."""
    names = [os.path.basename(each["path"]) for each in told]
    listed = ", ".join(f"{process} {name!r}" for process, name in told.with_values(names).named())
    if len({*names}) > 1:
        raise InvalidArgumentError(
            f"The processes save different checkpoints: {listed}. All processes must make the same calls in the same "
            "order: save after the same step in each of them."
        )
    digests = [each["objects"] for each in told]
    tell = functools.partial(agreement.gather, "which objects are saved")
    own.check(names[0], digests, tell)
    if len({each["turns"] for each in told}) > 1:
        raise InvalidArgumentError(
            f"The processes save arrays with different layouts as {names[0]!r}. Make the variables in the scope of the same "
            "strategy in each of them."
        )


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
