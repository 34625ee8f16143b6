"""optax under strategies: ``rx.optax``."""

from replicax._src.frameworks.optax import aggregate_gradients
from replicax._src.user.public_names import publish_all

__all__ = ["aggregate_gradients"]

__dir__ = publish_all(globals())
