"""Runs closures that the coordinator has traced: takes elements, pulls variables, computes, pushes.

It runs on workers, or in any other process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import jax
import numpy as np

from replicax._ps.client.row_requests import RowsWanted, gradient_operands
from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.server_requests import Ask, Closure, row_asks, rows_of
from replicax._ps.programs.executable import Executable, LoadedProgram
from replicax._ps.programs.programs import (
    Input,
    Operand,
    Push,
    Shard,
    WorkerProgram,
    signature_of,
)
from replicax._ps.worker.prefetched_elements import (
    ElementQueue,
    Elements,
    End,
    LeafIterator,
    are_same,
    end_of,
)
from replicax._ps.worker.pulls import Pulls
from replicax._src.program_kit.errors import UnknownProgramError
from replicax._src.program_kit.own_process import Span


class ClosureCall(NamedTuple):
    """A closure to run.

    Attributes:
      closure: The session id of the coordinator, and the closure's number.
      low: All closures with lower numbers have ended.
      epoch: The epoch. Values that were pulled in another epoch are pulled again.
      programs: The digest of the program for each signature of elements. The first one says how many elements are
        taken.
      arguments: The closure's arrays, NumPy's or JAX's.
      iterators: The iterators that it takes elements from.
      round_number: The round of its gradients; None if they are pushed as updates. Values pulled in a round are not
        used
        for other closures.
    """

    closure: Closure
    low: int
    epoch: Any
    programs: Mapping[str, str]
    arguments: Sequence[Any] = ()
    iterators: Sequence[LeafIterator] = ()
    round_number: int | None = None


class ClosureResult(NamedTuple):
    """The result of a closure.

    Attributes:
      results: Its arrays.
      signature: The signature of its elements, if it differs from that of its first program.
      need: The signature of elements for which there is no program. They are held until the closure comes again.
      end: The end of a dataset that has too few elements, if there is one.
    """

    results: Sequence[np.ndarray] = ()
    signature: str | None = None
    need: str | None = None
    end: End | None = None


@dataclass(eq=False, slots=True)
class _Run:
    """A running closure.

    Attributes:
      signature: The signature of its elements.
      tables: The rows that its lookups need.
      rows: The rows of its lookups.
      moment: ``Pulls.moment`` when the rows and the variables were pulled.
    """

    call: ClosureCall
    loaded: LoadedProgram
    elements: Elements
    signature: str
    tables: Sequence[RowsWanted] = ()
    rows: Sequence[np.ndarray] = ()
    moment: int = -1


_NOTHING: Final = signature_of([])
_MOST_PROGRAMS: Final = 256
"""The most programs. Beyond that the least recently used one is dropped; the coordinator sends it again if needed."""
_MOST_CONSTANT_BYTES: Final = 1 << 30
"""The most bytes of constants. Beyond that the least recently used ones are dropped."""


@final
class Runner:
    """Runs closures, one after another. One thread at a time uses it.

    The next closure will probably need the same variables, so they come with the answers to the pushes of this one.
    So do
    the rows of tables for the next elements, if the ids depend on elements only. A step is then one round trip to
    each
    parameter server.

    Args:
      servers: The clients of the servers. If it pulls ahead, no other code may use them: arrays of a store in this
        process are valid only until the next request.
      pulls_ahead: True unless closures are rare.
    """

    def __init__(self, servers: ServerClients, pulls_ahead: bool = True):
        self._servers, self._pulls_ahead = servers, pulls_ahead
        self._pulls = Pulls(servers)
        self._programs: dict[str, LoadedProgram] = {}
        self._constants: dict[str, Any] = {}
        self._wanted: set[str] = set()  # constants of the current and the next closure
        self._elements = ElementQueue()
        self._held: dict[Closure, Elements] = {}
        self._ahead: _Run | None = None
        self._last: Executable | None = None  # the only one that keeps memory for its next call
        self._num_closures = self._num_examples = 0
        self._waits_for_data = Span()

    def add_program(self, program: WorkerProgram) -> str:
        """Adds a program, which is compiled at its first run. Returns its digest."""
        digest = program.digest
        if digest not in self._programs:
            self._programs[digest] = LoadedProgram(program)
        while len(self._programs) > _MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return digest

    def add_constant(self, name: str, array: np.ndarray) -> None:
        """Puts a copy of an array on the device. A name always stands for the same array."""
        if name not in self._constants:
            self._constants[name] = jax.device_put(np.array(array))
        self._wanted.add(name)
        num_bytes = sum(constant.nbytes for constant in self._constants.values())
        for other in [each for each in self._constants if each not in self._wanted]:
            if num_bytes <= _MOST_CONSTANT_BYTES:
                break
            num_bytes -= self._constants.pop(other).nbytes

    def constant(self, name: str) -> Any:
        """Returns an array that has been added.

        Raises:
          UnknownProgramError: It must be added, perhaps again.
        """
        if name not in self._constants:
            raise UnknownProgramError(f"This task does not have the constant {name}: send it.", name)
        self._wanted.add(name)
        constant = self._constants[name] = self._constants.pop(name)  # the most recently used
        return constant

    def run(self, call: ClosureCall) -> ClosureResult:
        """Runs a closure.

        Raises:
          UnknownProgramError: A program must be added first. Nothing has changed, and the elements are kept for this
            closure.
          UnavailableError: A parameter server cannot be reached. Others may have applied their part, and will not
            again.
        """
        run = self._taken(call)
        if isinstance(run, ClosureResult):
            return run
        try:
            with contextlib.nullcontext() if self._pulls_ahead else self._servers.held():
                results = self._run(run)
        except Exception as error:
            self._pulls.forget()
            if isinstance(error, UnknownProgramError):
                self._held[call.closure] = run.elements
            raise
        self._num_closures += 1
        if run.elements:
            self._num_examples += _num_examples(run)
        self._wanted.clear()
        arrays = [np.asarray(array) for array in results[: run.loaded.program.num_results]]
        if run.signature == next(iter(call.programs)):
            return ClosureResult(arrays)
        self._elements.put_back(call.iterators, run.elements, run.loaded.program.element_counts)
        return ClosureResult(arrays, run.signature)

    def statistics(self) -> dict[str, Any]:
        """Counts the closures that ran, the rows that they took, the pulls of variables before a closure, and the
        seconds of compiling and of waiting for elements.
        """
        return {
            "num_closures": self._num_closures,
            "examples": self._num_examples,
            "data_s": self._waits_for_data.total_s,
            "num_programs": len(self._programs),
            "compile_s": sum(program.compile_s for program in self._programs.values()),
            "num_pulls": self._pulls.num_pulls,
            "num_held": len(self._held),
        }

    def _run(self, run: _Run) -> Sequence[jax.Array]:
        self._pulls.begin(run.call.epoch)
        self._pull(run)
        main = run.loaded.main
        if self._last is not main and self._last is not None:
            self._last.free()
        self._last = main
        results = main(self._inputs(run, run.loaded.program.inputs))
        self._ahead = self._look_ahead(run)  # while it computes
        self._push(run, results)
        main.take_back(results)
        return results

    # --- elements -------------------------------------------------------------------------------------

    def _taken(self, call: ClosureCall) -> _Run | ClosureResult:
        """Returns the closure with its elements, or a result that says which program the elements need."""
        loaded = [self._loaded(digest) for digest in call.programs.values()]
        if self._held:
            self._forget_ended(call)
        elements = self._held.pop(call.closure, None) if self._held else None
        if elements is None and not call.iterators:
            elements = ()
        elif elements is None:
            self._waits_for_data.begin()
            try:
                elements = self._elements.take(call.iterators, loaded[0].program.element_counts)
            finally:
                self._waits_for_data.end()
        signature = _signature(elements)
        digest = call.programs.get(signature)
        if digest is None:
            self._held[call.closure] = elements
            return ClosureResult(need=signature, end=end_of(elements))
        loaded = self._programs[digest] = self._programs.pop(digest)  # the most recently used
        return _Run(call, loaded, elements, signature)

    def _forget_ended(self, call: ClosureCall) -> None:
        """Drops the elements that are held for closures that have ended elsewhere."""
        for closure in [each for each in self._held if each[1] < call.low or each[0] != call.closure[0]]:
            del self._held[closure]

    def _loaded(self, digest: str) -> LoadedProgram:
        loaded = self._programs.get(digest)
        if loaded is None:
            raise UnknownProgramError(f"This task does not have the program {digest}: send it.", digest)
        return loaded

    # --- pulling --------------------------------------------------------------------------------------

    def _pull(self, run: _Run) -> None:
        loaded, ahead = run.loaded, self._ahead
        self._ahead = None
        if ahead is None or ahead.loaded is not loaded or not are_same(ahead.elements, run.elements):
            if loaded.whole_first:
                self._pulls.bring(loaded.whole_first, ())
            run.tables = self._tables(run)
        elif ahead.moment == self._pulls.moment:
            run.tables, run.rows = ahead.tables, ahead.rows
            return
        else:
            run.tables = ahead.tables
        run.rows = self._pulls.bring(loaded.whole, run.tables)

    def _tables(self, run: _Run) -> list[RowsWanted]:
        program, tables = run.loaded.program, []
        for lookup, executable in zip(program.lookups, run.loaded.ids, strict=True):
            (ids,) = executable(self._inputs(run, lookup.inputs))
            shards = program.variables[lookup.variable]
            tables.append(RowsWanted.of(np.asarray(ids), shards, lookup.num_rows))
        return tables

    def _look_ahead(self, run: _Run) -> _Run | None:
        """Returns the probable next closure with the tables that its lookups need; None if it would differ from this
        one.
        """
        if not self._pulls_for_next(run) or not run.loaded.looks_up_elements:
            return None
        elements = self._elements.peek(run.call.iterators, run.loaded.program.element_counts)
        if elements is None or _signature(elements) != run.signature:
            return None
        ahead = _Run(run.call, run.loaded, elements, run.signature)
        ahead.tables = self._tables(ahead)
        return ahead

    def _pulls_for_next(self, run: _Run) -> bool:
        """True if the answers may bring values for the next closure. They may not if a round ends in between."""
        return self._pulls_ahead and run.call.round_number is None

    def _inputs(self, run: _Run, inputs: Sequence[Input]) -> list[Any]:
        return [self._input(run, each) for each in inputs]

    def _input(self, run: _Run, each: Input) -> Any:
        match each.kind:
            case "variable":
                return self._pulls.value(run.loaded.program.variables[each.index])
            case "element":
                leaves = run.elements[each.index][each.call]
                assert not isinstance(leaves, End)
                return leaves[each.leaf]
            case "argument":
                return run.call.arguments[each.index]
            case "constant":
                return self.constant(each.name)
            case "rows":
                return run.rows[each.call]
            case "positions":
                return run.tables[each.call].positions

    # --- pushing --------------------------------------------------------------------------------------

    def _push(self, run: _Run, results: Sequence[jax.Array]) -> None:
        program = run.loaded.program
        if not program.pushes:
            _wait_for(results)
            self._pulls.forget()
            run.rows = ()
            return
        asks = {push.ps: self._ask(run, push, results) for push in program.pushes if not push.is_averaged}
        gradients = {push.ps: self._ask(run, push, results) for push in program.pushes if push.is_averaged}
        _wait_for(results)  # its inputs may be overwritten now
        used = self._pulls.used(run.loaded.whole)
        self._pulls.forget()
        run.rows = ()
        ahead: list[Shard] = []
        # (Without the rows the next closure must send a request anyway, and then it gets everything.)
        if self._pulls_for_next(run) and asks and (self._ahead is not None or not program.lookups):
            ahead = run.loaded.whole
        rows = {} if self._ahead is None else row_asks(self._ahead.tables)
        pulls = self._pulls.asks_for(ahead, [*asks, *rows, *gradients])
        if not pulls:
            return
        steps = {
            ps: Ask(
                *asks.get(ps, (None, ())),
                pull=pull,
                rows=rows[ps].rows if ps in rows else (),
                used=used.get(ps, ()),
                gradients=gradients.get(ps),
            )
            for ps, pull in pulls.items()
        }
        answers = self._servers.step(run.call.closure, run.call.low, steps, run.call.round_number)
        self._pulls.take(answers)
        if self._ahead is not None:
            self._ahead.rows = rows_of(self._ahead.tables, answers)
            self._ahead.moment = self._pulls.moment

    def _ask(self, run: _Run, push: Push, results: Sequence[jax.Array]) -> tuple[str, list[np.ndarray]]:
        return push.program, [
            array for operand in push.operands for array in self._operand(run, push.ps, operand, results)
        ]

    def _operand(
        self, run: _Run, ps: int, operand: Operand, results: Sequence[jax.Array]
    ) -> Sequence[np.ndarray]:
        array = np.asarray(results[operand.result])
        if operand.lookup is None:
            return [array if operand.rows is None else array[operand.rows[0] : operand.rows[1]]]
        lookup = run.loaded.program.lookups[operand.lookup]
        start, stop = operand.rows or (0, lookup.num_rows)
        shards = run.loaded.program.variables[lookup.variable]
        (key,) = [shard.key for shard in shards if shard.ps == ps and shard.rows in (None, (start, stop))]
        return gradient_operands(run.tables[operand.lookup], array, key, stop - start)


def _wait_for(results: Sequence[jax.Array]) -> None:
    for result in results:
        result.block_until_ready()


def _num_examples(run: _Run) -> int:
    counts = zip(run.elements, run.loaded.program.element_counts, strict=True)
    taken = (leaves for calls, count in counts for leaves in calls[:count] if not isinstance(leaves, End))
    return sum(leaf.shape[0] if leaf.ndim else 1 for leaves in taken for leaf in leaves[:1])


def _signature(elements: Elements) -> str:
    if not elements:
        return _NOTHING
    return signature_of(
        [
            None if isinstance(leaves, End) else [(leaf.shape, leaf.dtype) for leaf in leaves]
            for calls in elements
            for leaves in calls
        ]
    )
