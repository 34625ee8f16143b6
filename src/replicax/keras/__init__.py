"""What goes with Keras: ``rx.keras``. Importing it does not import Keras."""

from replicax._src.public_names import publish_all
from replicax.keras import callbacks

__all__ = ["callbacks"]

__dir__ = publish_all(globals())
