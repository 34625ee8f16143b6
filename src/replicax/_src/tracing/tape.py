"""GradientTape: an open tape leaves marks in the trace, which ``rewrite`` resolves. It records nothing itself."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.markers import Question
from replicax._src.user.user_code import user_line
from replicax._src.values.framework import is_variable
from replicax._src.vocabulary.errors import InvalidArgumentError, TapeError
from replicax._src.vocabulary.options import UnconnectedGradients

log = logging.getLogger("replicax")
_ids = itertools.count()
_warned: set[str] = set()
_NOT_RECORDED = "differentiable sources are variables and arrays of a floating or complex dtype"


class GradientTape:
    """Differentiates computations while it is open, as ``tf.GradientTape`` does.

    Works inside ``Strategy.run``, ``rx.function`` and ``rx.value_and_grad``, which trace functions: the program
    computes the forward pass once, and ``jax.vjp`` gives the derivative. The tape watches trainable variables when they
    are read. Call ``watch`` for arrays. The tape does not communicate: gradients are the replica's own, and an
    optimizer's ``apply`` sums them over replicas.

    Args:
      persistent: True to allow more than one call of ``gradient``.
      watch_accessed_variables: True to watch trainable variables when they are read.

    Raises:
      TapeError: The tape is opened outside of a trace.

    Source: TensorFlow, ``tf.GradientTape``. One difference: with ``RunOptions(eager=True)`` the tape records
    the operations that run.

    >>> import jax.numpy as jnp, replicax as rx
    >>> def square(x):
    ...     with rx.GradientTape() as tape:
    ...         tape.watch(x)
    ...         y = x * x
    ...     return tape.gradient(y, x)
    >>> float(rx.get_strategy().run(square, args=(jnp.float32(3.0),)))
    6.0
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True):
        self._persistent = persistent
        self._watches_variables = watch_accessed_variables
        self._capture: Any = None
        self._is_recording = False
        self._was_used = False
        self._reset()

    def _reset(self) -> None:
        self._id = next(_ids)
        self._reads: dict[int, tuple[Any, list[Any]]] = {}
        self._watched: dict[int, Any] = {}

    def __enter__(self) -> GradientTape:
        capture = current_capture()
        if capture is None:
            raise TapeError(
                "GradientTape was opened outside of a trace, so there is nothing to record. Open it in a "
                "function that strategy.run or rx.function runs, or use rx.value_and_grad(fn)."
            )
        self._capture = capture
        self._start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._is_recording:
            self._stop()

    def _start(self) -> None:
        if self._is_recording:
            raise TapeError("The tape is already recording.")
        self._capture.begin_recording(self, self._id)
        self._is_recording = True

    def _stop(self) -> None:
        self._capture.end_recording(self, self._id)
        self._is_recording = False

    @contextlib.contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Context whose computations are constants for this tape."""
        if not self._is_recording:
            raise TapeError("stop_recording was called on a tape that is not recording.")
        self._stop()
        try:
            yield
        finally:
            self._start()

    def reset(self) -> None:
        """Forgets everything that was recorded."""
        was_recording = self._is_recording
        if was_recording:
            self._stop()
        self._reset()
        if was_recording:
            self._start()

    def watch(self, tensor: Any) -> None:
        """Makes arrays (or variables, or a pytree of both) sources of gradients.

        Raises:
          InvalidArgumentError: A leaf is neither an array nor a variable.
        """
        for leaf in _leaves(tensor):
            if getattr(leaf, "dtype", None) is None:
                raise InvalidArgumentError(
                    f"tape.watch got {leaf!r}, a {type(leaf).__name__}; {_NOT_RECORDED}. For a number use "
                    f"jnp.float32(number) and compute with that."
                )
            if jax_compat.is_untyped_constant(leaf):
                raise InvalidArgumentError(
                    f"tape.watch got the constant {leaf}, whose dtype is Python's: each use of it is another constant. "
                    f"Give it a dtype, for example jnp.float32(number)."
                )
            if id(leaf) not in self._watched and self._is_recording and not is_variable(leaf):
                self._capture.watch(self._id, leaf)
            self._watched[id(leaf)] = leaf

    def watched_variables(self) -> tuple[Any, ...]:
        """Returns the variables read so far that the tape watches, in the order of their first read."""
        return tuple(v for v, _ in self._reads.values() if self._is_watched_variable(v))

    def record_read(self, variable: Any, value: Any) -> None:
        """Notes a read of a variable. Gradients of different values of one variable add up."""
        _, values = self._reads.setdefault(id(variable), (variable, []))
        if not any(seen is value for seen in values):
            values.append(value)

    def _is_watched_variable(self, variable: Any) -> bool:
        if id(variable) in self._watched:
            return True
        return self._watches_variables and bool(getattr(variable, "trainable", False))

    def _readings(self, source: Any) -> list[Any]:
        """Returns the arrays whose gradients add up to the gradient of ``source``."""
        if is_variable(source):
            is_read = id(source) in self._reads and self._is_watched_variable(source)
            values = self._reads[id(source)][1] if is_read else []
        else:
            values = [source] if isinstance(source, jax.Array) else []
        return [v for v in values if jnp.issubdtype(v.dtype, jnp.inexact)]

    def _watched_values(self) -> list[Any]:
        """Returns the arrays from which all possible sources are computed."""
        values = [leaf for leaf in self._watched.values() if not is_variable(leaf)]
        for variable, readings in self._reads.values():
            if self._is_watched_variable(variable):
                values += readings
        return values

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the derivative of ``target`` (summed, where it has several elements) by each source.

        Args:
          target: An array, or a pytree of arrays, whose gradients add up.
          sources: Variables, watched arrays, arrays computed from these, or a pytree of such.
          output_gradients: A pytree like ``target`` with the weights of its elements; ones by default.
          unconnected_gradients: The result for a source that the target does not depend on: NONE gives None, ZERO
            zeros.

        Returns:
          A pytree like ``sources`` of arrays of the sources' shapes, this replica's own.

        Raises:
          TapeError: It is the second call on a tape that is not persistent, or a call in another trace than the tape's
            (inside a scan or jit that started after the tape was opened).
        """
        unconnected = UnconnectedGradients.parse(unconnected_gradients)
        capture = self._capture
        if output_gradients is None and capture is not None and capture.is_replica:
            _warn_of_vectors(target)
        if capture is None:
            raise TapeError("tape.gradient was called before the tape was opened with `with`.")
        if self._was_used and not self._persistent:
            raise TapeError(
                "A non-persistent GradientTape can only be used to compute one set of gradients. Use "
                "GradientTape(persistent=True) to call tape.gradient again."
            )
        if self._is_recording and not self._persistent:
            self._stop()  # as in TensorFlow, the computation of the gradient is not recorded
            with contextlib.ExitStack() as resume:
                resume.callback(self._start)
                return self._gradient(capture, target, sources, output_gradients, unconnected)
        return self._gradient(capture, target, sources, output_gradients, unconnected)

    def _gradient(
        self, capture: Any, target: Any, sources: Any, seeds: Any, unconnected: UnconnectedGradients
    ) -> Any:
        self._was_used = True
        leaves, tree = jax.tree_util.tree_flatten(sources, is_leaf=is_variable)
        readings = [self._readings(leaf) for leaf in leaves]
        targets = [jnp.asarray(t) for t in _leaves(target)]
        seed_leaves = _seeds(seeds, target, len(targets))
        flat = [value for values in readings for value in values]
        derived = [
            not is_variable(leaf) and id(leaf) not in self._watched
            for leaf, values in zip(leaves, readings, strict=True)
            for _ in values
        ]
        watched = self._watched_values() if any(derived) else []
        asked = Question(targets, seed_leaves, flat, derived, watched)
        gradients, missing = capture.gradient(self._id, asked) if flat else ([], set())
        results = []
        position = 0
        for leaf, values in zip(leaves, readings, strict=True):
            span = range(position, position + len(values))
            position += len(values)
            connected = [gradients[i] for i in span if i not in missing]
            if connected:
                total = connected[0]
                for extra in connected[1:]:
                    total = total + extra
                results.append(total)
            elif unconnected is UnconnectedGradients.ZERO:
                results.append(jnp.zeros(jnp.shape(leaf), leaf.dtype))
            else:
                results.append(None)
        return jax.tree_util.tree_unflatten(tree, results)


def _warn_of_vectors(target: Any) -> None:
    """Warns, once for each line, of losses that were not averaged, because the gradient is that of their sum."""
    shape = next((shape for leaf in _leaves(target) if np.prod(shape := np.shape(leaf)) > 1), None)
    line = user_line()
    if shape is not None and line not in _warned:
        _warned.add(line)
        log.warning(
            "%s: the target of tape.gradient has shape %s, and its gradient is that of the sum of its elements. For the mean "
            "over the global batch write loss = rx.nn.compute_average_loss(losses); for the sum, jnp.sum(losses).",
            line,
            list(shape),
        )


def _leaves(pytree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(pytree, is_leaf=is_variable)


def _seeds(seeds: Any, target: Any, num_targets: int) -> list[Any]:
    if seeds is None:
        return []
    flat = jax.tree_util.tree_leaves(seeds)
    if len(flat) != num_targets:
        raise InvalidArgumentError(
            f"output_gradients has {len(flat)} leaves and target has {num_targets}; they must have the same structure."
        )
    return flat
