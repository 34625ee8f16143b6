"""Several steps in one call: one program that loops over batches on the devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.input.dataset import DistributedDataset, DistributedIterator, OutOfRangeError, StackedSteps
from replicax._src.scope import context
from replicax._src.scope.any_strategy import AnyStrategy
from replicax._src.strategies.carried_state import NO_STATE, StateForm, opened
from replicax._src.strategies.cross_replica_code import (
    CodeState,
    TracedCode,
    on_mesh,
    shardings_of,
    trace_code,
)
from replicax._src.strategies.data_placement import Stack, StepForm
from replicax._src.tracing import key
from replicax._src.tracing.arguments import Call, ClosureCheck
from replicax._src.tracing.cache import ArgumentLeaf, ProgramCache, array_leaf, jax_state
from replicax._src.tracing.capture import current_capture
from replicax._src.values.distributed import Mirrored, PerReplica
from replicax._src.values.framework import use_imported
from replicax._src.vocabulary.errors import (
    CrossReplicaContextError,
    InvalidArgumentError,
    MixedStrategiesError,
    StructureError,
    UnsupportedError,
)
from replicax._src.vocabulary.options import ReduceName, ReduceOp

Arrays = Sequence[jax.Array]


@final
class MultiStepContext:
    """The outputs of steps in ``experimental_run_steps_on_iterator``: the function sets them, and the caller reads
    them.

    Source: tf.distribute's MultiStepContext (TensorFlow 1).
    """

    def __init__(self, strategy: AnyStrategy | None = None, last_step_outputs: dict[str, Any] | None = None):
        """Makes a context. Only ``experimental_run_steps_on_iterator`` calls it."""
        self._strategy = strategy
        self._last_step_outputs = dict(last_step_outputs or {})
        self._non_tensor_outputs: dict[str, Any] = {}

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """The outputs that the last step set by ``set_last_step_output``, by name."""
        return self._last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """The outputs that were set by ``set_non_tensor_output``, by name."""
        return self._non_tensor_outputs

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | ReduceName | None = None
    ) -> None:
        """Keeps ``output`` of the last step. Call it in cross-replica code with a result of ``strategy.run``.


        Args:
          output: A pytree of per-replica values or arrays.
          reduce_op: The reduction of the replicas' values; None keeps them unreduced.

        Raises:
          CrossReplicaContextError: It is called in a replica function. Return the value from that function instead.
        """
        if context.in_replica_function():
            raise CrossReplicaContextError(
                f"set_last_step_output({name!r}) was called in a replica function. Return the value from that function, "
                "and give what strategy.run returns to set_last_step_output."
            )
        if reduce_op is not None:
            assert self._strategy is not None
            output = self._strategy.reduce(reduce_op, output, axis=None)
        self._last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keeps a Python value. The function is traced once for all steps, so the value is the same for every step."""
        self._non_tensor_outputs[name] = output


@final
class StepLoop:
    """Traced code that a program runs once for each of several steps, whose inputs are stacked.

    Args:
      code: The traced code. Its arguments are one step's arrays, then other arrays.
      form: The form of the state that each step passes on. Its arrays come after those of the step, and first in the
        results.
      capacity: The largest number of steps in the stack.
      check_closure: Checks the other arrays.
      keeps_all: True to return the stacked results of all steps, else only those of the last. The state is always the
        last.
    """

    def __init__(
        self,
        code: TracedCode,
        form: StateForm,
        capacity: int,
        check_closure: ClosureCheck,
        *,
        keeps_all: bool,
    ):
        self._code, self._capacity, self._keeps_all = code, capacity, keeps_all
        self.check_closure = check_closure
        self._topology = topology = code.strategy.topology
        self._variables = variables = CodeState(code)
        num_carried = len(form.leaves)
        kinds = code.kinds[num_carried:]
        shardings = shardings_of(kinds, topology, topology.stacked if keeps_all else None)
        avals = [v.aval for v in code.variant.jaxpr.outvars[num_carried : len(code.kinds)]]
        carried_avals = [leaf.aval() for leaf in form.described()]
        carried_shardings = shardings_of(form.kinds, topology)

        def as_carried(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            return [
                jax.lax.with_sharding_constraint(jnp.broadcast_to(a, aval.shape), sharding)
                for a, aval, sharding in zip(arrays, carried_avals, carried_shardings, strict=True)
            ]

        def body(
            written: Arrays,
            read: Arrays,
            consts: Arrays,
            stack: Arrays,
            carried: Arrays,
            others: Arrays,
            start: jax.Array,
            stop: jax.Array,
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            def one_step(
                index: jax.Array, carry: tuple[Arrays, Arrays, Arrays]
            ) -> tuple[Arrays, Arrays, Arrays]:
                values, carried, kept = carry
                step = [jax.lax.dynamic_index_in_dim(a, index, keepdims=False) for a in stack]
                new, outs = variables.evaluate(values, read, consts, [*step, *carried, *others])
                new = [n.astype(v.dtype) for n, v in zip(new, values, strict=True)]
                carried, outs = as_carried(outs[:num_carried]), outs[num_carried:]
                if keeps_all:
                    outs = [
                        jax.lax.dynamic_update_index_in_dim(k, o, index, 0)
                        for k, o in zip(kept, outs, strict=True)
                    ]
                outs = [
                    jax.lax.with_sharding_constraint(o.astype(k.dtype), s)
                    for o, k, s in zip(outs, kept, shardings, strict=True)
                ]
                return new, carried, outs

            room = (capacity,) if keeps_all else ()
            kept = [
                jax.lax.with_sharding_constraint(jnp.zeros((*room, *a.shape), a.dtype), s)
                for a, s in zip(avals, shardings, strict=True)
            ]
            values, carried, kept = jax.lax.fori_loop(
                start, stop, one_step, (list(written), as_carried(carried), kept)
            )
            if keeps_all:  # the replica dim of a PerReplica comes first
                kept = [
                    jnp.moveaxis(k, 0, 1) if kind == "row" else k for k, kind in zip(kept, kinds, strict=True)
                ]
            return values, [*carried, *kept]

        self._programs = variables.compile(body, f"run_steps of {code.name}")

    def __call__(
        self, stack: Arrays, carried: Arrays, others: Arrays, start: int, stop: int
    ) -> tuple[Arrays, Any]:
        """Runs the steps ``[start, stop)``. Returns the leaves of the last state, and the results of the steps."""
        others = on_mesh(others, self._topology)
        outs = self._variables.run(self._programs, stack, carried, others, jnp.int32(start), jnp.int32(stop))
        if self._keeps_all and stop - start < self._capacity:
            num_carried = len(carried)
            outs[num_carried:] = [
                o[:, start:stop] if kind == "row" else o[start:stop]
                for o, kind in zip(outs[num_carried:], self._code.kinds[num_carried:], strict=True)
            ]
        state, result = self._variables.result_of(outs)
        return state, _with_steps(result, stop - start) if self._keeps_all else result


def _with_steps(pytree: Any, num_steps: int) -> Any:
    """Returns per-replica values whose components have an additional first dim, for the steps."""

    def changed(value: Any) -> Any:
        if not isinstance(value, PerReplica) or value.shapes is None:
            return value
        shapes = tuple((num_steps, *shape) for shape in value.shapes)
        return PerReplica(value.array, value.num_replicas, shapes, value.is_equal)

    return jax.tree_util.tree_map(changed, pytree, is_leaf=_is_distributed)


def _is_distributed(value: Any) -> bool:
    return isinstance(value, (PerReplica, Mirrored))


@final
class StepsRunner:
    """Runs several steps in one call, for one strategy."""

    def __init__(self, strategy: AnyStrategy):
        self._strategy = strategy
        self._cache: ProgramCache[StepLoop] = ProgramCache()

    def run_all(
        self, fn: Callable[..., Any], iterator: DistributedIterator, num_steps: int, state: Any = None
    ) -> Any:
        """See ``Strategy.run_steps``."""
        strategy = self._strategy
        if strategy.topology.survivors is not None:
            return self._run_one_by_one(fn, iterator, num_steps, state)
        state, groups = self._run(
            fn,
            iterator,
            num_steps,
            lambda replica_fn, *args: strategy.run(replica_fn, args=args),
            state,
            keeps_all=True,
        )
        results = groups[0] if len(groups) == 1 else _joined(groups)
        return results if state is None else (state, results)

    def _run_one_by_one(
        self, fn: Callable[..., Any], iterator: DistributedIterator, num_steps: int, state: Any
    ) -> Any:
        """Runs each step as a program of its own, which survivors can repeat after a death; see ``run_all``."""
        num_steps, strategy = _check(fn, num_steps), self._strategy
        _check_iterator(iterator, strategy)
        form, carried = (NO_STATE, []) if state is None else opened(state, strategy.topology)
        values: Sequence[Any] = (
            ()
            if state is None
            else jax.tree_util.tree_leaves(form.state_of(carried), is_leaf=_is_distributed)
        )
        groups: list[list[Any]] = []  # the results of steps whose batches have equal shapes
        last = None
        for batch in itertools.islice(iterator, num_steps):
            if state is None:
                result = strategy.run(fn, args=(batch,))
            else:
                values, result = form.returned(strategy.run(fn, args=(form.tree.unflatten(values), batch)))
            shapes = jax.tree_util.tree_map(
                lambda value: value.shapes or value.stored.shape, batch, is_leaf=_is_distributed
            )
            if shapes != last:
                groups.append([])
            groups[-1].append(result)
            last = shapes
        if not groups:
            raise _no_further_step()
        stacked = [jax.tree_util.tree_map(_stack, *group, is_leaf=_is_distributed) for group in groups]
        results = stacked[0] if len(stacked) == 1 else _joined(stacked)
        return results if state is None else (form.tree.unflatten(values), results)

    def run_last(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: DistributedIterator,
        num_steps: int,
        initial: dict[str, Any],
    ) -> MultiStepContext:
        """See ``StrategyExtended.experimental_run_steps_on_iterator``."""
        self._strategy.topology.refuse_survivors("experimental_run_steps_on_iterator")
        made: list[MultiStepContext] = []

        def one_step(code: Callable[..., Any], step: Any) -> Any:
            made.append(MultiStepContext(self._strategy))
            code(made[-1], step)
            return made[-1].last_step_outputs, _Constant(made[-1].non_tensor_outputs)

        _, groups = self._run(fn, iterator, num_steps, one_step, None, keeps_all=False)
        outputs, non_tensor = groups[-1]
        result = MultiStepContext(self._strategy, {**initial, **outputs})
        for name, value in non_tensor.content.items():
            result.set_non_tensor_output(name, value)
        return result

    def _run(
        self,
        fn: Callable[..., Any],
        iterator: DistributedIterator,
        num_steps: int,
        one_step: Callable[..., Any],
        state: Any,
        *,
        keeps_all: bool,
    ) -> tuple[Any, list[Any]]:
        """Runs up to ``num_steps`` steps. Returns the state, and the results of each group of steps with equal
        shapes.
        """
        num_steps = _check(fn, num_steps)
        _check_iterator(iterator, self._strategy)
        use_imported()
        fn = key.unwrap(fn)
        results = []
        remaining = num_steps
        while remaining:
            try:
                steps = iterator.take_stacked(num_steps, remaining)
            except StopIteration:
                break
            state, result = self._run_group(fn, steps, one_step, state, keeps_all)
            results.append(result)
            remaining -= steps.stop - steps.start
        if not results:
            raise _no_further_step()
        return state, results

    def _run_group(
        self,
        fn: Callable[..., Any],
        steps: StackedSteps,
        one_step: Callable[..., Any],
        state: Any,
        keeps_all: bool,
    ) -> tuple[Any, Any]:
        stack: Stack = steps.value
        form, carried = (NO_STATE, []) if state is None else opened(state, self._strategy.topology)
        call = Call(fn, (), {})
        programs = self._cache.programs_of(fn)
        call.describe(None)
        inputs = [array_leaf(a)._replace(shape=a.shape[1:]) for a in stack.arrays]
        of_state = form.described()
        described = [*inputs, *of_state, *call.described]
        names = [f"batch, array {i}" for i in range(len(inputs))] + [
            f"state, array {i}" for i in range(len(of_state))
        ]
        paths_of_call = call.paths
        topology = self._strategy.topology
        shapes = (stack.form, form.tree, form.kinds, tuple(described), call.tree)
        signature = (*shapes, steps.capacity, keeps_all, topology, jax_state())

        def traced() -> StepLoop:
            code, joined = self._trace(call, one_step, stack.form, form, inputs)
            check = call.closure_check([code.variant.jaxpr])
            return StepLoop(code, joined, steps.capacity, check, keeps_all=keeps_all)

        def run(loop: StepLoop) -> tuple[Any, Any]:
            loop.check_closure(call.leaves)
            leaves, result = loop(stack.arrays, carried, call.arrays, steps.start, steps.stop)
            return None if state is None else form.tree.unflatten(leaves), result

        loop = programs.get(signature)
        if loop is not None:
            return run(loop)
        with self._cache.first_call(fn, described, num_replicas=topology.num_replicas, of="run_steps of "):
            loop = self._cache.keep(
                fn, programs, signature, described, traced(), lambda: [*names, *paths_of_call()]
            )
            return run(loop)

    def _trace(
        self,
        call: Call,
        one_step: Callable[..., Any],
        step_form: StepForm,
        form: StateForm,
        inputs: Sequence[ArgumentLeaf],
    ) -> tuple[TracedCode, StateForm]:
        """Traces one step. Repeats it while a leaf of the state varies between replicas that did not vary before the
        step.
        """
        while True:
            current = form

            def traced(tracers: list[jax.Array], form: StateForm = current) -> Any:
                step, rest = tracers[: len(inputs)], tracers[len(inputs) :]
                carried, rest = rest[: len(form.leaves)], rest[len(form.leaves) :]
                _, _, cells = call.pytree_of(rest)
                step_fn, batch = key.with_cells(call.fn, cells), step_form.step_of(step)
                if form is NO_STATE:
                    return [], one_step(step_fn, batch)
                return form.returned(one_step(step_fn, form.state_of(carried), batch))

            avals = [leaf.aval() for leaf in (*inputs, *form.described(), *call.inputs)]
            code = trace_code(traced, avals, key.name_of(call.fn), self._strategy)
            form = form.joined(code.kinds[: len(form.leaves)], code.makers[: len(form.leaves)])
            if form.kinds == current.kinds:
                return code, current


@final
class _Constant:
    """A Python value among the results of a trace."""

    def __init__(self, content: dict[str, Any]):
        self.content = content


def _no_further_step() -> OutOfRangeError:
    return OutOfRangeError(
        "The iterator has no further step. Start again with iter(dataset), or use a dataset that repeats."
    )


def _check_iterator(iterator: DistributedIterator, strategy: AnyStrategy) -> None:
    strategy.parts.runner.check_steps()
    if isinstance(iterator, DistributedDataset):
        raise InvalidArgumentError(
            "Several steps in one call take an iterator, so that the next call continues after them; got a "
            "DistributedDataset. Make iterator = iter(dataset) once, and pass that."
        )
    if not isinstance(iterator, DistributedIterator):
        raise InvalidArgumentError(
            f"Several steps in one call take the iterator of a distributed dataset, got {type(iterator).__name__}. "
            "Make one with iter(strategy.experimental_distribute_dataset(dataset))."
        )
    if iterator.dataset.placer.topology is not strategy.topology:
        raise MixedStrategiesError(
            f"The iterator is of a dataset that another strategy than {strategy!r} distributed. Mixing different "
            "tf.distribute.Strategy objects is not possible in one call: distribute the dataset with this one."
        )


def _check(fn: Callable[..., Any], num_steps: int) -> int:
    if not callable(fn):
        raise InvalidArgumentError(f"Several steps in one call need a function, got {fn!r}.")
    is_count = isinstance(num_steps, (int, np.integer)) and not isinstance(num_steps, bool)
    if not is_count or num_steps < 1:
        raise InvalidArgumentError(f"The number of steps must be an int of at least 1, got {num_steps!r}.")
    if current_capture() is not None or context.in_replica_function():
        raise UnsupportedError(
            "Several steps in one call are a separate program: call run_steps outside of rx.function and of "
            "replica functions."
        )
    return int(num_steps)


def _joined(groups: Sequence[Any]) -> Any:
    """Concatenates the results of groups of steps."""
    trees = [jax.tree_util.tree_structure(group, is_leaf=_is_distributed) for group in groups]
    if any(tree != trees[0] for tree in trees):
        raise StructureError(
            f"The steps ran, but their results cannot be stacked: the function returns {trees[0]} for some batches and "
            f"{next(tree for tree in trees if tree != trees[0])} for others. Return the same structure for all."
        )
    return jax.tree_util.tree_map(_join, *groups, is_leaf=_is_distributed)


def _stack(*values: Any) -> Any:
    """Stacks one leaf of the results of steps with equal shapes."""
    if not isinstance(values[0], PerReplica):
        return _join(*values)
    if any(not value.is_equal for value in values):
        values = tuple(map(_as_rows, values))
    first = values[0]
    array = jnp.stack([value.stored for value in values], axis=0 if first.is_equal else 1)
    return _with_steps(PerReplica(array, first.num_replicas, first.shapes, first.is_equal), len(values))


def _join(*values: Any) -> Any:
    """Concatenates one leaf of the results of several groups along the dim of the steps."""
    if not all(_is_distributed(v) or isinstance(v, jax.Array) for v in values):
        if all(type(v) is type(values[0]) and (v is values[0] or v == values[0]) for v in values):
            return values[0]
        raise StructureError(
            f"The steps ran, but their results cannot be stacked: the function returns {values!r}, which differ between "
            "batches of different sizes. Return arrays instead, such as jnp.float32(x.shape[0])."
        )
    if any(isinstance(v, PerReplica) and not v.is_equal for v in values):
        values = tuple(map(_as_rows, values))
    first = values[0]
    is_row = isinstance(first, PerReplica) and not first.is_equal
    step_dim = 1 if is_row else 0
    arrays = [v.array if _is_distributed(v) else v for v in values]
    shapes = {a.shape[:step_dim] + a.shape[step_dim + 1 :] for a in arrays}
    if len(shapes) > 1 or any(isinstance(v, PerReplica) and v.shapes for v in values):
        raise StructureError(
            "The steps ran, but their results cannot be stacked: the batches have different numbers of rows, and "
            "the function returns something for each row. Return one value for each step (a loss, a sum), or "
            "call strategy.run for each batch."
        )
    joined = jnp.concatenate(arrays, axis=step_dim)
    if isinstance(first, PerReplica):
        return PerReplica(joined, first.num_replicas, None, first.is_equal)
    return Mirrored(joined, first.num_replicas) if isinstance(first, Mirrored) else joined


def _as_rows(value: PerReplica) -> PerReplica:
    if not value.is_equal:
        return value
    return PerReplica(
        jnp.broadcast_to(value.array, (value.num_replicas, *value.array.shape)), value.num_replicas
    )
