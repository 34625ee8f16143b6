"""Callbacks for ``fit``: ``rx.keras.callbacks``. Keras is imported when one of them is asked for."""

from typing import TYPE_CHECKING, Any

from replicax._src.public_names import publish, publish_all

if TYPE_CHECKING:
    from replicax._src.keras.checkpoint_callback import CheckpointCallback

__all__ = ["CheckpointCallback"]


def __getattr__(name: str) -> Any:
    if name == "CheckpointCallback":
        from replicax._src.keras.checkpoint_callback import CheckpointCallback

        return publish(__name__, name, CheckpointCallback)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__dir__ = publish_all(globals())
