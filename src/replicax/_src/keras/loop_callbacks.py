"""The callbacks of Keras's loops: the order of their calls, and the process that writes their files."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from replicax._src.errors import MissingExtraError
from replicax._src.extras import EXTRAS, install_packages
from replicax._src.keras import checkpoint_callback, fit_status, internals, shared_reads
from replicax._src.keras.accumulation import add_up
from replicax._src.keras.overriding import muted, overridden
from replicax._src.keras.tensorboard_callback import closed_on_error

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy


@contextlib.contextmanager
def in_loop(model: Any, strategy: Strategy | None, method: str, given: dict[str, Any]) -> Iterator[None]:
    """Prepares the callbacks for one of Keras's loops, which runs inside the block.

    Args:
      given: The arguments of the loop, by name. Its callbacks are replaced by those that Keras must call.
    """
    callbacks = given.get("callbacks")
    is_ordered = isinstance(callbacks, keras.callbacks.CallbackList)
    listed: list[Any] = callbacks.callbacks if is_ordered else keras.tree.flatten(callbacks or [])
    _check_has_tensorflow(listed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(closed_on_error(listed))
        if method == "fit":
            stack.enter_context(_written_by_chief(strategy, listed))
            reads = None if is_ordered else shared_reads.of(strategy)
            if reads is not None:
                listed = stack.enter_context(reads.in_fit(listed))
            if strategy is not None and strategy.topology.peers is not None:
                add = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: add_up(model))
                listed = [add, *listed]  # so that each process can read accumulated gradients alone
            listed = stack.enter_context(checkpoint_callback.in_fit(model, strategy, given, listed))
            if strategy is not None:  # otherwise Keras's own steps run, which count nothing
                listed = stack.enter_context(fit_status.in_fit(listed))
            if not is_ordered:
                given["callbacks"] = listed
        yield


def _check_has_tensorflow(callbacks: Sequence[Any]) -> None:
    """Raises if Keras's own TensorBoard callback would fail because TensorFlow is missing.

    Raises:
      MissingExtraError: TensorFlow is not installed.
    """
    is_needed = any(isinstance(one, keras.callbacks.TensorBoard) for one in callbacks)
    if is_needed and importlib.util.find_spec("tensorflow") is None:
        raise MissingExtraError(
            "keras.callbacks.TensorBoard needs TensorFlow, which is not installed. Use rx.keras.callbacks.TensorBoard "
            f"instead: it takes the same arguments, writes the same data, and needs: {install_packages(EXTRAS['summaries'])}"
        )


@contextlib.contextmanager
def _written_by_chief(strategy: Strategy | None, callbacks: Sequence[Any]) -> Iterator[None]:
    """Makes only the first of several processes write the files of Keras's own callbacks. All processes read them."""
    peers = None if strategy is None else strategy.topology.peers
    if peers is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for one in callbacks:
            is_backup = isinstance(one, keras.callbacks.BackupAndRestore)
            if not is_backup and not isinstance(one, keras.callbacks.ModelCheckpoint):
                continue
            due = functools.partial(_is_due, one, internals.should_save(one))
            stack.enter_context(overridden(one, **{internals.SHOULD_SAVE: due}))
            if not peers.is_leader:
                deletes = ("on_train_end",) if is_backup else ()
                stack.enter_context(muted(one, internals.SAVE, *deletes))
        yield


def _is_due(callback: Any, is_due: Any, batch: int) -> bool:
    """Gives the model its state in every process when one process saves between two batches, because saving
    communicates.
    """
    due = is_due(batch)
    if due:
        internals.sync(callback.model)
        add_up(callback.model)
    return due
