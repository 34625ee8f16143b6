"""TensorFlow's ``tf.distribute.coordinator`` names: ``rx.coordinator``."""

# Its names stand in _src/parts.py; type checkers read the .pyi.
from replicax._src.user.public_names import publish_all

__dir__ = publish_all(globals())
