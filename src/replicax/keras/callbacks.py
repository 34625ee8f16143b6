"""Callbacks for ``fit``: ``rx.keras.callbacks``. Keras is imported when one of them is asked for."""

from typing import TYPE_CHECKING, Any

from replicax._src.keras_backend import check_keras
from replicax._src.public_names import missing_name, publish, publish_all

if TYPE_CHECKING:
    from replicax._src.keras.checkpoint_callback import CheckpointCallback
    from replicax._src.keras.tensorboard_callback import TensorBoard

__all__ = ["CheckpointCallback", "TensorBoard"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        check_keras(f"rx.keras.callbacks.{name}")
    if name == "CheckpointCallback":
        from replicax._src.keras.checkpoint_callback import CheckpointCallback

        return publish(__name__, name, CheckpointCallback)
    if name == "TensorBoard":
        from replicax._src.keras.tensorboard_callback import TensorBoard

        return publish(__name__, name, TensorBoard)
    raise missing_name(__name__, name)


__dir__ = publish_all(globals())
