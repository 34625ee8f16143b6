"""Checks that several processes go through the same rows in the same order, before and during one of Keras's loops."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax._src.cluster.failures import ProgramMismatchError
from replicax._src.cluster.peers import Peers
from replicax._src.input.agreed import WorkersDifferError
from replicax._src.lowering.batch import Batch
from replicax._src.user_code import user_line

_NUM_COMPARED_ROWS = 32
_OF_DATA = (
    " Every worker must pass all rows, of which it takes its own; batch_size is that of the global batch. Where each has rows "
    "of its own, pass strategy.distribute_datasets_from_function(...), or a dataset of files."
)
_DATA = ("x", "y", "sample_weight", "validation_data")
_SETTINGS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "shuffle",
    "steps",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_freq",
    "validation_split",
    "validation_steps",
)


def start_together(peers: Peers, method: str, model: Any, given: Mapping[str, Any]) -> None:
    """Compares the arguments of all processes. All call it before ``fit``, ``evaluate`` and ``predict``.

    Args:
      method: The name of the Keras method.
      given: Its arguments, by name.

    Raises:
      ProgramMismatchError: The processes call different methods.
      WorkersDifferError: The data of the processes differ, or the numbers of steps.
    """
    settings = {name: repr(given[name]) for name in _SETTINGS if name in given}
    settings |= {name: _form_of(given.get(name)) for name in _DATA}
    settings["steps_per_execution of the model"] = repr(model.steps_per_execution)
    offer = {"method": method, "at": user_line(), "settings": settings}
    offers = peers.gather("keras data", offer, f"to start {method}")
    if any(their["method"] != method for their in offers):
        calls = [f"  {task}: {their['method']}, at {their['at']}" for task, their in _named(peers, offers)]
        raise ProgramMismatchError(
            "The workers call different methods of Keras, which would wait for each other or mix up their values:\n"
            + "\n".join(calls)
            + "\nAll workers must call fit, evaluate and predict in the same order. Look for an `if` on the task, the chief or "
            "local data around one of them."
        )
    of_all = [their["settings"] for their in offers]
    for name in sorted({name for theirs in of_all for name in theirs}):
        found = [theirs.get(name, "its default") for theirs in of_all]
        if len(set(found)) > 1:
            have = ", ".join(f"{task} {value}" for task, value in _named(peers, found))
            raise WorkersDifferError(
                f"{method}(): the workers were given different values of `{name}`: {have}. All workers run the same "
                f"steps, so give all of them the same value.{_OF_DATA if name in _DATA else ''}"
            )
    _share_random_state(peers, method)


def _named(peers: Peers, values: Sequence[Any]) -> list[tuple[str, Any]]:
    return list(zip(peers.names, values, strict=True))


def _form_of(data: Any) -> str:
    """Returns the dtypes and shapes of arrays with a digest of their first and last rows. For a dataset, returns its
    kind and length.
    """
    leaves = jax.tree_util.tree_leaves(data)
    if leaves and all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves):
        forms = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        ends = [(x[:_NUM_COMPARED_ROWS], x[-_NUM_COMPARED_ROWS:]) if x.ndim else x for x in leaves]
        return f"{forms} digest {_digest(jax.tree_util.tree_leaves(ends))[:8]}"
    count = getattr(data, "num_batches", None)
    return type(data).__name__ + ("" if count is None else f" of {count} batches")


def _share_random_state(peers: Peers, method: str) -> None:
    """Gives all processes the random states of NumPy and Python of the first one, because Keras shuffles with them."""
    kind, keys, *rest = np.random.get_state()
    state = [[kind, np.asarray(keys).tolist(), *rest], random.getstate()] if peers.is_leader else None
    (kind, keys, *rest), (version, words, gauss) = peers.gather("keras random", state, f"to start {method}")[
        0
    ]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    random.setstate((version, tuple(words), gauss))


@final
class SameBatches:
    """Compares global batches that all processes are given: the 1st, 2nd, 4th, 8th and so on.

    Args:
      peers: The processes; None for a single process.
      name: The display name of the step.
    """

    def __init__(self, peers: Peers | None, name: str):
        self._peers, self._name = peers, name
        self.begin()

    def begin(self) -> None:
        """Records that another loop begins."""
        self._num_seen, self._has_own_rows = 0, False

    def look_at(self, batch: Batch) -> None:
        """Checks the next batch.

        Raises:
          WorkersDifferError: The processes were given different batches.
        """
        self._has_own_rows = batch.worker_sizes is not None
        if self._peers is None or self._has_own_rows:
            return
        self._num_seen += 1
        if self._num_seen & (self._num_seen - 1):
            return
        here = [
            [f"{leaf.dtype}{list(leaf.shape)}" for leaf in batch.leaves],
            f"digest {_digest(batch.leaves)}",
        ]
        self._compare(here)

    def look_at_end(self) -> None:
        """Checks that all processes have reached the end of the data.

        Raises:
          WorkersDifferError: Other processes have further batches.
        """
        if self._peers is not None and not self._has_own_rows:
            self._compare([["the end"], f"after {self._num_seen}"])
            self._num_seen = 0

    def _compare(self, here: list[Any]) -> None:
        assert self._peers is not None
        of_all = self._peers.gather("keras batches", here, f"for batch {self._num_seen} of {self._name}")
        if all(theirs == here for theirs in of_all):
            return
        have = ", ".join(
            f"{task} {', '.join(forms)} {said[:15]}"
            for task, (forms, said) in zip(self._peers.names, of_all, strict=True)
        )
        raise WorkersDifferError(
            f"{self._name}: the workers were given different batches, here number {self._num_seen}: {have}. Each "
            "worker takes its own rows of one global batch, so the dataset must yield the same batches everywhere. "
            "Give its shuffle the same seed in all workers. If each worker has its own rows, pass "
            "strategy.distribute_datasets_from_function(...), or a dataset distributed with the policy FILE."
        )


def _digest(leaves: Any) -> str:
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
