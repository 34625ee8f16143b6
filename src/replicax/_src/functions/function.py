"""``rx.function``: traces cross-replica code, including its ``run`` and ``reduce`` calls, into one program."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, final, overload

import jax

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.input.dataset import DistributedDataset, DistributedIterator, IteratedInTrace
from replicax._src.scope import context, program_guard
from replicax._src.scope.any_strategy import StrategyView
from replicax._src.strategies.cross_replica_code import (
    LoweredCode,
    RunsWithPlacement,
    makers_of,
    mesh_of,
    set_makers,
    trace_code,
)
from replicax._src.strategies.lower_method import (
    LoweredAlone,
    StepProgram,
    StepToLower,
    arguments_on,
    described_bindings,
    on_devices,
)
from replicax._src.tracing import key
from replicax._src.tracing.arguments import Call
from replicax._src.tracing.cache import ProgramCache, array_leaf
from replicax._src.tracing.capture import current_capture
from replicax._src.user.listening import check_beside_tensorflow
from replicax._src.user.tracebacks import boundary
from replicax._src.values.distributed import is_value
from replicax._src.values.framework import is_variable, use_imported
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError

log = logging.getLogger("replicax")
_ITERATED = (DistributedDataset, DistributedIterator)


_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")


@overload
def function(func: Callable[_P, _R], **options: Any) -> Function[_P, _R]: ...


@overload
def function(func: None = None, **options: Any) -> Callable[[Callable[_P, _R]], Function[_P, _R]]: ...


def function(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compiles a function of cross-replica code into one program. Use it as a decorator.

    The function is traced once per signature of its arguments. ``strategy.run``, ``reduce`` and ``gather`` in it
    become part of its program, so that a step is one call. The function may read and assign variables, and use a
    ``GradientTape``. Inside another traced function it is a plain function. A function that loops over a distributed
    dataset runs as Python, and each ``run`` and ``reduce`` in it is compiled. A log line says so once. Above a model's
    ``train_step(self, data)``, it lets ``fit`` run this step without a scope.

    Args:
      func: The function; if it is missing, the result is a decorator.
      **options: ``input_signature``, ``autograph``, ``jit_compile``, ``reduce_retracing`` and
        ``experimental_*`` of ``tf.function`` are accepted and change nothing.

    Raises:
      InvalidArgumentError: An option is unknown, or ``func`` is not callable.

    Source: tf.function.

    >>> import replicax as rx
    >>> @rx.function
    ... def double(x):
    ...     return 2 * x
    >>> float(double(3.0))
    6.0
    """
    for name in options:
        if name not in _ACCEPTED and not name.startswith("experimental_"):
            raise InvalidArgumentError(
                f"rx.function has no option {name!r}; allowed are {', '.join(_ACCEPTED)}."
            )
    if func is None:
        return lambda fn: function(fn, **options)
    if not callable(func):
        raise InvalidArgumentError(f"rx.function decorates a function, got {func!r}.")
    return Function(key.unwrap(func))


_ACCEPTED = ("input_signature", "autograph", "jit_compile", "reduce_retracing", "name")


@final
class Function(LoweredAlone, Generic[_P, _R]):
    """The result of ``rx.function``: call it like the original function."""

    def __init__(self, python_function: Callable[_P, _R]):
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self._cache: ProgramCache[LoweredCode] = ProgramCache()
        self._runs_as_python = False
        self._run_here: Callable[..., Any] | None = None  # of the placement of its variables
        use_imported()  # Keras's fit may get a model with this step before any scope is entered

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(
        self: Function[Concatenate[Any, _Q], _R], instance: object, owner: Any = None
    ) -> Callable[_Q, _R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @property
    def runs_as_python(self) -> bool:
        """True if its trace found a loop over a distributed dataset, so that it is not one program."""
        return self._runs_as_python

    def place(self, view: StrategyView, step: StepToLower) -> StepProgram:
        """Returns the program of a call on the devices of a view, for lowering. Runs and keeps nothing.

        Raises:
          UnsupportedError: The function loops over a distributed dataset.
        """
        use_imported()
        fn = self.python_function
        given, topology = arguments_on(view.topology, step), view.topology
        call = Call(fn, given.args, given.kwargs, is_variable)
        call.describe(
            None,
            [
                (array_leaf(leaf), leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else None
                for leaf in call.leaves
            ],
        )
        try:
            placed = _trace(call, topology.mesh, is_for_plan=True)
        except IteratedInTrace:
            self._runs_as_python = True
            raise UnsupportedError(
                f"{key.name_of(fn)} loops over a distributed dataset, so that rx.function runs it as Python: each strategy.run in "
                "it is a separate program. Lower or plan the step that it passes to strategy.run: strategy.plan(step, (batch,)), where "
                "batch is next(iterator), or described by jax.ShapeDtypeStruct."
            ) from None
        compiled, operands = placed.described(on_devices(call.arrays, topology))
        variables = described_bindings(placed.state.written.bindings, placed.state.read.bindings, topology)
        return StepProgram(key.name_of(fn), compiled, operands, [*variables, *given.arrays], given.rows)

    @boundary
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        check_beside_tensorflow("A function of rx.function")
        if self._runs_as_python or current_capture() is not None or context.in_replica_function():
            return self.python_function(*args, **kwargs)
        use_imported()
        fn = self.python_function
        if self._run_here is not None:
            return self._run_here(fn, *args, **kwargs)
        call = Call(fn, args, kwargs, is_variable)
        if any(isinstance(leaf, _ITERATED) for leaf in call.leaves):
            return self._run_as_python(args, kwargs)
        programs = self._cache.programs_of(fn)
        call.describe(programs)
        mesh = mesh_of(call.arrays)
        signature = call.signature(context.get_strategy(), mesh)

        def launched(placed: LoweredCode) -> Any:
            placed.check_closure(call.leaves)
            with program_guard.current():
                return placed(call.arrays)

        placed = programs.get(signature)
        if placed is not None:
            return launched(placed)
        if call.passes_modules:
            raise UnsupportedError(
                "rx.function got an nnx module as an argument, which its trace could not update. Pass the module's "
                "state as arrays (nnx.split), or call strategy.run with the module outside of rx.function."
            )
        makers = makers_of(_values_in((args, kwargs, key.lifted_cells(fn))))
        try:
            with self._cache.first_call(fn, call.described, num_replicas=_num_replicas(mesh)):
                placed = _trace(call, mesh, makers)
                self._cache.keep(fn, programs, signature, call.described, placed, call.paths)
                return launched(placed)
        except IteratedInTrace:
            return self._run_as_python(args, kwargs)
        except RunsWithPlacement as found:
            self._run_here = found.run_here
            return found.run_here(fn, *args, **kwargs)

    def _run_as_python(self, args: Any, kwargs: Any) -> _R:
        self._runs_as_python = True
        log.info(
            "%s loops over a distributed dataset: it runs as Python, with each strategy.run and reduce compiled.",
            getattr(self.python_function, "__qualname__", self.python_function),
        )
        return self.python_function(*args, **kwargs)  # type: ignore[reportCallIssue]

    def __repr__(self) -> str:
        return f"<rx.function {getattr(self.python_function, '__qualname__', self.python_function)}>"


def _num_replicas(mesh: Any) -> int | None:
    """Returns the number of replicas that a function will be compiled for; None if only its trace will show it."""
    if mesh is not None:
        return mesh.shape[REPLICA_AXIS]
    return context.get_strategy().num_replicas_in_sync if context.has_strategy() else None


def _values_in(pytree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(pytree, is_leaf=is_value)


def _trace(call: Call, mesh: Any, makers: Sequence[Any] = (), *, is_for_plan: bool = False) -> LoweredCode:
    def traced(tracers: list[Any]) -> Any:
        pytree = call.pytree_of(tracers)
        if any(makers):
            set_makers(_values_in(pytree), makers)
        args, kwargs, cells = pytree
        return key.with_cells(call.fn, cells)(*args, **kwargs)

    avals = [leaf.aval() for leaf in call.inputs]
    with call.form.tracing():
        code = trace_code(
            traced,
            avals,
            key.name_of(call.fn),
            argument_mesh=mesh,
            has_checks=True,
            is_for_plan=is_for_plan,
        )
    return LoweredCode(code, call.closure_check([code.variant.jaxpr]))
