"""The steps that Keras's loops call: ``model.train_function`` and its two sisters, for a strategy.

Keras keeps its loops, with callbacks, logs and data. A loop calls ``function(state, iterator)``. The state is arrays in
groups, one group for each kind of variable. The function takes as many batches as it runs steps. While a loop runs the
model's variables are empty, so the groups hold the only copy of their values.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax._src.cluster.counters import counters
from replicax._src.devices.autoshard import rows_of_global_batch
from replicax._src.keras import internals
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.overriding import overridden
from replicax._src.keras.phases import TRAIN, Phase
from replicax._src.keras.sharded_state import ShardedRead, with_sharded_state
from replicax._src.keras.variable_capture import accessor
from replicax._src.keras.workers import SameBatches
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.lowering.held_state import HeldState
from replicax._src.lowering.spmd import StatePrograms
from replicax._src.lowering.surviving_step import step_on
from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing.bindings import added_up
from replicax._src.tracing.loss_counts import counting
from replicax._src.user.listening import listener
from replicax._src.vocabulary.errors import InvalidArgumentError

State = Sequence[Any]


class StepFunction(abc.ABC):
    """A ``train_function``, ``test_function`` or ``predict_function`` of a model.

    Attributes:
      model: The model whose steps it runs.
      phase: The phase of these steps.
      strategy: The strategy that they run under.
      name: The display name, such as ``"Classifier.train_step"``.
      num_taken, num_rows: The numbers of batches that it has taken, and of their rows on all replicas.
    """

    def __init__(self, model: Any, phase: Phase, strategy: Strategy):
        self.model, self.phase, self.strategy = model, phase, strategy
        self.name = f"{type(model).__name__}.{phase.step_name}"
        self._same_batches = SameBatches(strategy.topology.peers, self.name)
        self._num_batches: int | None = None
        self.num_taken = self.num_rows = 0

    def in_call(self, call: FitCall) -> contextlib.AbstractContextManager[None]:
        """Surrounds one of Keras's methods. On exit the variables have the full state again."""
        if call.is_loop:
            self._same_batches.begin()
            self._num_batches = None
        return self._around(call)

    def note_batches(self) -> None:
        """Records that the current loop had batches, which another function has read."""
        self._num_batches = 1

    @property
    def num_compared(self) -> int:
        """The number of batches by which the processes decide when they compare one."""
        return self._same_batches.num_seen

    @num_compared.setter
    def num_compared(self, number: int) -> None:
        self._same_batches.num_seen = number

    @property
    def has_met_no_batch(self) -> bool:
        """True if the current loop has asked for a batch, and there was none."""
        return self._num_batches == 0

    @abc.abstractmethod
    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """Takes batches from the iterator, as many as the model's ``steps_per_execution``, and runs the steps.

        Returns:
          The logs of the last step (for predictions, the outputs of all batches), and the new state.

        Raises:
          StopIteration: The data have no further batch.
        """

    def first_batch(self, iterator: Iterator[Any]) -> DatasetBatch:
        """Takes one batch, to read its shapes.

        Raises:
          StopIteration: The data have no batch.
        """
        batch = next(self._take(iterator, is_kept=False), None)
        if batch is None:
            raise StopIteration
        return batch

    @abc.abstractmethod
    def _around(self, call: FitCall) -> contextlib.AbstractContextManager[None]:
        """Implements ``in_call``."""

    def _take(self, iterator: Iterator[Any], *, is_kept: bool) -> Iterator[DatasetBatch]:
        """Yields the batches for one call. An error of the dataset comes after the batches before it.

        Args:
          is_kept: True if a batch is used after the dataset has moved on.
        """
        for _ in range(self._most_steps):
            counters.begin_reading()
            try:
                data = next(iterator)
            except StopIteration:
                self._num_batches = self._num_batches or 0
                self._same_batches.check_end()
                return
            finally:
                counters.end_reading()
            self._num_batches = 1
            batch = DatasetBatch(self._standardised(data), is_kept=is_kept)
            self._same_batches.check_batch(batch)
            counters.num_batches += 1
            counters.num_examples += self._num_rows_here(batch)
            self.num_taken += 1
            self.num_rows += batch.num_rows if batch.worker_sizes is None else sum(batch.worker_sizes)
            yield batch

    def _num_rows_here(self, batch: DatasetBatch) -> int:
        topology = self.strategy.topology
        if topology.survivors is not None:
            sizes = batch.sizes(topology.num_replicas)
            return sum(sizes[replica] for replica in topology.local_replicas)
        share = topology.share
        if batch.worker_sizes is not None or share.num_workers == 1:
            return batch.num_rows
        return sum(rows_of_global_batch(batch.num_rows, share).sizes)

    def _note_logs(self, logs: Any, num_batches: int) -> None:
        """Notes the logs of training steps for the status; the values may not be computed yet."""
        if self.phase is TRAIN and isinstance(logs, Mapping):
            counters.note_logs(logs, num_batches)

    def _standardised(self, data: Any) -> Any:
        """Converts an element of the dataset to the form that the step takes."""
        return data

    @property
    def _most_steps(self) -> int:
        return max(1, int(self.model.steps_per_execution))

    @property
    def _is_compiled(self) -> bool:
        return bool(self.model.jit_compile) and not self.model.run_eagerly


@final
class GlobalStepFunction(StepFunction):
    """Runs the model's own stateless step on global batches; see ``lowering/global_view.py``, ``surviving_step.py``."""

    def __init__(self, model: Any, phase: Phase, strategy: Strategy):
        super().__init__(model, phase, strategy)
        self._held = HeldState(
            strategy.topology,
            lambda: [variable.path for variable in self._variables()],
            self._layouts,
            self._parts,
        )
        self._step = step_on(
            strategy.topology,
            self._traced_step,
            self.name,
            donates=not phase.is_predict,  # Keras reuses the state of a prediction
            gives_rows=phase.is_predict,
        )

    def _traced_step(self, state: State, data: Any) -> tuple[Any, State]:
        """Runs the step in a trace: warns of side effects of the user's layers, steps and losses."""
        model = self.model
        code = [layer.call for layer in (*internals.layers_of(model), model)]
        with (
            listener().tracing(*code, getattr(model, self.phase.step_name), is_key=False),
            listener().user_code("step"),
        ):
            return self._step_of_model(state, data)

    def _step_of_model(self, state: State, data: Any) -> tuple[Any, State]:
        """Runs the model's own step, a pure function. Sharded state stays sharded in the results."""
        layouts = self.strategy.variable_placement.layouts
        if layouts is None or layouts.shards is None:
            return self._step_of_whole_state(state, data)
        read = ShardedRead(layouts, self.phase.variables_of(self.model)[0], state[0])
        return with_sharded_state(
            self._step_of_whole_state, read, state, data, getattr(self.model, "optimizer", None)
        )

    def _step_of_whole_state(self, state: State, data: Any) -> tuple[Any, State]:
        with counting():
            result = getattr(self.model, self.phase.step_name)(state, data)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._wrong_result(f"returned {type(result).__name__}")
        outputs, new = result
        if self.phase.is_predict:
            new = state[0], new
        sizes, new_sizes = [len(group) for group in state], [len(group) for group in new]
        if sizes != new_sizes:
            raise self._wrong_result(f"returned lists of {new_sizes} arrays, and was given lists of {sizes}")
        return outputs, new

    def _wrong_result(self, got: str) -> InvalidArgumentError:
        name = self.name
        if self.phase.is_predict:
            return InvalidArgumentError(
                f"{name} {got}. It must return (predictions, non_trainable_variables)."
            )
        return InvalidArgumentError(
            f"{name} {got}. It must return (logs, state), where the state has the lists that it was given, in their order: "
            f"({', '.join(self.phase.groups)}). A step in TensorFlow's style takes only `data`, and returns the logs."
        )

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        if self.phase is TRAIN:
            StatePrograms.note_training_step()
        groups = self._held.hold(state)
        batches: list[DatasetBatch] = []
        error: Exception | None = None
        capacity = self._most_steps
        try:
            for batch in self._take(iterator, is_kept=capacity > 1):
                batches.append(batch)
        except Exception as of_data:
            error = of_data  # raised after the steps before it
        if error is None and not batches:
            raise StopIteration
        outputs: list[Any] = []
        for _, group in itertools.groupby(batches, key=lambda batch: batch.signature):
            outputs += self._run(list(group), capacity)
        if error is not None:
            raise error
        self._note_logs(outputs[-1], len(batches))
        return (joined(outputs) if self.phase.is_predict else outputs[-1]), groups

    def reader(self) -> Callable[[], Mapping[int, Any]]:
        """Returns a function that returns the arrays of a running loop, by ``id`` of their variables. A variable that
        has a value has the newer one: Keras has given it back, and a callback may have changed it.
        """
        ids = list(map(id, self._variables()))
        return lambda: {} if self._held.groups is None else dict(zip(ids, self._held.values(), strict=True))

    def described(
        self, state: Sequence[list[Any]], batch: DatasetBatch
    ) -> tuple[Any, list[Any], list[Any], set[int]]:
        """Returns the program for a batch without reading any value.

        Returns:
          The jitted function, its arguments, the arrays of the state, and the positions of the arrays that it changes.
        """
        self._held.hold(state)
        program = self._step.program(self._held, batch, 1)
        compiled, operands = program.described(self._held)
        arrays = self._held.values()
        self._held.release()  # so that the variables do not get descriptions
        return compiled, operands, arrays, set(program.written)

    def _run(self, batches: Sequence[DatasetBatch], capacity: int) -> list[Any]:
        if not self._is_compiled:
            return [self._run_uncompiled(batch) for batch in batches]
        return self._step.run(
            self._held,
            batches,
            capacity if len(batches) > 1 else 1,
            lambda program: self._held.adopt(program.written, self._held_by_variables),
        )

    def _run_uncompiled(self, batch: DatasetBatch) -> Any:
        """Runs a step operation by operation, for debugging. All devices that hold the state compute everything."""
        self.strategy.topology.refuse_survivors("run_eagerly=True, or jit_compile=False, of a model")
        self._held.adopt((), self._held_by_variables)
        whole = self.strategy.topology.replicated
        leaves = [jax.device_put(v, whole) if isinstance(v, jax.Array) else v for v in batch.leaves]
        values = self._held.values()
        for i in self._held.parts:
            values[i] = added_up(values[i], self.strategy.topology)
        remaining = iter(values)
        state = tuple([next(remaining) for _ in range(size)] for size in self._held.sizes)
        outputs, new = self._step_of_model(state, batch.tree.unflatten(leaves))
        self._held.replace(list(itertools.chain.from_iterable(new)))
        return outputs

    def _held_by_variables(self) -> list[Any]:
        return accessor.get(self._variables())

    def _variables(self) -> list[Any]:
        return list(itertools.chain.from_iterable(self.phase.variables_of(self.model)))

    def _layouts(self) -> list[Any]:
        bindings, topology = self.strategy.bindings, self.strategy.topology
        layouts = [topology.per_replica if v.has_parts else bindings.layout_of(v) for v in self._variables()]
        of_strategy = self.strategy.variable_placement.layouts
        if of_strategy is not None:
            of_strategy.check_used(is_training=self.phase.name == "train")
        return layouts

    def _parts(self) -> Mapping[int, tuple[int, ...]]:
        return {i: tuple(v.shape) for i, v in enumerate(self._variables()) if v.has_parts}

    @contextlib.contextmanager
    def _around(self, call: FitCall) -> Iterator[None]:
        del call
        try:
            with overridden(self.model, **{internals.GET_STATE: self._take_state}):
                yield
        finally:
            self._finish()

    def _take_state(self, *, purge_model_variables: bool = False, **groups: bool) -> Any:
        """Gives Keras's loop the state of the variables. If the loop empties them, the state is held before, so that
        Ctrl-C loses nothing.
        """
        state = getattr(type(self.model), internals.GET_STATE)(self.model, **groups)
        if purge_model_variables:
            state = self._held.hold(state)
            internals.purge(self.model, **groups)
        return state

    def _finish(self) -> None:
        if self._held.groups is None:
            return
        variables = self._variables()
        for variable, value in zip(variables, self._held.values(), strict=True):
            if not accessor.is_built(variable):  # the loop ended early
                accessor.set([variable], [value])
        self._held.release()
        home = self.strategy.variable_placement.parameter_device
        if home is not None:  # central storage: between the loops one device holds the variables
            accessor.set(variables, jax.device_put(accessor.get(variables), home))


def joined(outputs: Sequence[Any]) -> Any:
    """Returns the predictions for several batches as those for one."""
    if len(outputs) == 1:
        return outputs[0]
    return jax.tree_util.tree_map(lambda *parts: np.concatenate(parts), *outputs)
