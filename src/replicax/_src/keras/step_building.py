"""Models whose own steps, in TensorFlow's style, make what Keras would make before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import keras

from replicax._src.keras import internals
from replicax._src.keras.fit_arguments import without_batch
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.overriding import overridden


@contextlib.contextmanager
def built_by_step(call: FitCall) -> Iterator[None]:
    """Lets the model's own step build the model inside the block, as in TensorFlow, where Keras cannot.

    Keras builds a model by calling it on the ``x`` of ``(x, y, sample_weight)``. A step in TensorFlow's style may take
    any data, and its model need not have a ``call``.
    """
    model, original = call.model, getattr(call.model, internals.BUILD)

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        try:
            if type(model).call is keras.Model.call:
                raise _NotCallable
            original(iterator=iterator and _checked(iterator, call), data_batch=data_batch)
        except _NotCallable:
            _build_optimizer(model)

    with overridden(model, **{internals.BUILD: build}):
        yield


@final
class _NotCallable(Exception):
    """Keras cannot call the model on a batch."""


def _checked(loop: Any, call: FitCall) -> Iterator[Any]:
    """Yields what the loop yields, as lists.

    Raises:
      _NotCallable: A batch is not ``(x, y, sample_weight)``.
    """
    for begin, end, batches in loop:
        batch = batches[0] if isinstance(batches, (list, tuple)) else next(batches, None)
        if batch is None:
            raise without_batch(call)
        if isinstance(batch, (list, tuple)) and len(batch) > 3:
            raise _NotCallable
        yield begin, end, [batch]


def _build_optimizer(model: Any) -> None:
    """Builds the optimizer of ``compile`` as Keras does, if the networks of the model are built."""
    networks = [layer for layer in internals.layers_of(model) if layer is not model]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and all(layer.built for layer in networks):
        optimizer.build(model.trainable_variables)
