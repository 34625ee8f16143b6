"""The cache of programs, by the identity of a function and the signature of its arguments.

It warns once, with the reason, about a function that is traced too often.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from replicax._src.cluster.progress import batch_of_other_size, compiling
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing import key

log = logging.getLogger("replicax")
_TRACES_BEFORE_WARNING = 5
_MAX_VERSIONS = 16  # versions of one function that differ in closures or globals
T = TypeVar("T")


class ArgumentLeaf(NamedTuple):
    """The form in which one leaf of the arguments enters a program.

    Attributes:
      kind: "row" (PerReplica: device r holds row r), "whole" (replicated), or "static".
      shape, dtype, weak_type: What the program's function sees (padded, if the shapes differ).
      shapes: The shape on each replica, if they differ.
      value: The key of a static leaf; see ``static_leaf``.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: Any = None
    weak_type: bool = False
    shapes: tuple[tuple[int, ...], ...] | None = None
    value: Any = None

    def aval(self, replica_id: int = 0) -> Any:
        """Returns the abstract array that the replica's program takes."""
        shape = self.shape if self.shapes is None else self.shapes[replica_id]
        return jax_compat.shaped(shape, self.dtype, self.weak_type)

    def thaw(self) -> Any:
        """Returns the static leaf itself."""
        return self.value[1] if isinstance(self.value, tuple) else self.value.content

    def differs_in_size(self, other: ArgumentLeaf) -> bool:
        """True for an array of the same dtype and rank that has another shape."""
        is_same_array = (self.kind, self.dtype, len(self.shape)) == (
            other.kind,
            other.dtype,
            len(other.shape),
        )
        return is_same_array and (self.shape, self.shapes) != (other.shape, other.shapes)

    def num_rows(self, num_replicas: int) -> int:
        """Returns the size of the first dim of an array, on all replicas together."""
        if self.shapes is not None:
            return sum(shape[0] for shape in self.shapes)
        return self.shape[0] * (num_replicas if self.kind == "row" else 1)

    def differs_in_rows(self, other: ArgumentLeaf) -> bool:
        """True for an array that differs in nothing but the size of its first dim."""
        if self.kind == "static" or not (self.shape and other.shape):
            return False
        return self._replace(shape=self.shape[1:], shapes=None) == other._replace(
            shape=other.shape[1:], shapes=None
        )

    def __str__(self) -> str:
        if self.kind == "static":
            return repr(self.value[1]) if isinstance(self.value, tuple) else repr(self.value)
        return f"{self.dtype}{list(self.shape)}"


def array_leaf(array: Any) -> ArgumentLeaf:
    """Returns the leaf of a replicated array."""
    dtype = array.dtype
    if isinstance(dtype, np.dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return _whole_leaf(array.shape, dtype, bool(getattr(array, "weak_type", False)))


@functools.lru_cache(maxsize=4096)
def _whole_leaf(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> ArgumentLeaf:
    return ArgumentLeaf("whole", tuple(shape), dtype, weak_type)


def static_leaf(value: Any) -> ArgumentLeaf:
    """Returns the leaf of a Python value that is a constant of the program.

    Numbers and strings are compared by type and value (``1``, ``1.0`` and ``True`` select different programs), other
    objects by identity.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return ArgumentLeaf("static", value=(type(value), value))
    return ArgumentLeaf("static", value=_ById(value))


class _ById:
    """An object compared by identity; held weakly where Python can."""

    __slots__ = ("_id", "_kind", "_reference")

    def __init__(self, content: Any):
        self._id = id(content)
        self._kind = type(content).__name__
        try:
            self._reference: Callable[[], Any] = weakref.ref(content)
        except TypeError:
            self._reference = lambda: content

    @property
    def content(self) -> Any:
        return self._reference()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other._id == self._id and other.content is self.content

    def __hash__(self) -> int:
        return self._id

    def __repr__(self) -> str:
        return f"a {self._kind}"


class FunctionPrograms(Generic[T]):
    """The programs of one function, by signature."""

    def __init__(self) -> None:
        self.anchors: Any = None
        self.function: Any = None  # held weakly
        self.shallow: dict[Any, T] = {}  # by a signature that is quick to make; only the runner uses it
        self._programs: dict[Any, tuple[T, Any]] = {}
        self._traced_floats: set[int] = set()
        self._static_floats: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, signature: Any) -> T | None:
        """Returns the program for ``signature``, if there is one."""
        found = self._programs.get(signature)
        return None if found is None else found[0]

    def note_new_structure(self, error: Exception, tree: Any) -> None:
        """Notes on the error of a failed function that the structure of its arguments has changed."""
        earlier = [signature[0] for signature in self._programs]
        if earlier and tree not in earlier:
            now, before = (
                str(each.children()[0]).removeprefix("PyTreeDef")[1:-1] for each in (tree, earlier[-1])
            )
            if now != before:
                error.add_note(
                    f"(The structure of the arguments has changed: args was {before}, and is {now} in this call.)"
                )

    def put(self, signature: Any, described: Sequence[ArgumentLeaf], program: T) -> None:
        """Keeps a program until an object in its signature is deleted."""
        objects = [leaf.thaw() for leaf in described if isinstance(leaf.value, _ById)]
        anchors = key.Anchors(objects, lambda: self._programs.pop(signature, None))
        self._programs[signature] = (program, anchors)
        for position, leaf in enumerate(described):
            if isinstance(leaf.value, tuple) and leaf.value[0] is float:
                self._static_floats.setdefault(position, leaf.value[1])

    def is_varying(self, position: int, value: float) -> bool:
        """Returns True if a Python float has had two values at this position. It is then an input, not a constant."""
        if position in self._traced_floats:
            return True
        if self._static_floats.setdefault(position, value) == value:
            return False
        self._traced_floats.add(position)
        return True


class ProgramCache(Generic[T]):
    """Caches the programs of all functions that one owner runs."""

    # Versions of deleted functions, such as those of a notebook's cell that was edited since. An attribute: functions are
    # deleted at the end of the interpreter too, when the names of this module are None.
    _max_deleted = 64

    def __init__(self) -> None:
        self._functions: dict[Any, FunctionPrograms[T]] = {}
        self._versions: dict[Any, collections.deque[Any]] = {}
        self._num_traces: dict[Any, int] = {}
        self._newest: dict[Any, _Version] = {}
        self._deleted: dict[Any, Any] = {}  # the families of deleted functions by their keys, oldest first

    def __len__(self) -> int:
        return sum(len(programs) for programs in self._functions.values())

    def programs_of(
        self, fn: Callable[..., Any], lifted: Collection[str] | None = None
    ) -> FunctionPrograms[T]:
        """Returns the programs of the current version of ``fn``; see ``function_key``."""
        fn_key = key.function_key(fn, lifted=lifted)
        programs = self._functions.get(fn_key)
        if programs is None:
            objects: list[Any] = []
            family = family_of(fn)
            key.function_key(fn, objects)
            programs = FunctionPrograms[T]()
            self._functions[fn_key] = programs
            self._forget_old_versions(fn, fn_key)
            programs.anchors = key.Anchors(objects, lambda: self._functions.pop(fn_key, None))
            programs.function = _weakly(fn, lambda: self._note_deleted(fn_key, family))
        return programs

    def _note_deleted(self, fn_key: Any, family: Any) -> None:
        # Functions that are made for each call, and are equal, share programs. So these outlive their function.
        self._deleted.pop(fn_key, None)
        self._deleted[fn_key] = family
        if len(self._deleted) > self._max_deleted:
            oldest = next(iter(self._deleted))
            family = self._deleted.pop(oldest)
            self._functions.pop(oldest, None)
            versions = self._versions.get(family)
            if versions is not None and not any(version in self._functions for version in versions):
                for each in (self._versions, self._num_traces, self._newest):
                    each.pop(family, None)

    def _forget_old_versions(self, fn: Callable[..., Any], fn_key: Any) -> None:
        # A program holds its variables. If the key names a variable, nothing else would release the two.
        versions = self._versions.setdefault(family_of(fn), collections.deque())
        versions.append(fn_key)
        if len(versions) > _MAX_VERSIONS:
            self._functions.pop(versions.popleft(), None)

    def first_call(
        self,
        fn: Callable[..., Any],
        described: Sequence[ArgumentLeaf],
        *,
        num_replicas: int | None,
        of: str = "",
    ) -> contextlib.AbstractContextManager[None]:
        """Surrounds the trace of a program, ``keep``, and its first run: shows that it is compiled, and why again.

        Args:
          num_replicas: The number of replicas; None if it is not known yet.
          of: A text that messages put before the name of ``fn``.
        """
        again = self._reason_to_compile_again(fn, described, num_replicas)
        return compiling(of + key.name_of(fn), num_replicas, again)

    def keep(
        self,
        fn: Callable[..., Any],
        programs: FunctionPrograms[T],
        signature: Any,
        described: Sequence[ArgumentLeaf],
        program: T,
        paths: Callable[[], Sequence[str]],
    ) -> T:
        """Caches a program that was just traced, and returns it.

        Args:
          programs: The programs of the version of ``fn`` before the trace.
          paths: Returns the names of the leaves for messages.
        """
        programs.put(signature, described, program)
        self.report_trace(fn, described, paths)
        return program

    def _reason_to_compile_again(
        self, fn: Callable[..., Any], described: Sequence[ArgumentLeaf], num_replicas: int | None
    ) -> str:
        """Returns what differs from the arguments of the last program of ``fn``; empty for its first program."""
        newest = self._newest.get(family_of(fn))
        if newest is None:
            return ""
        if len(newest.described) != len(described):
            return "for other arguments"
        changed = [(a, b) for a, b in zip(newest.described, described, strict=True) if a != b]
        for a, b in changed:
            if not a.differs_in_rows(b):
                return f"because {a} became {b}"
        if not changed:
            return ""
        a, b = changed[0]
        return batch_of_other_size(b.num_rows(num_replicas or 1), a.num_rows(num_replicas or 1))

    def report_trace(
        self, fn: Callable[..., Any], described: Sequence[ArgumentLeaf], paths: Callable[[], Sequence[str]]
    ) -> None:
        """Counts a trace of ``fn``; warns once when there are many, with the reason and a remedy."""
        code = family_of(fn)
        count = self._num_traces[code] = self._num_traces.get(code, 0) + 1
        old = self._newest.get(code)
        new = self._newest[code] = _Version(key.function_key(fn), list(described), paths)
        if count == _TRACES_BEFORE_WARNING and old is not None:
            log.warning(
                "%s has been traced %d times, which is slow; the last time because %s. %s",
                getattr(fn, "__qualname__", fn),
                count,
                _reason(old, new),
                _cure(old, new),
            )


class _Version(NamedTuple):
    """One trace of a function: its key, its leaves without their values, and the names of these."""

    function: Any
    described: Sequence[ArgumentLeaf]
    paths: Callable[[], Sequence[str]]

    def changes_to(self, new: _Version) -> list[tuple[str, ArgumentLeaf, ArgumentLeaf]]:
        """Returns the leaves that differ, with their names; nothing if the structures differ."""
        if len(self.described) != len(new.described):
            return []
        columns = zip(new.paths(), self.described, new.described, strict=False)
        return [(path, a, b) for path, a, b in columns if a != b]


def _reason(old: _Version, new: _Version) -> str:
    found = key.difference(old.function, new.function)
    if found is not None:
        at = key.assignment_of(found.name, new.function) if found.are_values else None
        return f"{found}, and the function assigns it at {at}" if at is not None else str(found)
    changed = [f"{path}: {a} became {b}" for path, a, b in old.changes_to(new)]
    return "; ".join(changed[:3]) or "the structure of the arguments changed"


def _cure(old: _Version, new: _Version) -> str:
    found = key.difference(old.function, new.function)
    changed = old.changes_to(new) if found is None else []
    if found is not None and found.are_numbers and found.name:
        given = f"to the function as an array argument, jnp.asarray({found.name})"
        if key.assignment_of(found.name, new.function) is None:
            return (
                f"A program holds its value. Pass it {given}; or make it an rx.Variable, which programs read."
            )
        return (
            f"A program holds its value, so every call compiles. Assign it outside, and pass it {given}; or make it an "
            f"rx.Variable: {found.name}.assign_add(1)."
        )
    if changed and all(a.kind != "static" and a.differs_in_size(b) for _, a, b in changed):
        return (
            "Each size of an array compiles a program of its own: pad arrays to a few sizes, such as multiples of 64, and "
            "mask the rest."
        )
    return "Pass values that change as array arguments, and make models and other objects once, outside the loop."


def jax_state() -> Any:
    """Returns the part of JAX's configuration that changes the avals of arguments, or what a trace accepts. jit itself
    watches the rest.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return jax.config.jax_enable_x64, None if mesh.empty else mesh  # type: ignore[attr-defined]


def family_of(fn: Callable[..., Any]) -> Any:
    """Returns what functions that are made repeatedly at one place share: their code, or what they declare."""
    return getattr(fn, "replicax_family", None) or getattr(fn, "__code__", type(fn))


def _weakly(fn: Any, on_deleted: Callable[[], None]) -> Any:
    """Returns a weak reference to the function itself of a method or partial; None if it allows none."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = fn.__func__ if isinstance(fn, types.MethodType) else fn
    try:
        return weakref.ref(fn, lambda _: on_deleted())
    except TypeError:
        return None
