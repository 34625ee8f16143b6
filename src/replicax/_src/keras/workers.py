"""What several processes compare before one of Keras's loops: that they go through the same rows in the same order."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from replicax._src.cluster.peers import Peers
from replicax._src.input.agreed import WorkersDifferError

_NUM_COMPARED_ROWS = 32


def start_together(peers: Peers, method: str, given: Mapping[str, Any]) -> None:
    """Called by all processes before ``fit`` and its kin.

    Args:
      method: Its name.
      given: Its arguments, by name.

    Raises:
      WorkersDifferError: The arrays that they were given differ.
    """
    arrays = {name: _look_at(given.get(name)) for name in ("x", "y", "sample_weight", "validation_data")}
    of_all = peers.gather("keras data", arrays, f"to start {method}")
    for name in arrays:
        looks = [theirs[name] for theirs in of_all]
        if any(theirs != looks[0] for theirs in looks):
            have = ", ".join(
                f"{task} {theirs and theirs[0]}" for task, theirs in zip(peers.names, looks, strict=True)
            )
            raise WorkersDifferError(
                f"{method}(): the workers were given different arrays as `{name}` ({have}; values were looked at too). Every "
                "worker must pass all rows, of which it takes its own; batch_size is that of the global batch. Where each has "
                "rows of its own, pass strategy.distribute_datasets_from_function(...), or a dataset of files."
            )
    _share_random_state(peers, method)


def _look_at(nest: Any) -> list[Any] | None:
    """The shapes of arrays and a digest of their first and last rows; None for datasets."""
    leaves = jax.tree_util.tree_leaves(nest)
    if not leaves or not all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves):
        return None
    digest = hashlib.sha256()
    for leaf in leaves:
        rows = leaf if leaf.ndim == 0 else (leaf[:_NUM_COMPARED_ROWS], leaf[-_NUM_COMPARED_ROWS:])
        for part in jax.tree_util.tree_leaves(rows):
            digest.update(np.ascontiguousarray(part).tobytes())
    return [[f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves], digest.hexdigest()]


def _share_random_state(peers: Peers, method: str) -> None:
    """Keras shuffles with the random states of NumPy and Python: where they differ, all take the first process's."""
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    state = [[kind, np.asarray(keys).tolist(), *rest], [version, list(words), gauss]]
    digests = peers.gather(
        "keras random", hashlib.sha256(repr(state).encode()).hexdigest(), f"to start {method}"
    )
    if len(set(digests)) == 1:
        return
    first = peers.gather("keras random state", state if peers.is_leader else None, f"to start {method}")[0]
    (kind, keys, *rest), (version, words, gauss) = first
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    random.setstate((version, tuple(words), gauss))
