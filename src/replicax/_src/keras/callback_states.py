"""The other callbacks of a ``fit``: their states in its checkpoint, silence in a replay, and writing by the chief."""

from __future__ import annotations

import contextlib
import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import keras

from replicax._src.errors import MissingExtraError, UnsupportedError

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy

_BATCH_HOOKS: Final = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_WRITING: Final = {
    keras.callbacks.ModelCheckpoint: ("_save_model",),
    keras.callbacks.BackupAndRestore: ("_save_model", "on_train_end"),
}


@final
class CallbackStates:
    """The states of the callbacks that have ``get_state`` and ``set_state``, by class and number.

    The other callbacks restart, Keras's own among them.

    Raises:
      UnsupportedError: A callback that restarts would train on from the wrong weights.
    """

    def __init__(self, callbacks: Sequence[Any]):
        counts: Counter[str] = Counter()
        self._callbacks: dict[str, Any] = {}
        for one in callbacks:
            name = type(one).__name__
            if _has_state(one):
                self._callbacks[f"{name}/{counts[name]}"] = one
            elif isinstance(one, keras.callbacks.SwapEMAWeights) and one.swap_on_epoch:
                raise UnsupportedError(
                    "SwapEMAWeights(swap_on_epoch=True) beside a CheckpointCallback: at the end of an epoch the model has the "
                    "averaged weights, and after a restart training would continue from them. Leave swap_on_epoch out: "
                    "validation uses the averaged weights all the same, and so does the model after fit."
                )
            counts[name] += 1

    def get_state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {name: one.get_state() for name, one in self._callbacks.items()}

    def set_state(self, states: Mapping[str, Any]) -> None:
        """From the checkpoint. Callbacks without a state in it restart."""
        for name in states.keys() & self._callbacks.keys():
            self._callbacks[name].set_state(states[name])


def _has_state(callback: Any) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(getattr(callback, "set_state", None))


@final
class Muted:
    """Replaces methods of callbacks by ones that do nothing, until ``end``.

    Args:
      hooks: The methods, which Keras calls; by default those of batches.
    """

    def __init__(self, callbacks: Sequence[Any], hooks: Sequence[str] = _BATCH_HOOKS):
        self._hooks = hooks
        self._before = [
            (one, {name: vars(one)[name] for name in hooks if name in vars(one)}) for one in callbacks
        ]
        for one in callbacks:
            vars(one).update(dict.fromkeys(hooks, _nothing))

    def end(self) -> None:
        """Gives the callbacks their methods back. May be called twice."""
        for one, before in self._before:
            for name in self._hooks:
                del vars(one)[name]
            vars(one).update(before)
        self._before = []


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a callback's method."""


@contextlib.contextmanager
def written_by_chief(strategy: Strategy | None, callbacks: Any) -> Iterator[None]:
    """Inside, of several processes only the first writes the files of Keras's own callbacks; all read them."""
    peers = None if strategy is None else strategy.topology.peers
    if peers is None or not callbacks:
        yield
        return
    listed = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    writing = [
        (one, hooks)
        for one in keras.tree.flatten(listed)
        for cls, hooks in _WRITING.items()
        if isinstance(one, cls)
    ]
    with contextlib.ExitStack() as stack:
        for one, hooks in writing:
            stack.enter_context(_synced_where_saved(one))
            if not peers.is_leader:
                stack.callback(Muted([one], hooks).end)
        yield


@contextlib.contextmanager
def _synced_where_saved(callback: Any) -> Iterator[None]:
    """Inside, every process gives the model its state where one saves it between two batches: saving communicates."""
    is_due = callback._should_save_on_batch

    def is_due_and_synced(batch: int) -> bool:
        due = is_due(batch)
        if due:
            callback.model.jax_state_sync()
        return due

    callback._should_save_on_batch = is_due_and_synced
    try:
        yield
    finally:
        del callback._should_save_on_batch


def check_has_tensorflow(callbacks: Any) -> None:
    """Raises if Keras's own TensorBoard callback would fail, which needs TensorFlow.

    Raises:
      MissingExtraError: TensorFlow is not installed.
    """
    listed = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    if not any(isinstance(one, keras.callbacks.TensorBoard) for one in keras.tree.flatten(listed or [])):
        return
    if importlib.util.find_spec("tensorflow") is None:
        raise MissingExtraError(
            "keras.callbacks.TensorBoard needs TensorFlow, which is not installed. Use rx.keras.callbacks.TensorBoard in its "
            "place: it takes the same arguments, writes the same, and needs pip install tensorboardX pillow."
        )
