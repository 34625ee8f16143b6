"""Steps that several processes take together. Each process has its own rows, knows the sizes of all, and ends with the
others.

For each step the prefetching thread exchanges this on the control channel, so that no step waits for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np

from replicax._src.cluster.counters import counters
from replicax._src.cluster.failures import PeerFailureError
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.cluster.peers import Peers
from replicax._src.control.standing import Topic
from replicax._src.input.element_specs import INFINITE
from replicax._src.input.elements import EmptyDatasetError, OneShotSourceError, Pass
from replicax._src.input.sources import GlobalBatches, LocalRows, Source, without_rows
from replicax._src.vocabulary.errors import InvalidArgumentError


class WorkersDifferError(InvalidArgumentError):
    """The workers' datasets must have the same batches, or steps of one structure, and do not."""


@final
class AgreedParts(list):
    """The elements of this process's replicas, with the shapes of all.

    Attributes:
      shapes: The shapes on all R replicas, for each array of the pytree.
    """

    def __init__(self, parts: Sequence[Any], shapes: Sequence[Sequence[tuple[int, ...]]]):
        super().__init__(parts)
        self.shapes = shapes


def agreed(source: Source, elements: Pass, peers: Peers) -> Pass:
    """Returns a pass of which all processes take the same number of steps.

    Raises:
      WorkersDifferError: The datasets have known lengths that differ but must be equal.
    """
    topic = peers.new_topic("data")
    is_shared = isinstance(source, GlobalBatches) and source.is_shared
    if not is_shared or source.cardinality is None:
        return AgreedPass(elements, peers, topic, source)
    length = None if source.cardinality == INFINITE else source.cardinality
    lengths = peers.gather(topic, length, "to read a dataset")
    if any(theirs != length for theirs in lengths):
        have = ", ".join(f"{name} {count}" for name, count in lengths.named())
        raise WorkersDifferError(
            f"The workers' datasets have different numbers of batches: {have}. Each worker must be given the same "
            "dataset, from which it takes its own rows. If each worker has its own data, use "
            "distribute_datasets_from_function, or the policy OFF or FILE."
        )
    return elements


@final
class AgreedPass(Pass):
    """Takes a step when all processes do, and ends when the data of all processes have ended.

    A process whose data end earlier gives its replicas steps without rows.
    """

    def __init__(self, elements: Pass, peers: Peers, topic: Topic, source: Source):
        self._elements, self._peers, self._topic, self._source = elements, peers, topic, source
        self._num_local = source.num_replicas // len(peers)
        self._last: Any = None
        self._num_steps = 0
        self.is_stopped = threading.Event()

    def __next__(self) -> Any:
        try:
            step = next(self._elements, None)
        except Exception as error:
            self._gather({"error": f"{type(error).__name__}: {error}"})
            raise
        offers = self._gather(None if step is None else _offer_of(step))
        self._num_steps += 1
        for name, offer in offers.named():
            if offer is not None and "error" in offer:
                raise PeerFailureError(
                    f"{name} could not read its next batch:\n    {offer['error']}", (name,)
                )
        known = next((offer for offer in offers if offer is not None), None)
        if known is None:
            raise StopIteration
        self._check_forms(offers)
        if step is None:
            step = self._empty()
            offers[offers.own] = _offer_of(step)
        self._last = step
        if None in offers:  # a process without a step has as many replicas, without rows
            nothing = _offer_of(_without_rows(step))
            offers = [offer or nothing for offer in offers]
        return _joined(step, offers)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Wraps the wait of a consumer for the next step."""
        return self._peers.reading(self._topic)

    def note_taken(self, num_steps: int) -> None:
        """Counts steps that the consumer takes."""
        self._peers.note_reads(num_steps)

    def _gather(self, offer: Any) -> GatheredValues:
        counters.agreements.begin()
        try:
            return self._peers.gather(
                self._topic, offer, "to read the next batch", is_cancelled=self.is_stopped.is_set
            )
        finally:
            counters.agreements.end()

    def _check_forms(self, offers: GatheredValues) -> None:
        """Raises unless all processes have arrays of one structure, and all rows of a shared batch."""
        present = {name: offer for name, offer in offers.named() if offer is not None}
        for what, said in (("arrays", "form"), ("rows of the global batch", "batch")):
            found = {name: offer[said] for name, offer in present.items()}
            if len({repr(value) for value in found.values()}) > 1:
                have = ", ".join(f"{name} {value}" for name, value in found.items())
                raise WorkersDifferError(
                    f"The workers' batches do not match: at step {self._num_steps} the {what} are: {have}. All workers "
                    "need datasets of the same structure, and with the policy DATA the same dataset."
                )

    def _empty(self) -> Any:
        """Returns a step without rows for the replicas of this process."""
        return _of_spec(self._source, self._num_local) if self._last is None else _without_rows(self._last)

    def get_state(self) -> Any:
        return self._elements.get_state()

    def set_state(self, state: Any) -> None:
        self._elements.set_state(state)


def _offer_of(step: LocalRows | Sequence[Any]) -> dict[str, Any]:
    """Returns the data of a step that the other processes need."""
    if isinstance(step, LocalRows):
        form = [[list(array.shape[1:]), str(array.dtype)] for array in step.arrays]
        batch = None if step.all_sizes is None else sum(step.all_sizes)
        return {"form": form, "batch": batch, "sizes": step.sizes}
    leaves = [jax.tree_util.tree_leaves(part) for part in step]
    arrays = [
        [np.asarray(leaf) if not isinstance(leaf, jax.Array) else leaf for leaf in part] for part in leaves
    ]
    form = [[array.ndim, str(array.dtype)] for array in arrays[0]]
    return {"form": form, "batch": None, "shapes": [[array.shape for array in part] for part in arrays]}


def _joined(step: Any, offers: Sequence[dict[str, Any]]) -> Any:
    """Returns the step with the offers of all processes."""
    if isinstance(step, LocalRows):
        return replace(step, all_sizes=tuple(size for offer in offers for size in offer["sizes"]))
    replicas = [shapes for offer in offers for shapes in offer["shapes"]]
    return AgreedParts(step, [[tuple(shape) for shape in column] for column in zip(*replicas, strict=True)])


def _of_spec(source: Source, num_local: int) -> Any:
    """Returns a step without rows for a dataset that has yielded nothing."""
    try:
        specs, tree = jax.tree_util.tree_flatten(source.element_spec())
    except (EmptyDatasetError, OneShotSourceError) as error:
        raise WorkersDifferError(
            "This worker's dataset has no elements, so its structure is unknown, but other workers have elements. Give "
            "every worker at least one element, or a dataset that declares its structure."
        ) from error
    arrays = [np.zeros([0, *(dim or 0 for dim in s.shape[1:])] if s.shape else (), s.dtype) for s in specs]
    if isinstance(source, GlobalBatches):
        return LocalRows(arrays, tree, (0,) * num_local)
    return [tree.unflatten(arrays)] * num_local


def _without_rows(step: Any) -> Any:
    if isinstance(step, LocalRows):
        return replace(step, arrays=[array[:0] for array in step.arrays], sizes=(0,) * len(step.sizes))
    return [jax.tree.map(without_rows, part) for part in step]
