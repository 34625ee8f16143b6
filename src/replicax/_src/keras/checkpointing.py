"""The parts of Keras objects that a checkpoint saves, matched by structure: attributes, positions of layers and in
lists.

Keras's own names count the objects of a process, so the second model of a process has another name than the first model
of the next process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from replicax._src.checkpoint.restoring import Restoration, advance_all
from replicax._src.checkpoint.tracked import Parts, escaped
from replicax._src.keras import internals
from replicax._src.keras.step_functions import GlobalStepFunction
from replicax._src.values.framework import Tracking

_OBJECTS = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.random.SeedGenerator)

# To keep the state of the fit loop, track model.metrics.
_NOT_SAVED = {*internals.ATTRIBUTES_OF_LOOPS, *internals.ATTRIBUTES_OF_TRACKERS}


def _kind_of(tracked: Any) -> str:
    """Returns the kind of a tracked object. For an optimizer it is the Keras class at its base: Adam for AdamW and for
    a user's own Adam.

    An optimizer that does not inherit from any Keras optimizer is known only by the names of its optimizer slots.
    """
    base = keras.optimizers.Optimizer
    classes = type(tracked).__mro__ if isinstance(tracked, base) else ()
    of_keras = [
        c for c in classes if issubclass(c, base) and c is not base and c.__module__.startswith("keras.")
    ]
    return of_keras[-1].__name__ if of_keras else ""


def _parts_of(tracked: Any) -> Parts:
    variables = _variables_of(tracked)
    own = {id(variable) for variable in variables}
    parts: dict[str, Any] = {}
    if isinstance(tracked, (keras.Sequential, _functional_class())):
        parts |= {f"layers/{i}": layer for i, layer in enumerate(tracked.layers)}
    for name, value in vars(tracked).items():
        if name not in _internal_names():
            parts |= dict(_found(name.lstrip("_"), value, own))
    reached = {id(v) for part in parts.values() for v in _variables_of(part)}
    rest = [variable for variable in variables if id(variable) not in reached]
    return parts | {f"variables/{i}": variable for i, variable in enumerate(rest)}


def _found(name: str, value: Any, own: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields the saved parts of an attribute by name, also those in pytrees."""
    if isinstance(value, keras.Variable):
        if id(value) in own:
            yield name, value
    elif isinstance(value, _OBJECTS):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _found(f"{name}/{escaped(str(key))}", item, own)
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _found(f"{name}/{position}", item, own)


def _variables_of(tracked: Any) -> list[Any]:
    if isinstance(tracked, keras.Variable):
        return [tracked]
    return [tracked.state] if isinstance(tracked, keras.random.SeedGenerator) else list(tracked.variables)


@functools.cache
def _internal_names() -> set[str]:
    """Returns the names of attributes that every layer has. They repeat what other attributes hold."""
    return {*vars(keras.layers.Layer(name="any")), *_NOT_SAVED}


@functools.cache
def _functional_class() -> type:
    inputs = keras.Input((1,), name="any_input")
    outputs = keras.layers.Identity(name="any_layer")(inputs)  # Keras 3.12 refuses the inputs themselves
    return type(keras.Model(inputs, outputs, name="any"))


def _bring_state(tracked: Any) -> None:
    """Gives the variables their values, which are in Keras's loop while ``fit`` runs."""
    if isinstance(tracked, keras.Model):
        internals.sync(tracked)


def _in_loop(tracked: Any) -> Callable[[], Mapping[int, Any]] | None:
    """Returns the reader of the state that Keras's loop holds while ``fit`` runs."""
    function = getattr(tracked, "train_function", None) if isinstance(tracked, keras.Model) else None
    return function.reader() if isinstance(function, GlobalStepFunction) else None


def _finish(tracked: Any) -> None:
    """Recomputes the mean and variance of a ``Normalization`` layer. Keras derives these constants from its variables
    only when it builds or loads the layer.
    """
    if isinstance(tracked, keras.layers.Normalization) and tracked.built:
        tracked.finalize_state()


def _is_unbuilt(tracked: Any) -> bool:
    return isinstance(tracked, (keras.Layer, keras.optimizers.Optimizer)) and not tracked.built


def _watch(tracked: Any, restoration: Restoration) -> None:
    """Advances the restoration when a layer or an optimizer has been built."""
    if _is_unbuilt(tracked):
        _watch_build(tracked, restoration)


def _watch_build(tracked: Any, restoration: Restoration) -> None:
    original = tracked.build
    is_own = "build" in vars(tracked)

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        with _growing(restoration):
            result = original(*args, **kwargs)
            if vars(tracked).get("build") is build:
                if is_own:
                    tracked.build = original
                else:
                    del tracked.build
        return result

    tracked.build = build


class _Grown(threading.local):
    """The restorations to advance when the outermost object that this thread builds is complete."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: set[Restoration] = set()


_grown = _Grown()


@contextlib.contextmanager
def _growing(restoration: Restoration) -> Iterator[None]:
    """Wraps the build of an object.

    A model builds its layers. It is matched once, after its own build has assigned values, not after each layer.
    """
    _grown.depth += 1
    _grown.waiting.add(restoration)
    try:
        yield
    finally:
        _grown.depth -= 1
        waiting: set[Restoration] = set()
        if not _grown.depth:
            waiting, _grown.waiting = _grown.waiting, set()
    advance_all(waiting)


TRACKING = Tracking(
    parts_of=lambda tracked: _parts_of(tracked) if isinstance(tracked, _OBJECTS) else None,
    kind_of=_kind_of,
    is_growing=_is_unbuilt,
    watch=_watch,
    finish=_finish,
    prepare=_bring_state,
    in_loop=_in_loop,
)
