"""``Closures``: turns a function call into a closure that workers run. It traces each function once per kind of
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from replicax._ps.client.session import Session
from replicax._ps.programs.closure import trace_closure
from replicax._ps.programs.iterator_inputs import Elements, InputForm, PerWorkerInput, taking_from
from replicax._ps.programs.programs import WorkerProgram
from replicax._ps.programs.random_keys import taking_data
from replicax._ps.strategy.remote_running import run_on_replicas
from replicax._ps.strategy.worker_function import WorkerFunction, tracing_lock
from replicax._src.program_kit.captures import (
    BindingTable,
    Call,
    CallForm,
    ProgramCache,
    name_of,
)
from replicax._src.program_kit.errors import InvalidArgumentError, UnsupportedError
from replicax._src.program_kit.own_process import compiling
from replicax._src.program_kit.strategy_parts import Strategy
from replicax._src.program_kit.variables import Scope, is_variable


@dataclass(frozen=True, slots=True)
class PreparedClosure:
    """A function call, ready to be sent.

    Attributes:
      traced: The function.
      arguments: The arrays among the arguments, and those that the function closes over.
      sources: The iterators that it takes elements from, in the order of the program's iterators.
      named: The names of those ``arguments`` that are sent once, by position.
      leaves: All arguments, and the arrays that the function closes over; empty if it closes over none.
    """

    traced: WorkerFunction
    arguments: Sequence[np.ndarray]
    sources: Sequence[PerWorkerInput]
    named: Mapping[int, str]
    leaves: Sequence[Any] = ()

    @property
    def name(self) -> str:
        return self.traced.name

    @property
    def programs(self) -> dict[str, str]:
        """The digests of the workers' programs, by signature of the elements."""
        return self.traced.programs

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """The arrays that are sent once, by name."""
        if not self.named:
            return self.traced.constants
        return self.traced.constants | {name: self.arguments[n] for n, name in self.named.items()}

    @property
    def iterators(self) -> list[str]:
        """The workers' names of the iterators that it takes elements from."""
        return [source.resource for source in self.sources]

    @property
    def round_key(self) -> str | None:
        """A key that is equal for closures whose gradients are averaged."""
        return self.traced.first.round_key

    def is_valid(self) -> bool:
        """True if the values on the servers are where its programs expect them."""
        return self.traced.is_valid()

    def program(self, digest: str) -> WorkerProgram:
        """Returns a worker's program."""
        return self.traced.program(digest)

    def make(self, signature: str) -> str:
        """Makes the program for elements of other shapes, or for fewer. Returns its digest."""
        return self.traced.make(signature, self.leaves)

    @property
    def assemble(self) -> Callable[..., Any]:
        """``WorkerFunction.assemble``. It does not keep the arguments, so that a future does not."""
        return self.traced.assemble


@final
class Closures:
    """Makes closures of functions, and caches the traces.

    Args:
      strategy: The strategy, whose ``bindings`` are used.
      session: The session that has the variables.
    """

    def __init__(self, strategy: Strategy, session: Session):
        self._strategy, self._session = strategy, session
        self._bindings = BindingTable(1)  # for cross-replica code
        self._cache: ProgramCache[WorkerFunction] = ProgramCache()

    def prepare(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        is_replica_function: bool = False,
        num_averaged: int | None = None,
    ) -> PreparedClosure:
        """Returns a call of ``fn``, traced for workers. It creates the variables of ``fn`` on the servers.

        Args:
          fn: The function.
          args: Its arguments.
          kwargs: Its keyword arguments.
          is_replica_function: True if it is called in replica context.
          num_averaged: The number of closures whose gradients are averaged for one update; None for no averaging.
        """
        call = Call(fn, args, kwargs or {}, _is_leaf)
        fn = call.fn
        programs = self._cache.programs_of(fn)
        sources = [leaf for leaf in call.leaves if isinstance(leaf, PerWorkerInput)]
        call.describe(programs, constant_of=_form_of_input)
        arrays = list(map(_sendable, call.arrays, [leaf.dtype for leaf in call.inputs]))
        signature = call.signature(_pattern(sources), is_replica_function, num_averaged)
        traced = programs.get(signature)
        if traced is None or not traced.is_valid():
            _check_no_modules(call)
            _check_no_iterators(call.leaves)
            num_replicas = self._strategy.num_replicas_in_sync
            with tracing_lock, compiling(name_of(fn), num_replicas):
                traced = self._traced(call.form, sources, is_replica_function, num_averaged)
            programs.put(signature, call.described, traced)
            if getattr(fn, "replicax_family", None) is None:  # replicax makes one for each variable
                self._cache.report_trace(fn, call.described, call.paths)
        named: dict[int, str] = {}
        if call.cells:
            traced.check_closure(call.leaves)
            named = traced.names_of(arrays, call.num_lifted)
        return PreparedClosure(
            traced, arrays, traced.sources_of(sources), named, call.leaves if call.cells else ()
        )

    def _traced(
        self,
        form: CallForm,
        sources: Sequence[PerWorkerInput],
        is_replica_function: bool,
        num_averaged: int | None,
    ) -> WorkerFunction:
        with_keys, avals = taking_data(lambda *arrays: arrays, form.avals)

        def call(tracers: list[Any], elements: Elements) -> Any:
            inputs = iter(sources)

            def taken(constant: Any) -> Any:
                if not isinstance(constant, InputForm):
                    return constant
                source = next(inputs)
                return source if source.is_iterator else elements.take(source)

            fn, args, kwargs = form.opened(with_keys(*tracers), taken)
            with Scope(self._strategy), taking_from(elements):
                return (
                    run_on_replicas(self._strategy, self._session, fn, args, kwargs)
                    if is_replica_function
                    else fn(*args, **kwargs)
                )

        name = name_of(form.fn)
        binding_of, num_replicas = self._bindings.binding_of, self._strategy.num_replicas_in_sync
        with form.tracing():
            return WorkerFunction(
                name,
                self._session,
                lambda offer: trace_closure(
                    call, avals, name, self._session, binding_of, offer, num_averaged, num_replicas
                ),
                sources,
                form,
            )


def _is_leaf(leaf: Any) -> bool:
    return is_variable(leaf) or isinstance(leaf, PerWorkerInput)


def _check_no_modules(call: Call) -> None:
    if call.passes_modules:
        raise UnsupportedError(
            "An nnx module was passed to a function for workers, which cannot update it. Pass the module's "
            "state as arrays (nnx.split), or keep it in variables made in strategy.scope()."
        )


def _check_no_iterators(leaves: Sequence[Any]) -> None:
    """Raises for an iterator of this process: its next element would be taken once, while the function is traced."""
    found = next((x for x in leaves if isinstance(x, Iterator) and not isinstance(x, PerWorkerInput)), None)
    if found is not None:
        raise InvalidArgumentError(
            f"A function for workers got {found!r}, an iterator of this process. All calls would get the "
            "element that is next while the function is traced. Have each worker make its own: iterator = "
            "iter(coordinator.create_per_worker_dataset(dataset_fn)); or pass next(iterator)."
        )


def _form_of_input(leaf: Any) -> InputForm | None:
    """Returns the form of a per-worker input; None for any other leaf."""
    return leaf.form if isinstance(leaf, PerWorkerInput) else None


def _sendable(array: Any, dtype: Any) -> np.ndarray:
    """Returns an array of the arguments as it is sent; for typed random keys their data."""
    if not isinstance(dtype, np.dtype):
        return np.asarray(jax.random.key_data(array))
    # The caller may change it before it is sent, directly or through the array that it is a view of.
    is_theirs = isinstance(array, np.ndarray) and (array.flags.writeable or array.base is not None)
    with np.errstate(over="ignore"):  # a value that does not fit is found later, if it is used
        return (np.array if is_theirs else np.asarray)(array, dtype)


def _pattern(sources: Sequence[PerWorkerInput]) -> tuple[int, ...]:
    """Returns for each source the position of its first occurrence."""
    return tuple(sources.index(source) for source in sources)
