"""``rx.function``: traces cross-replica code, with the ``run`` and ``reduce`` in it, into one program."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src import context, jax_compat
from replicax._src.bridges import ensure_bridges
from replicax._src.errors import InvalidArgumentError, MixedStrategiesError, UnsupportedError
from replicax._src.input.dataset import DistributedDataset, DistributedIterator, iteration_guard
from replicax._src.placement.spmd import ProgramState
from replicax._src.program import key
from replicax._src.program.cache import (
    FunctionPrograms,
    Leaf,
    ProgramCache,
    array_leaf,
    jax_state,
    static_leaf,
)
from replicax._src.program.capture import current_capture
from replicax._src.program.modules import open_modules
from replicax._src.program.program import Variant, check_no_leaks, has_callback, trace_variant
from replicax._src.program.slots import Sharing, Slot
from replicax._src.program.verdict import Verdict
from replicax._src.strategies.extended import owner_of
from replicax._src.values import DistributedValues, PerReplica, is_value, is_variable

log = logging.getLogger("replicax")
_ITERATED = (DistributedDataset, DistributedIterator)


def function(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compiles a function of cross-replica code into one program; a decorator.

    The function is traced once per signature of its arguments; ``strategy.run``, ``reduce`` and ``gather`` in it
    become part of its program, so that a step is one call. Variables may be read and assigned, a ``GradientTape``
    may be used. Called inside another traced function it is a plain function. A function that loops over a
    distributed dataset runs as Python, with each ``run`` and ``reduce`` compiled, and says so once.

    Args:
      func: The function; without it, a decorator is returned.
      **options: ``input_signature``, ``autograph``, ``jit_compile``, ``reduce_retracing`` and
        ``experimental_*`` of ``tf.function`` are accepted and change nothing.

    Raises:
      InvalidArgumentError: An unknown option, or ``func`` is not callable.

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
    return Function(func)


_ACCEPTED = ("input_signature", "autograph", "jit_compile", "reduce_retracing", "name")


@final
class Function:
    """What ``rx.function`` returns: call it like the function that it was made of."""

    def __init__(self, python_function: Callable[..., Any]):
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self._cache: ProgramCache[_PlacedCode] = ProgramCache()
        self._runs_as_python = False

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._runs_as_python or current_capture() is not None or context.in_replica_function():
            return self.python_function(*args, **kwargs)
        ensure_bridges()
        fn = self.python_function
        nest = (args, kwargs, key.lifted_cells(fn))
        leaves, tree = jax.tree_util.tree_flatten(nest, is_leaf=is_variable)
        if any(isinstance(leaf, _ITERATED) for leaf in leaves):
            return self._run_as_python(args, kwargs)
        programs = self._cache.programs_of(fn)
        described, arrays = _describe(leaves, programs)
        signature = (tree, tuple(described), context.get_strategy(), jax_state())
        placed = programs.get(signature)
        if placed is None:
            if open_modules((args, kwargs))[1] is not None:
                raise UnsupportedError(
                    "rx.function got an nnx module as an argument, which its trace could not update. Pass the module's "
                    "state as arrays (nnx.split), or call strategy.run with the module outside of rx.function."
                )
            try:
                placed = _trace(fn, tree, described)
            except _IteratesDataset:
                return self._run_as_python(args, kwargs)
            programs.put(signature, described, placed)
            self._cache.report_trace(fn, described)
        return placed(arrays)

    def _run_as_python(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._runs_as_python = True
        log.info(
            "%s loops over a distributed dataset: it runs as Python, with each strategy.run and reduce compiled.",
            getattr(self.python_function, "__qualname__", self.python_function),
        )
        return self.python_function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<rx.function {getattr(self.python_function, '__qualname__', self.python_function)}>"


class _IteratesDataset(BaseException):
    """A distributed dataset was iterated while a function was being traced. Users' ``except`` must miss it."""


def _notice_iteration() -> None:
    capture = current_capture()
    if capture is not None and not capture.is_replica:
        raise _IteratesDataset


iteration_guard.append(_notice_iteration)


def _describe(leaves: Sequence[Any], programs: FunctionPrograms) -> tuple[list[Leaf], list[Any]]:
    described: list[Leaf] = []
    arrays: list[Any] = []
    for position, leaf in enumerate(leaves):
        if key.is_array(leaf):
            described.append(array_leaf(leaf))
            arrays.append(leaf)
        elif type(leaf) is float and programs.is_varying(position, leaf):
            described.append(Leaf("whole", (), jnp.result_type(float), weak_type=True))
            arrays.append(leaf)
        else:
            described.append(static_leaf(leaf))
    return described, arrays


class _OtherStrategy(BaseException):
    """The function turned out to belong to another strategy than thought: trace it again."""

    def __init__(self, strategy: Any):
        self.strategy = strategy


class _Home:
    """The strategy on whose devices a function's program runs: found while it is traced."""

    def __init__(self, strategy: Any = None):
        self.strategy = strategy

    def use(self, strategy: Any) -> None:
        """``strategy`` runs something in the function, or owns a variable of it."""
        if self.strategy is None:
            self.strategy = strategy
        elif self.strategy is not strategy and not strategy.is_default:
            if self.strategy.is_default:
                raise _OtherStrategy(strategy)
            raise MixedStrategiesError(
                f"Mixing different tf.distribute.Strategy objects in one rx.function: {self.strategy!r} is not "
                f"{strategy!r}. Use one rx.function for each."
            )

    def slot_of(self, variable: Any) -> Slot:
        self.use(owner_of(variable) or context.get_strategy())
        return self.strategy.slots.slot_of(variable)


def _trace(fn: Callable[..., Any], tree: Any, described: Sequence[Leaf]) -> _PlacedCode:
    home = _Home()
    while True:
        kinds: list[str] = []
        try:
            variant = _trace_at(fn, tree, described, home, kinds)
            check_no_leaks(variant)
            return _PlacedCode(variant, home.strategy or context.get_strategy(), kinds)
        except _OtherStrategy as other:
            home = _Home(other.strategy)


def _trace_at(
    fn: Callable[..., Any],
    tree: Any,
    described: Sequence[Leaf],
    home: _Home,
    kinds: list[str],
) -> Variant:
    """Traces the function; ``kinds`` learns of each array that it returns: "row" (a PerReplica, device r holds row
    r), "whole" (a value that every device holds) or "plain" (an array)."""
    inputs = [leaf for leaf in described if leaf.kind != "static"]

    def call(tracers: list[Any]) -> Any:
        remaining = iter(tracers)
        leaves = [leaf.thaw() if leaf.kind == "static" else next(remaining) for leaf in described]
        args, kwargs, cells = jax.tree_util.tree_unflatten(tree, leaves)
        result = key.with_cells(fn, cells)(*args, **kwargs)
        values = jax.tree_util.tree_leaves(result, is_leaf=is_value)
        kinds[:] = [
            _kind(value) for value in values if isinstance(value, DistributedValues) or key.is_array(value)
        ]
        return result

    return trace_variant(
        call,
        [leaf.aval() for leaf in inputs],
        [Verdict.SAME] * len(inputs),
        slot_of=home.slot_of,
        num_replicas=None,
        sum_gradients=lambda capture: list,
        on_strategy=home.use,
    )


def _kind(value: Any) -> str:
    if not isinstance(value, DistributedValues):
        return "plain"
    return "row" if isinstance(value, PerReplica) and not value.is_equal else "whole"


class _PlacedCode:
    """A traced function, compiled for the devices of its strategy."""

    def __init__(self, variant: Variant, strategy: Any, kinds: Sequence[str]):
        self._variant = variant
        self._topology = topology = strategy.topology
        slots = [entry.slot for entry in variant.entries]
        self._donates = not has_callback(variant.jaxpr)
        written = [entry.slot for entry in variant.written]
        self._state = ProgramState(slots, written, strategy.variable_placement)
        written_slots = self._state.written.slots
        from_loaded = _positions(self._state.slots, slots)
        to_written = _positions(written, written_slots)
        summed = [i for i, s in enumerate(written_slots) if s.sharing is Sharing.SUMMED]
        jaxpr, num_arrays = variant.jaxpr, variant.num_arrays
        needs_token = topology.is_cpu and topology.num_replicas > 1

        def body(written_state: list[Any], read_state: list[Any], consts: list[Any], args: list[Any]):
            state = [*written_state, *read_state]
            outs = jax_compat.eval_jaxpr(jaxpr, [*consts, *(state[i] for i in from_loaded), *args])
            outs, writes = outs[:num_arrays], outs[num_arrays:]
            writes = [writes[i] for i in to_written]
            return (
                writes,
                [jnp.sum(writes[i], axis=0, dtype=writes[i].dtype) for i in summed],
                outs,
                [jnp.int8(0)] if needs_token else [],
            )

        row, whole = topology.per_replica, topology.replicated
        self._compiled = jax.jit(
            body,
            donate_argnums=(0,) if self._donates else (),
            out_shardings=(
                [row if s.sharing.is_per_replica else whole for s in written_slots],
                [whole] * len(summed),
                [row if kind == "row" else whole for kind in kinds],
                [whole] if needs_token else [],
            ),
        )
        self._consts = jax.device_put(variant.consts, whole)
        # Plain results go where the strategy keeps variables, so that plain code can compute with both.
        self._home = strategy.variable_placement.parameter_device
        self._kinds = list(kinds)

    def __call__(self, args: Sequence[Any]) -> Any:
        mesh_devices = set(self._topology.devices)
        args = [
            jax.device_put(a, self._topology.replicated)
            if isinstance(a, jax.Array) and a.sharding.device_set != mesh_devices
            else a
            for a in args
        ]
        outs = self._state.run(
            lambda written, read: self._compiled(written, read, self._consts, args), self._donates
        )
        if self._home is not None:
            outs = [
                jax.device_put(o, self._home) if kind == "plain" else o
                for o, kind in zip(outs, self._kinds, strict=True)
            ]
        remaining = iter(outs)
        leaves = [next(remaining) if o.is_array else o.value for o in self._variant.outputs]
        return jax.tree_util.tree_unflatten(self._variant.tree, leaves)


def _positions(order: Sequence[Slot], wanted: Sequence[Slot]) -> list[int]:
    position = {id(slot): i for i, slot in enumerate(order)}
    return [position[id(slot)] for slot in wanted]
