"""Callbacks for ``fit``: ``rx.keras.callbacks``. Keras is imported when one of them is asked for."""

from replicax._src.keras.backend import check_keras
from replicax._src.user.public_names import publish_all

_PLACES = {
    "CheckpointCallback": "replicax._src.keras.checkpoint_callback",
    "TensorBoard": "replicax._src.keras.tensorboard_callback",
}

__dir__ = publish_all(globals(), _PLACES, check=check_keras)
