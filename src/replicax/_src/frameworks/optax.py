"""An optax transformation for replica functions that sums gradients over replicas."""

from __future__ import annotations

from typing import Any

import jax

from replicax._src.packaging.extras import missing_extra
from replicax._src.tracing.capture import current_capture


def aggregate_gradients() -> Any:
    """Returns an optax transformation that sums gradients over replicas. Put it first in a chain.

    In ``run`` it sums every gradient over replicas, except gradients that have been all-reduced already. Elsewhere it
    changes nothing, so that the same optimizer works on one device.

    Returns:
      An ``optax.GradientTransformation`` without state.

    Raises:
      MissingExtraError: optax is not installed.

    >>> import optax, replicax.optax
    >>> optimizer = optax.chain(replicax.optax.aggregate_gradients(), optax.adam(1e-3))
    """
    try:
        import optax
    except ImportError as error:
        raise missing_extra("rx.optax", "optax") from error

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        capture = current_capture()
        if capture is None or not capture.is_replica:
            return updates, state
        found, tree = jax.tree_util.tree_flatten_with_path(updates)
        names = [jax.tree_util.keystr(path) for path, _ in found]
        return tree.unflatten(capture.aggregate([leaf for _, leaf in found], names)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
