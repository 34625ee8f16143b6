"""The evaluator beside a training: ``rx.keras.utils``. Keras is imported when it is asked for."""

from typing import TYPE_CHECKING, Any

from replicax._src.keras_backend import check_keras
from replicax._src.public_names import publish, publish_all

if TYPE_CHECKING:
    from replicax._src.keras.sidecar_evaluator import SidecarEvaluator

__all__ = ["SidecarEvaluator"]


def __getattr__(name: str) -> Any:
    if name == "SidecarEvaluator":
        check_keras("rx.keras.utils.SidecarEvaluator")
        from replicax._src.keras.sidecar_evaluator import SidecarEvaluator

        return publish(__name__, name, SidecarEvaluator)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__dir__ = publish_all(globals())
