"""Finds labels outside ``[0, C)`` in programs that are checked. Other programs compute nothing for it.

A sparse categorical loss turns a label into a row of a one-hot matrix. JAX gives a row of zeros for a label outside the
range, so that its loss and its gradient are 0. TensorFlow raises an error on CPUs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.user.user_code import user_line
from replicax._src.vocabulary.errors import LabelError

_watching: contextvars.ContextVar[LabelWatch | None] = contextvars.ContextVar("replicax_labels", default=None)


@final
class LabelWatch:
    """Collects the labels outside the range that programs meet, if they were traced in ``watching_labels``."""

    def __init__(self) -> None:
        self._by_line: dict[str, tuple[int, int, int]] = {}

    def note(self, line: str, num_classes: int, count: Any, label: Any) -> None:
        """Called by the program with the number of labels outside the range, and the first of them."""
        if int(count):
            known = self._by_line.get(line, (num_classes, 0, int(label)))
            self._by_line[line] = (num_classes, known[1] + int(count), known[2])

    def taken(self) -> list[str]:
        """Waits for the programs, and returns a sentence for each line that had such labels. Forgets them."""
        jax.effects_barrier()
        by_line, self._by_line = self._by_line, {}
        return [
            f"{count} label(s) at {line} are outside [0, {num_classes}), for example {label}: their one-hot rows are zeros, so "
            f"their loss and gradient are 0."
            for line, (num_classes, count, label) in by_line.items()
        ]

    def check(self, name: str) -> None:
        """Waits for the program of a function.

        Raises:
          LabelError: It met labels outside the range.
        """
        sentences = self.taken()
        if sentences:
            raise LabelError(
                f"{name}: {' '.join(sentences)} Number the classes from 0, give the model one output for each class, or leave out such "
                f"rows: ignore_class of the loss. The variables keep the values that they had before this step."
            )


@contextlib.contextmanager
def watching_labels() -> Iterator[LabelWatch]:
    """Context in which functions are traced whose programs note labels outside the range."""
    watch = LabelWatch()
    token = _watching.set(watch)
    try:
        yield watch
    finally:
        _watching.reset(token)


def note_labels(labels: Any, num_classes: int) -> None:
    """Makes the program note labels outside ``[0, num_classes)``, if it is to be checked.

    Args:
      labels: [...] integers.
    """
    watch = _watching.get()
    labels = jnp.asarray(labels)
    if watch is None or not labels.size:
        return
    flat = labels.reshape(-1)
    is_outside = (flat < 0) | (flat >= num_classes)
    line = user_line()

    def note(count: Any, label: Any) -> None:
        watch.note(line, num_classes, count, label)

    jax.debug.callback(note, jnp.sum(is_outside), flat[jnp.argmax(is_outside)])
