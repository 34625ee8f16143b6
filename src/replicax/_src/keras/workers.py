"""What several processes compare, before one of Keras's loops and in it: that they go through the same rows in the same order."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, final

import jax
import numpy as np

from replicax._src.cluster.peers import Peers
from replicax._src.input.agreed import WorkersDifferError
from replicax._src.placement.batch import Batch

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
    ends = [
        leaf if leaf.ndim == 0 else (leaf[:_NUM_COMPARED_ROWS], leaf[-_NUM_COMPARED_ROWS:]) for leaf in leaves
    ]
    forms = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
    return [forms, _digest(jax.tree_util.tree_leaves(ends))]


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


@final
class SameBatches:
    """Compares whole batches that all processes are given: the 1st, 2nd, 4th, 8th and so on.

    Args:
      peers: The processes; None if there is one.
      name: Of the step, for people.
    """

    def __init__(self, peers: Peers | None, name: str):
        self._peers, self._name = peers, name
        self._num_seen = 0

    def begin(self) -> None:
        """Another loop begins."""
        self._num_seen = 0

    def look_at(self, batch: Batch) -> None:
        """The next batch.

        Raises:
          WorkersDifferError: The processes were given different ones.
        """
        if self._peers is None or batch.worker_sizes is not None:
            return
        self._num_seen += 1
        if self._num_seen & (self._num_seen - 1):
            return
        here = [[f"{leaf.dtype}{list(leaf.shape)}" for leaf in batch.leaves], _digest(batch.leaves)]
        of_all = self._peers.gather("keras batches", here, f"for batch {self._num_seen} of {self._name}")
        if all(theirs == here for theirs in of_all):
            return
        have = ", ".join(
            f"{task} {', '.join(forms)}, digest {digest[:8]}"
            for task, (forms, digest) in zip(self._peers.names, of_all, strict=True)
        )
        raise WorkersDifferError(
            f"{self._name}: the workers were given different batches as number {self._num_seen}: {have}. Each takes its own rows "
            "of one global batch, so the dataset must give all of them the same ones: give its shuffle the same seed everywhere. "
            "Where each worker has rows of its own, pass strategy.distribute_datasets_from_function(...), or a dataset "
            "distributed with the policy FILE."
        )


def _digest(leaves: Any) -> str:
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
