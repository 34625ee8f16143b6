"""``SurroundingCallback``: a callback that surrounds a ``fit``, and what other callbacks keep of the model's values.

``loop_callbacks.py`` runs ``fit`` inside of ``in_fit``. A part beside the core derives its callbacks from the class.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import keras
from keras.callbacks import Callback

from replicax._src.keras import internals
from replicax._src.keras.overriding import overridden
from replicax._src.values.framework import use_imported

_P = ParamSpec("_P")
_R = TypeVar("_R")


class SurroundingCallback(Callback, abc.ABC):
    """A callback that Keras calls before the others."""

    def __init__(self) -> None:
        super().__init__()
        use_imported()  # so that `fit` calls `in_fit` outside of every scope too

    @abc.abstractmethod
    def around_fit(self, others: Sequence[Callback]) -> contextlib.AbstractContextManager[object]:
        """Surrounds a ``fit`` with these other callbacks. Private."""

    @abc.abstractmethod
    def keeping_values(self) -> contextlib.AbstractContextManager[object]:
        """Surrounds what ``ModelCheckpoint`` saves, and what ``EarlyStopping`` keeps. Private."""


@contextlib.contextmanager
def in_fit(callbacks: list[Callback]) -> Iterator[list[Callback]]:
    """Yields the callbacks for the ``fit`` that runs inside the block."""
    ours = [one for one in callbacks if isinstance(one, SurroundingCallback)]
    if not ours:
        yield callbacks
        return
    others = [one for one in callbacks if not isinstance(one, SurroundingCallback)]
    with contextlib.ExitStack() as stack:
        for one in ours:
            stack.enter_context(one.around_fit(others))
            for other in others:
                for name in _keeping(other):
                    method = _inside(one.keeping_values, getattr(other, name))
                    stack.enter_context(overridden(other, **{name: method}))
        yield [*ours, *others]


def _keeping(callback: Callback) -> Sequence[str]:
    """Returns the methods of a callback that save or keep the model's values."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return (internals.SAVE,)
    if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
        return ("on_epoch_end",)
    return ()


def _inside(
    context: Callable[[], contextlib.AbstractContextManager[object]], method: Callable[_P, _R]
) -> Callable[_P, _R]:
    def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with context():
            return method(*args, **kwargs)

    return inside
