"""TensorFlow's ``tf.tpu`` names: ``rx.tpu``."""

from replicax.tpu import experimental

__all__ = ["experimental"]
