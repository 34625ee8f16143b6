"""What goes with Keras: ``rx.keras``. Importing it does not import Keras."""

from typing import TYPE_CHECKING, Any

from replicax._src.keras.files import model_path, weights_path
from replicax._src.keras_backend import check_keras
from replicax._src.public_names import missing_name, publish, publish_all
from replicax.keras import callbacks

if TYPE_CHECKING:
    from replicax._src.keras.compiled_loss import compiled_loss
    from replicax._src.keras.data_model import DataModel
    from replicax._src.keras.sidecar_evaluator import SidecarEvaluator

__all__ = ["DataModel", "SidecarEvaluator", "callbacks", "compiled_loss", "model_path", "weights_path"]


def __getattr__(name: str) -> Any:
    if name in ("DataModel", "SidecarEvaluator", "compiled_loss"):
        check_keras(f"rx.keras.{name}")
    if name == "DataModel":
        from replicax._src.keras.data_model import DataModel

        return publish(__name__, name, DataModel)
    if name == "SidecarEvaluator":
        from replicax._src.keras.sidecar_evaluator import SidecarEvaluator

        return publish(__name__, name, SidecarEvaluator)
    if name == "compiled_loss":
        from replicax._src.keras.compiled_loss import compiled_loss

        return publish(__name__, name, compiled_loss)
    raise missing_name(__name__, name)


__dir__ = publish_all(globals())
