"""What goes with Keras: ``rx.keras``. Importing it does not import Keras."""

from replicax._src.keras.backend import check_keras
from replicax._src.keras.file_names import model_path, weights_path
from replicax._src.user.public_names import publish_all
from replicax.keras import callbacks

__all__ = ["callbacks", "model_path", "weights_path"]

_PLACES = {
    "DataModel": "replicax._src.keras.data_model",
    "SidecarEvaluator": "replicax._src.keras.sidecar_evaluator",
    "compiled_loss": "replicax._src.keras.compiled_loss",
}

__dir__ = publish_all(globals(), _PLACES, check=check_keras)
