"""TensorFlow's ``tf.distribute.experimental.rpc``: functions that other processes call by name."""

from replicax._src.user.public_names import publish_all

__dir__ = publish_all(globals())
