"""Checks that several processes go through the same rows in the same order, before and during one of Keras's loops."""

from __future__ import annotations

import hashlib
import random
from typing import Any, final

import jax
import numpy as np

from replicax._src.cluster.failures import ProgramMismatchError
from replicax._src.cluster.leading import value_of_leader
from replicax._src.cluster.peers import Peers
from replicax._src.input.agreed_steps import WorkersDifferError
from replicax._src.keras.fit_call import FitCall
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.user.user_code import user_line

_NUM_COMPARED_ROWS = 32
_OF_DATA = (
    " Every worker must pass all rows, of which it takes its own; batch_size is that of the global batch. Where each has rows "
    "of its own, "
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


def start_together(peers: Peers, call: FitCall) -> None:
    """Compares the arguments of all processes. All call it before ``fit``, ``evaluate`` and ``predict``.

    Raises:
      ProgramMismatchError: The processes call different methods.
      WorkersDifferError: The data of the processes differ, or the numbers of steps.
    """
    method, arguments = call.method, call.arguments
    settings = {name: repr(arguments[name]) for name in _SETTINGS if name in arguments}
    settings |= {name: _form_of(arguments.get(name)) for name in _DATA}
    settings["steps_per_execution of the model"] = repr(call.model.steps_per_execution)
    offer = {"method": method, "at": user_line(), "settings": settings}
    offers = peers.gather("keras data", offer, f"to start {method}")
    if any(their["method"] != method for their in offers):
        calls = [f"  {task}: {their['method']}, at {their['at']}" for task, their in offers.named()]
        raise ProgramMismatchError(
            "The workers call different methods of Keras, which would wait for each other or mix up their values:\n"
            + "\n".join(calls)
            + "\nAll workers must call fit, evaluate and predict in the same order. Look for an `if` on the task, the chief or "
            "local data around one of them."
        )
    of_all = [their["settings"] for their in offers]
    of_data = _OF_DATA + _for_own_rows(peers)
    for name in sorted({name for theirs in of_all for name in theirs}):
        found = [theirs.get(name, "its default") for theirs in of_all]
        if len(set(found)) > 1:
            have = ", ".join(f"{task} {value}" for task, value in offers.with_values(found).named())
            raise WorkersDifferError(
                f"{method}(): the workers were given different values of `{name}`: {have}. All workers run the same "
                f"steps, so give all of them the same value.{of_data if name in _DATA else ''}"
            )
    _share_random_state(peers, method)


def _for_own_rows(peers: Peers) -> str:
    """Returns what a user whose workers have different rows can do."""
    if peers.tolerates_failures:
        return "use save_on_failure=True instead of fault tolerance, which needs all rows in each worker."
    return (
        "pass strategy.distribute_datasets_from_function(...), or a dataset distributed with the policy FILE."
    )


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

    def state() -> Any:
        kind, keys, *rest = np.random.get_state()
        return [[kind, np.asarray(keys).tolist(), *rest], random.getstate()]

    (kind, keys, *rest), (version, words, gauss) = value_of_leader(
        lambda value: peers.gather("keras random", value(), f"to start {method}"),
        lambda: peers.is_leader,
        state,
    )
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    random.setstate((version, tuple(words), gauss))


@final
class SameBatches:
    """Compares global batches that all processes are given: the 1st, 2nd, 4th, 8th and so on.

    Args:
      peers: The processes; None for a single process.
      name: The display name of the step.

    Attributes:
      num_seen: The number of batches in this pass or loop, which is equal in all processes.
    """

    def __init__(self, peers: Peers | None, name: str):
        self._peers, self._name = peers, name
        self.begin()

    def begin(self) -> None:
        """Records that another loop begins."""
        self.num_seen, self._has_own_rows = 0, False

    def check_batch(self, batch: DatasetBatch) -> None:
        """Checks the next batch.

        Raises:
          WorkersDifferError: The processes were given different batches.
        """
        self._has_own_rows = batch.worker_sizes is not None
        if self._peers is None or self._has_own_rows:
            return
        self.num_seen += 1
        if self.num_seen & (self.num_seen - 1):
            return
        here = [
            [f"{leaf.dtype}{list(leaf.shape)}" for leaf in batch.leaves],
            f"digest {_digest(batch.leaves)}",
        ]
        self._compare(here)

    def check_end(self) -> None:
        """Checks that all processes have reached the end of the data.

        Raises:
          WorkersDifferError: Other processes have further batches.
        """
        if self._peers is not None and not self._has_own_rows:
            self._compare([["the end"], f"after {self.num_seen}"])
            self.num_seen = 0

    def _compare(self, here: list[Any]) -> None:
        assert self._peers is not None
        of_all = self._peers.gather("keras batches", here, f"for batch {self.num_seen} of {self._name}")
        if all(theirs == here for theirs in of_all):
            return
        have = ", ".join(f"{task} {', '.join(forms)} {said[:15]}" for task, (forms, said) in of_all.named())
        raise WorkersDifferError(
            f"{self._name}: the workers were given different batches, here number {self.num_seen}: {have}. Each "
            "worker takes its own rows of one global batch, so the dataset must yield the same batches everywhere. "
            "Give its shuffle the same seed in all workers. If each worker has its own rows, "
            f"{_for_own_rows(self._peers)}"
        )


def _digest(leaves: Any) -> str:
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
