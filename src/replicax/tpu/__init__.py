"""TensorFlow's ``tf.tpu`` names: ``rx.tpu``."""

from replicax._src.user.public_names import publish_all
from replicax.tpu import experimental

__all__ = ["experimental"]

__dir__ = publish_all(globals())
