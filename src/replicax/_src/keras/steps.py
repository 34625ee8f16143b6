"""The steps that Keras's loops call: ``model.train_function`` and its two sisters, for a strategy.

Keras keeps its loops, with callbacks, logs and data. A loop calls ``function(state, iterator)``. The state is arrays in
groups, one group for each kind of variable. The function takes as many batches as it runs steps. While a loop runs the
model's variables are empty, so the groups hold the only copy of their values.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np

from replicax._src.devices.autoshard import rows_of_global_batch
from replicax._src.errors import InvalidArgumentError
from replicax._src.keras import internals
from replicax._src.keras.capture import accessor
from replicax._src.keras.sharded_state import ShardedRead, with_sharded_state
from replicax._src.keras.workers import SameBatches
from replicax._src.lowering.batch import Batch
from replicax._src.lowering.global_view import GlobalStep
from replicax._src.lowering.held_state import HeldState
from replicax._src.status.counters import counters
from replicax._src.tracing import side_effects
from replicax._src.tracing.bindings import added_up
from replicax._src.tracing.loss_counts import counting

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy

State = Sequence[Any]


@dataclass(frozen=True)
class Phase:
    """One of the three phases of a Keras model.

    Attributes:
      name: "train", "test" or "predict": the model has ``<name>_step`` and ``<name>_function``.
      groups: The lists of variables that make up the state, in order.
    """

    name: str
    groups: tuple[str, ...]

    def variables_of(self, model: Any) -> list[Sequence[Any]]:
        """Returns the model's variables, list by list."""
        return [
            model.optimizer.variables if group == "optimizer_variables" else getattr(model, group)
            for group in self.groups
        ]

    @property
    def function_name(self) -> str:
        return f"{self.name}_function"

    @property
    def step_name(self) -> str:
        return f"{self.name}_step"

    @property
    def is_predict(self) -> bool:
        return self.name == "predict"


_LAYERS = ("trainable_variables", "non_trainable_variables")
TRAIN = Phase("train", (*_LAYERS, "optimizer_variables", "metrics_variables"))
TEST = Phase("test", (*_LAYERS, "metrics_variables"))
PREDICT = Phase("predict", _LAYERS)


class StepFunction(abc.ABC):
    """A ``train_function``, ``test_function`` or ``predict_function`` of a model.

    Attributes:
      model: The model whose steps it runs.
      phase: The phase of these steps.
      strategy: The strategy that they run under.
      name: The display name, such as ``"Classifier.train_step"``.
    """

    def __init__(self, model: Any, phase: Phase, strategy: Strategy):
        self.model, self.phase, self.strategy = model, phase, strategy
        self.name = f"{type(model).__name__}.{phase.step_name}"
        self._same_batches = SameBatches(strategy.topology.peers, self.name)
        self._num_batches: int | None = None

    def in_call(self, given: Mapping[str, Any], *, is_loop: bool) -> contextlib.AbstractContextManager[None]:
        """Surrounds one of Keras's methods. On exit the variables have the full state again.

        Args:
          given: The arguments of the method, by name.
          is_loop: True if the method loops over a dataset.
        """
        if is_loop:
            self._same_batches.begin()
            self._num_batches = None
        return self._around(given, is_loop=is_loop)

    def note_batches(self) -> None:
        """Records that the current loop had batches, which another function has read."""
        self._num_batches = 1

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

    def first_batch(self, iterator: Iterator[Any]) -> Batch:
        """Takes one batch, to read its shapes.

        Raises:
          StopIteration: The data have no batch.
        """
        batch = next(self._take(iterator, is_kept=False), None)
        if batch is None:
            raise StopIteration
        return batch

    @abc.abstractmethod
    def _around(self, given: Mapping[str, Any], *, is_loop: bool) -> contextlib.AbstractContextManager[None]:
        """Implements ``in_call``."""

    def _take(self, iterator: Iterator[Any], *, is_kept: bool) -> Iterator[Batch]:
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
                self._same_batches.look_at_end()
                return
            finally:
                counters.end_reading()
            self._num_batches = 1
            batch = Batch(self._standardised(data), is_kept=is_kept)
            self._same_batches.look_at(batch)
            counters.num_batches += 1
            counters.num_examples += self._num_rows_here(batch)
            yield batch

    def _num_rows_here(self, batch: Batch) -> int:
        share = self.strategy.topology.share
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
    """Runs the model's own stateless step in the global view; see ``lowering/global_view.py``."""

    def __init__(self, model: Any, phase: Phase, strategy: Strategy):
        super().__init__(model, phase, strategy)
        self._held = HeldState(
            strategy.topology,
            lambda: [variable.path for variable in self._variables()],
            self._layouts,
            self._parts,
        )
        self._step = GlobalStep(
            self._traced_step,
            self.name,
            strategy.topology,
            donates=not phase.is_predict,  # Keras reuses the state of a prediction
            keeps_all=phase.is_predict,
        )

    def _traced_step(self, state: State, data: Any) -> tuple[Any, State]:
        """Runs the step in a trace: warns of side effects of the user's layers, steps and losses."""
        model = self.model
        code = [layer.call for layer in (*internals.layers_of(model), model)]
        with (
            side_effects.reported(*code, getattr(model, self.phase.step_name), is_key=False) as attempt,
            attempt(),
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

    def hold(self, state: State) -> State:
        """Takes over the state of the variables, which Keras empties next."""
        return self._held.hold(state)

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        groups = self._held.hold(state)
        batches: list[Batch] = []
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

    def described(
        self, state: Sequence[list[Any]], batch: Batch
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

    def _run(self, batches: Sequence[Batch], capacity: int) -> list[Any]:
        if not self._is_compiled:
            return [self._run_uncompiled(batch) for batch in batches]
        return self._step.run(
            self._held,
            batches,
            capacity if len(batches) > 1 else 1,
            lambda program: self._held.adopt(program.written, self._held_by_variables),
        )

    def _run_uncompiled(self, batch: Batch) -> Any:
        """Runs a step operation by operation, for debugging. All devices that hold the state compute everything."""
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
    def _around(self, given: Mapping[str, Any], *, is_loop: bool) -> Iterator[None]:
        del given, is_loop
        try:
            yield
        finally:
            self._finish()

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
