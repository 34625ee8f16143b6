"""What goes with Keras: ``rx.keras``. Importing it does not import Keras."""

from replicax.keras import callbacks

__all__ = ["callbacks"]
