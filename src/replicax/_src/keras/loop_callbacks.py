"""The callbacks of Keras's loops: the order of their calls, and the process that writes their files."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import keras

from replicax._src.checkpoint import agreement
from replicax._src.cluster.leading import value_of_leader
from replicax._src.cluster.peers import Peers
from replicax._src.keras import checkpoint_callback, fit_status, internals, shared_reads, surrounding_callback
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.gradient_accumulation import add_up
from replicax._src.keras.overriding import overridden
from replicax._src.keras.tensorboard_callback import closed_on_error
from replicax._src.packaging.extras import EXTRAS, install_packages
from replicax._src.strategies.strategy import Strategy
from replicax._src.vocabulary.errors import MissingExtraError

_SAVING: Final = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


@contextlib.contextmanager
def in_loop(call: FitCall, strategy: Strategy | None) -> Iterator[FitCall]:
    """Prepares the callbacks for one of Keras's loops, which runs inside the block. Yields the call with the callbacks
    that Keras must call.
    """
    callbacks = call.callbacks
    is_ordered = isinstance(callbacks, keras.callbacks.CallbackList)
    listed: list[Any] = callbacks.callbacks if is_ordered else keras.tree.flatten(callbacks or [])
    _check_has_tensorflow(listed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(closed_on_error(listed))
        if call.method == "fit":
            _keep_files_of_others(listed)
            stack.enter_context(_written_by_chief(strategy, listed))
            listed = stack.enter_context(surrounding_callback.in_fit(listed))
            reads = None if is_ordered else shared_reads.of(strategy)
            if reads is not None:
                listed = stack.enter_context(reads.in_fit(listed))
            if strategy is not None and strategy.topology.peers is not None:
                add = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: add_up(call.model))
                listed = [add, *listed]  # so that each process can read accumulated gradients alone
            listed = stack.enter_context(checkpoint_callback.in_fit(call, strategy, listed))
            if strategy is not None:  # otherwise Keras's own steps run, which count nothing
                listed = stack.enter_context(fit_status.in_fit(listed))
            if not is_ordered:
                call = call.with_arguments(callbacks=listed)
        yield call


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
    """Makes only the first of several processes write the files of Keras's own callbacks. All processes read them, so
    they wait until a file is written; unless some processes lack these callbacks. All processes call it.
    """
    peers = None if strategy is None else strategy.topology.peers
    if peers is None:
        yield
        return
    saving = [one for one in callbacks if isinstance(one, _SAVING)]
    have = peers.gather("keras files", [type(one).__name__ for one in saving], "to start fit")
    write = _leader_writes if all(theirs == have[0] for theirs in have) else _if_leader
    with contextlib.ExitStack() as stack:
        for one in saving:
            due = functools.partial(_is_due, one, internals.should_save(one))
            stack.enter_context(overridden(one, **{internals.SHOULD_SAVE: due}))
            names = (internals.SAVE, "on_train_end") if isinstance(one, _SAVING[1]) else (internals.SAVE,)
            written = {name: functools.partial(write, peers, one, getattr(one, name)) for name in names}
            stack.enter_context(overridden(one, **written))
        yield


def _keep_files_of_others(callbacks: Sequence[Any]) -> None:
    """Makes a replacement append to the logs that the other processes write."""
    for one in callbacks if agreement.is_solo() else ():
        if isinstance(one, keras.callbacks.CSVLogger):
            one.append = True


def _leader_writes(
    peers: Peers, callback: Any, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Calls a method that writes in the first of the live processes, and gives all of them the best value that it then
    has. If that process dies meanwhile, the next one writes. All call it. A replacement that has not taken part in a
    step writes nothing.
    """
    if agreement.is_solo():
        return

    def write() -> str | None:
        method(*args, **kwargs)
        best: Any = callback.best if isinstance(callback, keras.callbacks.ModelCheckpoint) else None
        return None if best is None else float(best).hex()

    best = value_of_leader(
        lambda value: peers.gather("keras files", value(), "for a file of a callback"),
        lambda: peers.is_leader,
        write,
    )
    if best is not None:
        callback.best = float.fromhex(best)


def _if_leader(peers: Peers, callback: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls a method in the first of the live processes, which may change. It does not communicate."""
    del callback
    if peers.is_leader:
        method(*args, **kwargs)


def _is_due(callback: Any, is_due: Any, batch: int) -> bool:
    """Gives the model its state in every process when one process saves between two batches, because saving
    communicates.
    """
    due = is_due(batch)
    if due:
        internals.sync(callback.model)
        add_up(callback.model)
    return due
