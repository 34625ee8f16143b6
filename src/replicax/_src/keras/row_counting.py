"""Counts of the batches and rows on which a running ``fit`` trains, for callbacks that weigh them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

import jax

from replicax._src.keras import internals
from replicax._src.keras.overriding import overridden
from replicax._src.keras.step_functions import StepFunction


@final
class CountingFunction:
    """Keras's own ``train_function``, which trains outside of every scope, with counts.

    Attributes:
      num_taken, num_rows: The numbers of batches that it has taken, and of their rows.
    """

    def __init__(self, model: Any):
        self._model, self._function = model, model.train_function
        self.num_taken = self.num_rows = 0

    def __call__(self, state: Any, iterator: Iterator[Any]) -> Any:
        return self._function(state, self._counted(iterator))

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        is_stacked = internals.num_in_element(self._model) > 1
        for element in iterator:
            shape = next((leaf.shape for leaf in jax.tree_util.tree_leaves(element) if leaf.ndim), (0, 0))
            self.num_taken += shape[0] if is_stacked else 1
            self.num_rows += shape[0] * shape[1] if is_stacked else shape[0]
            yield element


@contextlib.contextmanager
def counting_rows(model: Any) -> Iterator[Callable[[], tuple[int, int]]]:
    """Yields a function for the ``fit`` that runs inside the block, after Keras has made the ``train_function``.

    It returns the numbers of batches and of rows since its last call: rows of all replicas, in all processes of the
    strategy.
    """
    function: StepFunction | CountingFunction = model.train_function
    with contextlib.ExitStack() as stack:
        if not isinstance(function, StepFunction):
            function = CountingFunction(model)
            stack.enter_context(overridden(model, train_function=function))
        last = function.num_taken, function.num_rows

        def new() -> tuple[int, int]:
            nonlocal last
            before, last = last, (function.num_taken, function.num_rows)
            return last[0] - before[0], last[1] - before[1]

        yield new
