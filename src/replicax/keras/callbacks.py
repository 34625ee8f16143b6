"""Callbacks for ``fit``: ``rx.keras.callbacks``. Keras is imported when one of them is asked for."""

from typing import TYPE_CHECKING, Any

from replicax._src.keras_backend import check_keras

if TYPE_CHECKING:
    from replicax._src.keras.checkpoint_callback import CheckpointCallback

__all__ = ["CheckpointCallback"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        check_keras(f"rx.keras.callbacks.{name}")
    if name == "CheckpointCallback":
        from replicax._src.keras.checkpoint_callback import CheckpointCallback

        return CheckpointCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
