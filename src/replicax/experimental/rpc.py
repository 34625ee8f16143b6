"""TensorFlow's ``tf.distribute.experimental.rpc``: functions that other processes call by name."""

from replicax._src.parameter_servers.transport.rpc import Client, Server, StatusOrResult
from replicax._src.public_names import publish_all

__all__ = ["Client", "Server", "StatusOrResult"]

__dir__ = publish_all(globals())
