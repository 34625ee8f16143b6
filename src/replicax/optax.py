"""optax under strategies: ``rx.optax``."""

from replicax._src.optax import aggregate_gradients

__all__ = ["aggregate_gradients"]
