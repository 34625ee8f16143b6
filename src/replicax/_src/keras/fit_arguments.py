"""Checks of what a user gives to ``fit`` and ``evaluate``: no rows, lists of numbers, labels that no class has."""

from __future__ import annotations

import logging
from typing import Any, Final

import jax
import keras
import numpy as np

from replicax._src.input.elements import EmptyDatasetError
from replicax._src.keras.fit_call import FitCall
from replicax._src.user.user_code import user_line
from replicax._src.vocabulary.errors import InvalidArgumentError

log = logging.getLogger("replicax")

_reported: set[str] = set()


def check_arguments(call: FitCall) -> None:
    """Checks the data of a method that loops over them.

    Raises:
      EmptyDatasetError: An argument is arrays without rows.
      InvalidArgumentError: ``x``, ``y`` or ``sample_weight`` is a list of numbers, or of lists of them; or ``y`` has
        integer labels, and the loss compares distributions.
    """
    _check_has_rows(call)
    _check_no_lists(call)
    if call.method != "predict":
        _check_one_hot(call)
        _warn_of_labels(call)


def _check_has_rows(call: FitCall) -> None:
    """Raises for arrays without rows. If Keras must still build the model, it runs no step on them and ends without an
    error.
    """
    for name in ("x", "validation_data"):
        leaves = keras.tree.flatten(call.arguments[name]) if name in call.arguments else []
        if any(isinstance(x, np.ndarray | jax.Array) and x.ndim and not x.shape[0] for x in leaves):
            raise without_batch(call, name)


def without_batch(call: FitCall, data: str = "x") -> EmptyDatasetError:
    """Returns the error for data that have no batch."""
    what = "data" if data == "x" else data
    return EmptyDatasetError(
        f"{call.method}() of model {call.model.name!r} was given {what} without a single batch: arrays of no rows, or a "
        "dataset that is empty or used up."
    )


def _check_no_lists(call: FitCall) -> None:
    """Raises for rows that are Python lists: Keras takes a list for several inputs."""
    for argument in ("x", "y", "sample_weight"):
        data = first = call.arguments.get(argument)
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if isinstance(data, list | tuple) and isinstance(first, bool | int | float):
            raise InvalidArgumentError(
                f"`{argument}` is a {type(data).__name__} of Python numbers, and Keras takes a list for several inputs. Write "
                f"np.asarray({argument}), an array of rows."
            )


def _check_one_hot(call: FitCall) -> None:
    """Raises for integer labels and a loss that compares distributions. Keras raises too, and names only shapes."""
    model = call.model
    labels, num_classes = _labels(call), _num_classes(model)
    if labels is None or num_classes < 2 or labels.size != len(labels) or not _is(model, "categorical"):
        return
    raise InvalidArgumentError(
        f"`y` has integer labels of shape {labels.shape}, and categorical crossentropy takes one row of {num_classes} "
        "probabilities for each. Use keras.losses.SparseCategoricalCrossentropy, or "
        f"keras.utils.to_categorical(y, {num_classes})."
    )


def _warn_of_labels(call: FitCall) -> None:
    """Warns of integer labels in memory that no class of the model has. Keras on JAX trains without their rows."""
    model = call.model
    labels, num_classes = _labels(call), _num_classes(model)
    if labels is None or not num_classes or not _is(model, "sparse_categorical"):
        return
    if call.sample_weight is not None:  # 0 for these rows, perhaps
        return
    low, high = int(labels.min()), int(labels.max())
    if low >= 0 and high < num_classes:
        return
    line = user_line()
    if line not in _reported:
        _reported.add(line)
        log.warning(
            "%s: `y` has the label %d, and model %r has outputs for the %d classes 0 to %d. Rows with such labels have no "
            "loss, and training goes on without them. Count classes from 0, or give the last layer more units.",
            line,
            high if high >= num_classes else low,
            model.name,
            num_classes,
            num_classes - 1,
        )


def _labels(call: FitCall) -> np.ndarray | None:
    """Returns ``y`` if it is an array of integers in memory."""
    labels = call.y
    is_integer = isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and labels.size and labels.ndim
    return labels if is_integer and not isinstance(labels, np.memmap) else None


def _num_classes(model: Any) -> int:
    """Returns the size of the model's last axis; 0 if it has several outputs or its shape is not known yet."""
    shape = getattr(model, "output_shape", None)
    return shape[-1] if isinstance(shape, tuple) and shape and isinstance(shape[-1], int) else 0


def _is(model: Any, kind: str) -> bool:
    """Returns True if the model's only loss is a crossentropy of this kind, without a class to ignore.

    A model with a step or a loss of its own may do something else with the labels.
    """
    if any(getattr(type(model), name) is not getattr(keras.Model, name) for name in _OF_STEPS):
        return False
    loss = getattr(model, "loss", None)
    cls = _CROSSENTROPIES[kind]
    if isinstance(loss, cls):
        return getattr(loss, "ignore_class", None) is None
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
    return name in (f"{kind}_crossentropy", cls.__name__)


_OF_STEPS: Final = ("train_step", "test_step", "compute_loss")
_CROSSENTROPIES: Final = {
    "categorical": keras.losses.CategoricalCrossentropy,
    "sparse_categorical": keras.losses.SparseCategoricalCrossentropy,
}
