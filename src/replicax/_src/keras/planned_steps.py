"""The steps of ``fit`` and its kin for ``Strategy.lower``: Keras's loop runs up to its first batch, and the step is
placed, not run.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import keras
import numpy as np

from replicax._src import context
from replicax._src.errors import InvalidArgumentError, KerasScopeError
from replicax._src.keras.losses import own_compute_loss_gathered
from replicax._src.keras.replica_steps import ReplicaStepFunction, is_replica_style, without_nones
from replicax._src.keras.steps import GlobalStepFunction, Phase, State, StepFunction
from replicax._src.placement.batch import Batch
from replicax._src.placement.global_view import GlobalStep
from replicax._src.placement.held_state import HeldState
from replicax._src.strategies.lowering import NamedArray, Placer, Step, StepProgram, place_replica_function

_asked: contextvars.ContextVar[Step] = contextvars.ContextVar("replicax_step_to_lower")


class _StepPlaced(BaseException):
    """The first step of a loop has been placed: the loop is left. Users' ``except`` must miss it."""

    def __init__(self, program: StepProgram):
        self.program = program


@final
class PlannedSteps(StepFunction):
    """Places the step for the first batch, and leaves the loop.

    The model's state is only described: no variable is read, those without values stay so.
    """

    def __init__(self, model: Any, phase: Phase, strategy: Any):
        super().__init__(model, phase, strategy)
        kind = ReplicaStepFunction if is_replica_style(model, phase) else GlobalStepFunction
        self._one_step = kind(model, phase, strategy)

    @contextlib.contextmanager
    def in_place_of_state(self) -> Iterator[None]:
        """Inside, Keras finds descriptions of the model's variables for their values."""
        described = [[self._described(v) for v in group] for group in self._phase.variables_of(self._model)]

        def get_state(purge_model_variables: bool = False, **groups: bool) -> tuple[list[Any], ...]:
            del purge_model_variables, groups
            return tuple(map(list, described))

        own = vars(self._model)
        own["_get_jax_state"] = get_state
        try:
            yield
        finally:
            del own["_get_jax_state"]

    def _described(self, variable: Any) -> jax.ShapeDtypeStruct:
        sharding = self._layout_of(variable) or self._strategy.topology.replicated
        dtype = jax.dtypes.canonicalize_dtype(variable.dtype)
        return jax.ShapeDtypeStruct(tuple(variable.shape), dtype, sharding=sharding)

    def _layout_of(self, variable: Any) -> Any:
        return self._strategy.slots.layout_of(variable)

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        del state
        batch = next(self._take(iterator, is_kept=False), None)
        if batch is None:
            raise StopIteration
        raise _StepPlaced(self._placed(batch))

    def _placed(self, here: Batch) -> StepProgram:
        asked = _asked.get()
        if asked.global_batch is None:
            rows = math.ceil(here.num_rows / asked.num_replicas_here)
        else:
            rows = math.ceil(asked.global_batch / self._strategy.topology.num_replicas)
        if isinstance(self._one_step, ReplicaStepFunction):
            return self._of_each_replica(self._one_step, here, rows)
        return self._of_all_replicas(self._one_step, here, rows)

    def _of_each_replica(self, step: ReplicaStepFunction, here: Batch, rows: int) -> StepProgram:
        """A step in TensorFlow's style, as ``strategy.run`` runs it."""
        leaves = [_component(leaf, here.num_rows, rows) for leaf in here.leaves]
        data = without_nones(here.tree.unflatten(leaves))
        with own_compute_loss_gathered(self._model):
            return place_replica_function(self._strategy, Step(step.replica_step, (data,), {}))

    def _of_all_replicas(self, one_step: GlobalStepFunction, here: Batch, rows: int) -> StepProgram:
        """The model's own step, in the global view."""
        topology = self._strategy.topology
        num_rows = rows * topology.num_replicas
        leaves = [_with_rows(leaf, here.num_rows, num_rows) for leaf in here.leaves]
        batch = Batch(here.tree.unflatten(leaves))
        groups = self._phase.variables_of(self._model)
        variables = list(itertools.chain.from_iterable(groups))
        held = HeldState(topology, layouts=lambda: list(map(self._layout_of, variables)))
        held.hold([[self._described(v) for v in group] for group in groups])
        step = GlobalStep(
            one_step.step_of_model,
            self._name,
            topology,
            donates=not self._phase.is_predict,
            keeps_all=self._phase.is_predict,
        )
        program = step.program(held, batch, 1)
        compiled, operands = program.described(held)
        written, names = set(program.written), [v.path for v in variables]
        arrays = [
            NamedArray("variable", name, value, i in written)
            for i, (name, value) in enumerate(zip(names, held.values(), strict=True))
        ]
        arrays += [NamedArray("argument", f"batch[{i}]", leaf) for i, leaf in enumerate(operands[-1])]
        return StepProgram(self._name, compiled, operands, arrays, rows, is_split=True)

    def finish(self) -> None:
        """Nothing was held."""


def _with_rows(leaf: Any, have: int, wanted: int) -> np.ndarray:
    """An array of another number of rows, without memory behind it."""
    shape = tuple(leaf.shape)
    if shape and shape[0] == have:
        shape = (wanted, *shape[1:])
    return np.broadcast_to(np.zeros((), leaf.dtype), shape)


def _component(leaf: Any, have: int, rows: int) -> jax.ShapeDtypeStruct:
    """What one replica has of an array."""
    shape = tuple(leaf.shape)
    if shape and shape[0] == have:
        shape = (rows, *shape[1:])
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def placer(phases: dict[str, Phase]) -> Callable[[Any], Placer | None]:
    """What places ``model.fit`` and its kin, for ``strategies.lowering.placers``."""

    def find(fn: Any) -> Placer | None:
        model, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
        is_loop = isinstance(model, keras.Model) and name in phases
        return functools.partial(_place, model, name, phases[name]) if is_loop else None

    return find


def _place(model: Any, method: str, phase: Phase, strategy: Any, step: Step) -> StepProgram:
    _check_scope(model, method, phase, strategy)
    token = _asked.set(step)
    args, kwargs = jax.tree_util.tree_map(_standing_for, (tuple(step.args), dict(step.kwargs)))
    try:
        step.fn(*args, **kwargs)
    except _StepPlaced as placed:
        return placed.program
    finally:
        _asked.reset(token)
    raise InvalidArgumentError(f"{method}() of model {model.name!r} has no batch to lower a step for.")


def _check_scope(model: Any, method: str, phase: Phase, strategy: Any) -> None:
    """Raises for a model whose loop would be Keras's own: it would be run, not planned."""
    if context.owners.get(id(model)) is None and not is_replica_style(model, phase):
        raise KerasScopeError(
            f"A step of {method}() of model {model.name!r} is to be lowered, which was made outside the scope of {strategy!r}: it is "
            f"trained on one device, by Keras alone. Make it inside:\n"
            f"    with strategy.scope():\n"
            f"        model = ...\n"
            f"        model.compile(...)"
        )


def _standing_for(leaf: Any) -> Any:
    """An array without memory behind it for one that is only described."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf
