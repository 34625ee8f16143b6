"""``WorkerFunction``: a traced function for workers, with programs by platform and by the shapes of its elements."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax._ps.client.session import Session
from replicax._ps.placement.placement_plan import ArrayPlace
from replicax._ps.programs.closure import RemoteClosure, TracedClosure
from replicax._ps.programs.iterator_inputs import Offer, PerWorkerInput
from replicax._ps.programs.programs import WorkerProgram
from replicax._ps.programs.worker_side import SMALL_BYTES, name_of
from replicax._src.program_kit.captures import CallForm
from replicax._src.program_kit.data import OutOfRangeError
from replicax._src.program_kit.errors import InvalidArgumentError, UnsupportedError, user_line_of
from replicax._src.program_kit.own_process import export_platform

tracing_lock = threading.RLock()
"""Held while a function for workers is traced, because tracing an update gives variables the shape of a shard for a
while.
"""
_MAX_SIGNATURES = 32
_COMPARED_BYTES = 256 << 10  # compared at once, so that they stay in the processor's cache


@final
class WorkerFunction:
    """A function with arguments of certain kinds, and its closures, by the shapes of the elements that it takes.

    Attributes:
      first: The closure for elements with the shapes of the iterators' specs.
    """

    def __init__(
        self,
        name: str,
        session: Session,
        trace: Callable[[Offer | None], TracedClosure],
        sources: Sequence[PerWorkerInput],
        form: CallForm,
    ):
        self.name = name
        self._programs: dict[str, str] = {}
        self._session, self._trace, self._sources = session, trace, sources
        self._closures: dict[str, RemoteClosure] = {}
        self._ends: dict[str, str] = {}  # the error for too few elements, by signature
        self._of_digest: dict[str, WorkerProgram] = {}
        self._platforms = frozenset(platforms_of_workers(session))
        self.constants: dict[str, np.ndarray] = {}
        self._lifted: dict[int, tuple[np.ndarray, str | None]] = {}
        self._layout = session.layout
        self.first = self._add(None)
        self._form = form
        self.check_closure = form.closure_check(self._used_arguments)

    def _used_arguments(self) -> set[int]:
        programs = self._of_digest.values()
        inputs = [given for program in programs for given in program.inputs]
        inputs += [given for program in programs for lookup in program.lookups for given in lookup.inputs]
        return {given.index for given in inputs if given.kind == "argument"}

    @property
    def programs(self) -> dict[str, str]:
        """The digests of the workers' programs, by signature of the elements, for all platforms of the workers so
        far.
        """
        return self.programs_for(platforms_of_workers(self._session))

    def programs_for(self, platforms: Collection[str]) -> dict[str, str]:
        """Returns the same for these platforms, in addition to those for which programs exist."""
        if not self._platforms.issuperset(platforms):
            with tracing_lock:
                self._platforms = self._platforms.union(platforms)
                self._programs = {
                    signature: self._export(closure) for signature, closure in self._closures.items()
                }
        return self._programs

    def _export(self, closure: RemoteClosure) -> str:
        program = closure.export(sorted(self._platforms))
        self._of_digest[program.digest] = program
        return program.digest

    def program(self, digest: str) -> WorkerProgram:
        """Returns the worker's program."""
        return self._of_digest[digest]

    def is_valid(self) -> bool:
        """True if the arrays that it uses are where its programs expect them, with the copies that these know of."""
        layout = self._session.layout  # read first: a move during the comparison shows next time
        if layout != self._layout:
            placed = [each for closure in list(self._closures.values()) for each in closure.places.items()]
            if any(ArrayPlace.of(array) != place for array, place in placed):
                return False
            self._layout = layout
        return True

    def sources_of(self, arguments: Sequence[PerWorkerInput]) -> list[PerWorkerInput]:
        """Returns the sources of elements of a call with these arguments, in the order of the program's iterators."""
        replaced = {id(traced): now for traced, now in zip(self._sources, arguments, strict=True)}
        return [replaced.get(id(source), source) for source in self.first.elements.sources]

    def names_of(self, arrays: Sequence[np.ndarray], num_lifted: int) -> dict[int, str]:
        """Returns names for those of the last ``num_lifted`` arrays that are large and unchanged since the last one."""
        names: dict[int, str] = {}
        for position in range(len(arrays) - num_lifted, len(arrays)):
            array = arrays[position]
            if array.nbytes <= SMALL_BYTES:
                continue
            before, name = self._lifted.get(position, (None, None))
            if before is None or not _is_alike(before, array):
                self._lifted[position] = array, None
                continue
            if name is None:
                name = name_of(before)
                self._lifted[position] = before, name
            names[position] = name
        return names

    def closure(self, signature: str | None) -> RemoteClosure:
        """Returns the closure for elements of a signature; None for the first one."""
        return self.first if signature is None else self._closures[signature]

    def assemble(self, arrays: Sequence[Any], signature: str | None = None) -> Any:
        """Returns the function's result, from the worker's results for elements of a signature; None for the first
        one.
        """
        return self.closure(signature).assemble(arrays)

    def make(self, signature: str, leaves: Sequence[Any] = ()) -> str:
        """Traces the function for elements of other shapes, or for fewer. Returns the digest of the worker's program.

        Args:
          signature: The signature of the elements.
          leaves: The leaves of a call whose function closes over arrays, which are checked if this program is the
            first to
            use them.

        Raises:
          InvalidArgumentError: There are too many signatures.
          NarrowingError: See ``check_closure``.
          OutOfRangeError: The function needs an element that is missing.
        """
        with tracing_lock:
            self.programs_for(platforms_of_workers(self._session))
            return self._programs.get(signature) or self._made(signature, leaves)

    def _made(self, signature: str, leaves: Sequence[Any]) -> str:
        if signature in self._ends:
            raise OutOfRangeError(self._ends[signature])
        if len(self._closures) >= _MAX_SIGNATURES:
            raise InvalidArgumentError(
                f"{self.name} has got elements of {len(self._closures)} different shapes, and is compiled for "
                f"each; the next has {signature}. Pad the elements to a few sizes, in the dataset."
            )
        elements = self.first.elements
        offer = Offer(
            elements.sources,
            dict(zip(sorted(elements.taken), map(_leaves, json.loads(signature)), strict=True)),
        )
        try:
            self._add(offer, signature, leaves)
        except OutOfRangeError as error:
            while len(self._ends) >= _MAX_SIGNATURES:
                del self._ends[next(iter(self._ends))]
            self._ends[signature] = str(error)
            raise
        except Exception as error:
            if line := user_line_of(error, ""):
                error.add_note(
                    f"(At {line}, when {self.name} was traced again, for elements of other shapes or for "
                    "fewer elements.)"
                )
            raise
        return self._programs[signature]

    def _add(
        self, offer: Offer | None, signature: str | None = None, leaves: Sequence[Any] = ()
    ) -> RemoteClosure:
        traced, is_done = self._trace(offer), False
        while not is_done:  # until no other thread places a value between the plan and its execution
            plan = self._session.plan(traced.needs)
            closure = traced.closure(plan)
            self._check_is_alike(closure, offer, signature)
            is_done = self._session.carry_out(plan)
        self._session.keep_programs(closure, closure.updates)
        key = signature or closure.elements.signature
        digest = self._export(closure)
        if leaves:
            self.check_closure = self._form.closure_check(self._used_arguments)
            self.check_closure(leaves)
        self._closures[key] = closure
        self._programs[key] = digest
        self.constants |= closure.constants
        return closure

    def _check_is_alike(self, closure: RemoteClosure, offer: Offer | None, signature: str | None) -> None:
        """Checks that a closure for other elements returns the same structure as the first one.

        Raises:
          UnsupportedError: It does not, or only one of them applies gradients that are averaged.
        """
        if offer is not None and not offer.is_short and closure.returns != self.first.returns:
            raise UnsupportedError(
                f"{self.name} returns another structure for elements of other shapes ({signature}): "
                f"{closure.returns} in place of {self.first.returns}. Return a number of arrays that does not "
                "depend on shapes; for a number of rows return jnp.int32(x.shape[0])."
            )
        if offer is not None and (closure.round_key is None) != (self.first.round_key is None):
            raise UnsupportedError(
                f"{self.name} applies gradients only for some elements, and not for others ({signature}: shapes and "
                "dtypes, null after the last element). Schedule another function that applies none."
            )


def platforms_of_workers(session: Session) -> Collection[str]:
    """Returns the platforms of the workers that have connected, or this process's before any has."""
    return session.worker_platforms or (export_platform(),)


def _is_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """True if two arrays of one shape and dtype have the same bytes; faster if they have not."""
    if one.ctypes.data == other.ctypes.data:  # the same JAX array
        return True
    these, those = (np.ravel(array).view(np.uint8) for array in (one, other))
    parts = (slice(start, start + _COMPARED_BYTES) for start in range(0, len(these), _COMPARED_BYTES))
    return all(np.array_equal(these[part], those[part]) for part in parts)


def _leaves(described: Any) -> tuple[jax.ShapeDtypeStruct, ...] | None:
    """Returns the leaves of one element of a signature; None if it is missing."""
    if described is None:
        return None
    return tuple(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in described)
