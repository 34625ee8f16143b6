"""Layout maps that nobody has to write: ``rx.experimental.layouts``."""

from replicax._src.keras.model_layouts import for_model
from replicax._src.user.public_names import publish_all

__all__ = ["for_model"]

__dir__ = publish_all(globals())
