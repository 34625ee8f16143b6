"""What goes with Keras: ``rx.keras``. Importing it does not import Keras."""

from typing import TYPE_CHECKING, Any

from replicax._src.keras.files import model_path, weights_path
from replicax._src.keras_backend import check_keras
from replicax._src.public_names import publish, publish_all
from replicax.keras import callbacks, utils

if TYPE_CHECKING:
    from replicax._src.keras.data_model import DataModel

__all__ = ["DataModel", "callbacks", "model_path", "utils", "weights_path"]


def __getattr__(name: str) -> Any:
    if name == "DataModel":
        check_keras("rx.keras.DataModel")
        from replicax._src.keras.data_model import DataModel

        return publish(__name__, name, DataModel)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__dir__ = publish_all(globals())
