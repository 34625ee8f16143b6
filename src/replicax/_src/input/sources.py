"""Sources of steps from a dataset. A step is rows of a global batch, or one element for each replica.

Nothing is placed on devices here, and ``opening.py`` describes all datasets.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices import memory
from replicax._src.devices.autoshard import (
    AutoShardPolicy,
    BatchRows,
    ShardingDecision,
    WorkerShare,
    choose_policy,
    rows_of_global_batch,
    rows_of_own_batch,
)
from replicax._src.devices.split import split_offsets, split_sizes
from replicax._src.input.arrays import common_num_rows, describe_shapes
from replicax._src.input.description import DatasetPart, Description
from replicax._src.input.element_specs import INFINITE, Cardinality, PerReplicaSpec, is_static, spec_of
from replicax._src.input.elements import (
    END,
    OF_WORKERS,
    Elements,
    EmptyDatasetError,
    NotResumableError,
    Pass,
    element_spec,
    saved_by_other_workers,
)
from replicax._src.input.opening import describe, open_elements
from replicax._src.values.distributed import PerReplica, per_replica_stack
from replicax._src.vocabulary.errors import InvalidArgumentError

log = logging.getLogger("replicax")


class UnbatchedDatasetError(InvalidArgumentError):
    """A dataset of single rows was given, but global batches are needed."""


def unbatched(num_replicas: int, element: Any = None) -> UnbatchedDatasetError:
    """Returns the error for a dataset, or for one element, that has no rows to split."""
    got = "" if element is None else f" Got {describe_shapes(element)}."
    # TensorFlow's text. Its documentation promises a ValueError, but it raises an IndexError.
    return UnbatchedDatasetError(
        "Call the `batch` method on the input Dataset in order to be able to split your input across "
        f"{num_replicas} replicas. Each element must consist of arrays [global_batch, ...], not of "
        f"numbers (and a Python list is a pytree of numbers: use np.asarray).{got}"
    )


def cut_rows(batch: Any, num_replicas: int) -> Any:
    """Splits a pytree of arrays [rows, ...] of a trace into the rows of each replica.

    Raises:
      UnbatchedDatasetError: An array has no rows.
    """
    arrays, tree = jax.tree_util.tree_flatten(batch)
    if not all(array.shape for array in arrays):
        raise unbatched(num_replicas, batch)
    if arrays:
        common_num_rows(batch)

    def cut(array: Any) -> PerReplica:
        offsets = split_offsets(array.shape[0], num_replicas)
        if array.shape[0] % num_replicas == 0:
            return PerReplica(array.reshape(num_replicas, offsets[1], *array.shape[1:]), num_replicas)
        return per_replica_stack([array[start:stop] for start, stop in itertools.pairwise(offsets)])

    return jax.tree_util.tree_unflatten(tree, [cut(jnp.asarray(array)) for array in arrays])


@dataclass(frozen=True, slots=True)
class LocalRows:
    """The data of one step for the replicas of this worker, on the host.

    Attributes:
      arrays: ``[num_rows, ...]``, the rows of all the worker's replicas in order.
      tree: The structure of the pytree whose leaves are the arrays.
      sizes: The number of rows of each replica of this worker.
      all_sizes: The number of rows of all R replicas; None until workers with their own batches have agreed.
    """

    arrays: list[Any]
    tree: Any
    sizes: tuple[int, ...]
    all_sizes: tuple[int, ...] | None = None


def num_rows(step: LocalRows | Sequence[Any]) -> int:
    """Returns the number of rows of a step for the replicas of this process. An element without dims is one row."""
    if isinstance(step, LocalRows):
        return sum(step.sizes)
    shapes = [np.shape(leaf) for part in step for leaf in jax.tree_util.tree_leaves(part)[:1]]
    return sum(shape[0] if shape else 1 for shape in shapes)


class Source(abc.ABC):
    """The source of the steps of a loop. A strategy places them on its replicas, one step at a time."""

    @property
    @abc.abstractmethod
    def num_replicas(self) -> int:
        """R, the number of replicas of all workers."""

    @property
    @abc.abstractmethod
    def cardinality(self) -> Cardinality | None:
        """The number of steps, INFINITE, or None if it is not known in advance."""

    @abc.abstractmethod
    def iterate(self) -> Pass:
        """Starts a pass from the first step."""

    @abc.abstractmethod
    def element_spec(self) -> Any:
        """Returns a pytree of PerReplicaSpecs."""

    @property
    @abc.abstractmethod
    def cheap_step_bytes(self) -> int | None:
        """The size of a step that costs no more than a copy of rows in memory; None for other sources."""

    @abc.abstractmethod
    def describe(self) -> dict[str, str]:
        """Returns the facts to display: names and values, in order."""


def open_source(
    dataset: Any,
    *,
    num_replicas: int = 1,
    share: WorkerShare | None = None,
    policy: AutoShardPolicy | None = None,
) -> GlobalBatches:
    """Opens a dataset of global batches.

    Args:
      dataset: A value that ``describe`` accepts. Each element is a pytree of arrays ``[global_batch, ...]``.
      num_replicas: R, the number of replicas, if there is one worker.
      share: The position of this worker, if there are several.
      policy: How workers share the dataset. None uses the dataset's own policy, or AUTO.

    Raises:
      UnbatchedDatasetError: The dataset of arrays or files lacks a ``batch``.
      UnsupportedSourceError: The value is not a dataset.
      NotEnoughFilesError: The policy is FILE, and there are fewer files than workers.
    """
    share = share or WorkerShare(num_replicas=num_replicas)
    description = describe(dataset)
    if not description.is_batched:
        raise unbatched(share.num_replicas)
    wanted = policy or description.policy or AutoShardPolicy.AUTO
    num_files = description.count_files() if share.num_workers > 1 else None  # the count may be slow
    decision = choose_policy(wanted, share, num_files, has_hint=description.has_hint, source=description.text)
    log.info(
        "Input: %s, worker %d of %d, policy %s: %s.",
        description.text,
        share.worker_index,
        share.num_workers,
        decision.policy.name,
        decision.reason,
    )
    if decision.is_fallback:
        _warn_of_fallback(description.text, decision.reason)
    if decision.policy is AutoShardPolicy.DATA and share.num_workers > 1 and description.has_order_of_its_own:
        _warn_of_orders(description.text, share.num_workers)
    return GlobalBatches(_opened(description, share, decision.policy), share, decision)


def _opened(description: Description, share: WorkerShare, policy: AutoShardPolicy) -> Elements:
    """Opens what this worker reads of a dataset."""
    num_workers, index = share.num_workers, share.worker_index
    is_by_file = policy is AutoShardPolicy.FILE and num_workers > 1
    if not (is_by_file or description.has_hint):
        return description.open_all()
    assert description.open_part is not None
    if is_by_file:
        return description.open_part(DatasetPart(AutoShardPolicy.FILE, num_workers, index))
    if policy is not AutoShardPolicy.HINT:  # the hints then mean all of it
        num_workers, index = 1, 0
    return description.open_part(DatasetPart(AutoShardPolicy.HINT, num_workers, index))


@functools.cache
def _warn_of_fallback(description: str, reason: str) -> None:
    """Warns once for each dataset. Every worker reads more than it would with more files."""
    log.warning(
        "Input: %s, %s. Write the data to more files, so that each file is read only once.",
        description,
        reason,
    )


@functools.cache
def _warn_of_orders(description: str, num_workers: int) -> None:
    log.warning(
        "Input: %s: a shuffle without a seed gives each of the %d workers another order, of which it takes its rows. Some rows "
        "are used twice, others never. Give all workers one order: shuffle(seed=0).",
        description,
        num_workers,
    )


@final
class GlobalBatches(Source):
    """Steps from batches ``[global_batch, ...]``: the rows of this worker, to be split over its replicas.

    Attributes:
      is_shared: True if all workers see the same batches.
    """

    def __init__(self, elements: Elements, share: WorkerShare, decision: ShardingDecision):
        self._elements, self._share, self._decision = elements, share, decision
        self.is_shared = share.num_workers == 1 or decision.policy is AutoShardPolicy.DATA

    @property
    def num_replicas(self) -> int:
        return self._share.num_replicas

    @property
    def policy(self) -> AutoShardPolicy:
        """The policy by which the workers share the dataset. A single worker may have AUTO."""
        return self._decision.policy

    @property
    def cardinality(self) -> Cardinality | None:
        count = self._elements.cardinality
        return count if self.is_shared or count in (0, INFINITE) else None

    def iterate(self) -> Pass:
        """Yields LocalRows.

        Raises:
          UnbatchedDatasetError: An element contains a scalar.
          InconsistentRowsError: The arrays of an element have different numbers of rows.
          UnsupportedElementError: An element has no arrays, or a leaf is not an array.
        """
        elements = self._elements.iterate()
        is_immutable = self._elements.is_immutable
        if self.is_shared:
            return _SharedBatches(elements, self._share, is_immutable)
        return _OwnBatches(elements, self._share, is_immutable)

    def element_spec(self) -> Any:
        specs = element_spec(self._elements)
        if any(not spec.shape for spec in jax.tree.leaves(specs)):
            raise unbatched(self.num_replicas)
        return jax.tree.map(lambda spec: PerReplicaSpec.from_batch(spec, self.num_replicas), specs)

    @property
    def cheap_step_bytes(self) -> int | None:
        elements = self._elements
        if elements.row_bytes is None or elements.batch_size is None:
            return None
        return elements.row_bytes * elements.batch_size

    def describe(self) -> dict[str, str]:
        share, decision = self._share, self._decision
        return {
            "source": self._elements.description,
            "batch": _batch_text(self._batch_size(), share.num_replicas),
            "policy": f"{decision.policy.name}: {decision.reason}",
            "shard": f"{share.worker_index} of {share.num_workers}",
        }

    def _batch_size(self) -> int | None:
        specs = jax.tree.leaves(self._elements.declared_spec())
        declared = specs[0].shape[0] if specs and specs[0].shape else None
        return declared or self._elements.batch_size


def _batch_text(batch_size: int | None, num_replicas: int) -> str:
    """Returns text such as ``9 rows, (3, 2, 2, 2) over 4 replicas``."""
    if batch_size is None:
        return f"as they come, cut over {num_replicas} replicas (sizes differ by at most one)"
    sizes = split_sizes(batch_size, num_replicas)
    each = f"{sizes[0]} on each of" if sizes[0] == sizes[-1] else f"{sizes} over"
    return f"{batch_size} rows, {each} {num_replicas} replicas" if num_replicas > 1 else f"{batch_size} rows"


@final
class _SharedBatches(Pass):
    """A pass over this worker's rows of each batch, where all workers see the same batches."""

    def __init__(self, elements: Pass, share: WorkerShare, is_immutable: bool):
        self._elements, self._share, self._is_immutable = elements, share, is_immutable

    def __next__(self) -> LocalRows:
        batch = _Batch(next(self._elements), self._share.num_replicas)
        rows = rows_of_global_batch(batch.num_rows, self._share)
        return batch.cut(rows, self._is_immutable, split_sizes(batch.num_rows, self._share.num_replicas))

    def get_state(self) -> Any:
        return self._elements.get_state()

    def set_state(self, state: Any) -> None:
        self._elements.set_state(_for_elements(state))


@final
class _OwnBatches(Pass):
    """A pass over this worker's own batches, each of which may last for several steps. Its state counts the rows of the
    batch that have been taken.
    """

    def __init__(self, elements: Pass, share: WorkerShare, is_immutable: bool):
        self._elements, self._share, self._is_immutable = elements, share, is_immutable
        self._before: Any = None  # the state before the batch that is being cut
        self._steps: collections.deque[LocalRows] = collections.deque()
        self._num_rows = self._num_taken = 0  # of that batch

    def __next__(self) -> LocalRows:
        while not self._steps:
            with contextlib.suppress(NotResumableError):
                self._before = self._elements.get_state()
            self._cut(next(self._elements), 0)
        step = self._steps.popleft()
        self._num_taken += sum(step.sizes)
        return step

    def _cut(self, element: Any, num_taken: int) -> None:
        """Cuts a batch into steps, without its first rows."""
        batch = _Batch(element, self._share.num_replicas)
        self._num_rows, self._num_taken = batch.num_rows, num_taken
        for rows in rows_of_own_batch(batch.num_rows, self._share):
            if rows.stop > num_taken:
                if rows.start < num_taken:  # the workers had other replicas
                    rows = BatchRows(num_taken, split_sizes(rows.stop - num_taken, len(rows.sizes)))
                self._steps.append(batch.cut(rows, self._is_immutable))

    def get_state(self) -> Any:
        now = self._elements.get_state()  # raises the reason if there is none
        if not self._steps:
            return {"now": now}
        return {"now": now, "batch": self._before, "rows": [self._num_taken, self._num_rows]}

    def set_state(self, state: Any) -> None:
        self._steps.clear()
        if isinstance(state, dict) and "batch" in state:
            self._elements.set_state(state["batch"])
            self._before = state["batch"]
            self._cut(next(self._elements), state["rows"][0])
        else:
            self._elements.set_state(_for_elements(state))


def _for_elements(state: Any) -> Any:
    """Returns the state of the elements, from the state of a pass, of all workers, or of a shared pass."""
    if not isinstance(state, dict):
        return state
    if OF_WORKERS in state:
        return {OF_WORKERS: [each if "now" in each else {"now": each} for each in state[OF_WORKERS]]}
    return state.get("now", state)


class _Batch:
    """One element of the dataset, whose arrays must have the same number of rows."""

    def __init__(self, element: Any, num_replicas: int):
        self._arrays, self._tree = jax.tree_util.tree_flatten(element)
        shapes = [array.shape for array in self._arrays]
        if not all(shapes):
            raise unbatched(num_replicas, element)
        self.num_rows = shapes[0][0] if shapes else 0
        if not shapes or any(shape[0] != self.num_rows for shape in shapes):
            common_num_rows(element)  # raises the error

    def cut(self, rows: BatchRows, is_immutable: bool, all_sizes: tuple[int, ...] | None = None) -> LocalRows:
        """Returns some of its rows."""
        arrays = self._arrays
        if rows.start != 0 or rows.stop != self.num_rows:
            arrays = [array[rows.start : rows.stop] for array in arrays]
        if not is_immutable:
            arrays = list(map(_kept, arrays))
        return LocalRows(arrays, self._tree, rows.sizes, all_sizes)


def _kept(array: Any) -> Any:
    """Returns an array that stays unchanged when the dataset moves on, because many datasets reuse one buffer."""
    return memory.copy(array) if isinstance(array, np.ndarray) else array


@final
class PerReplicaPulls(Source):
    """Steps that are lists of pytrees, one unchanged element of the dataset for each replica of this worker.

    At the end of the data, replicas without an element get one with 0 rows, so that no row is lost. If elements have
    one fixed shape (``drop_remainder``, or single rows), a program may rely on it, so an incomplete last step is
    dropped with a warning. TensorFlow has both rules, but gives no warning.
    """

    def __init__(self, elements_of_replicas: Sequence[Elements], num_replicas: int | None = None):
        """Takes the elements of each replica. Elements that several replicas share are distributed in turn.

        Args:
          elements_of_replicas: The elements for each replica of this worker.
          num_replicas: R, the number of replicas of all workers, if there are several.
        """
        self._elements_of_replicas = tuple(elements_of_replicas)
        self._num_replicas = num_replicas or len(self._elements_of_replicas)
        self._has_warned = False

    @classmethod
    def from_one(cls, dataset: Any, num_replicas: int) -> PerReplicaPulls:
        """Distributes the elements of one dataset over the replicas, R to a step."""
        return cls([open_elements(dataset)] * num_replicas)

    @classmethod
    def from_each(cls, datasets: Iterable[Any]) -> PerReplicaPulls:
        """Gives each replica the elements of its own dataset, one to a step."""
        return cls([open_elements(dataset) for dataset in datasets])

    @property
    def num_replicas(self) -> int:
        return self._num_replicas

    @property
    def cardinality(self) -> Cardinality | None:
        counts = [elements.cardinality for elements in self._distinct()]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        if len(known) > 1:
            shortest, longest = min(known), max(known)
            return shortest if shortest == longest or self._is_fixed() else longest
        if known[0] in (0, INFINITE):
            return known[0]
        full, remainder = divmod(int(known[0]), len(self._elements_of_replicas))
        return full + bool(remainder and not self._is_fixed())

    def iterate(self) -> Pass:
        """Yields the list of the replicas' elements for each step."""
        distinct = self._distinct()
        passes = [elements.iterate() for elements in distinct]
        numbers = {id(elements): number for number, elements in enumerate(distinct)}
        of_replicas = [numbers[id(elements)] for elements in self._elements_of_replicas]
        return _Pulls(passes, of_replicas, distinct, self._warn_of_incomplete_step)

    def element_spec(self) -> Any:
        return jax.tree.map(
            lambda spec: PerReplicaSpec.from_replica(spec, self.num_replicas), self._replica_spec()
        )

    @property
    def cheap_step_bytes(self) -> int | None:
        return None

    def describe(self) -> dict[str, str]:
        distinct = self._distinct()
        sources = ", ".join(dict.fromkeys(elements.description for elements in distinct))
        pulled = "its own dataset" if len(distinct) > 1 else "one dataset in turn"
        return {
            "source": f"{sources}, from a function",
            "batch": f"each of {self.num_replicas} replicas takes one unchanged element of {pulled}",
            "policy": "OFF: the function makes the shards",
        }

    def _distinct(self) -> list[Elements]:
        return list({id(elements): elements for elements in self._elements_of_replicas}.values())

    def _is_fixed(self) -> bool:
        return is_static(self._replica_spec())

    def _warn_of_incomplete_step(self, present: Sequence[Any]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        num_replicas = len(self._elements_of_replicas)
        log.warning(
            "Input: the last step has %s for %d replicas. Because elements have one fixed shape, this step was "
            "dropped. Make the number of elements a multiple of %d, or batch without drop_remainder.",
            _count_of(present),
            num_replicas,
            num_replicas,
        )

    def _replica_spec(self) -> Any:
        """Returns the pytree of ArraySpecs of the first dataset that is not empty."""
        *others, last = self._distinct()
        for elements in others:
            with contextlib.suppress(EmptyDatasetError):
                return element_spec(elements)
        return element_spec(last)


@final
class _Pulls(Pass):
    """One pass through the elements of all replicas."""

    def __init__(
        self,
        passes: Sequence[Pass],
        of_replicas: Sequence[int],
        distinct: Sequence[Elements],
        on_incomplete: Callable[[Sequence[Any]], None],
    ):
        self._passes, self._of_replicas, self._distinct = passes, of_replicas, distinct
        self._on_incomplete = on_incomplete
        self._is_immutable = all(elements.is_immutable for elements in distinct)

    def __next__(self) -> list[Any]:
        parts = [self._pull(self._passes[number]) for number in self._of_replicas]
        present = [part for part in parts if part is not END]
        if not present:
            raise StopIteration
        if len(present) < len(parts):
            declared = self._distinct[0].declared_spec()
            if is_static(spec_of(present[0]) if declared is None else declared):
                self._on_incomplete(present)
                raise StopIteration
            empty = jax.tree.map(without_rows, present[0])
            parts = [empty if part is END else part for part in parts]
        return parts

    def get_state(self) -> Any:
        return [one.get_state() for one in self._passes]

    def set_state(self, state: Any) -> None:
        if isinstance(state, dict) and OF_WORKERS in state:
            raise saved_by_other_workers(len(state[OF_WORKERS]))
        if not isinstance(state, list) or len(state) != len(self._passes):
            raise NotResumableError(
                f"The state is not of this dataset, which consists of {len(self._passes)} datasets; got {state!r}."
            )
        before = [one.get_state() for one in self._passes]
        try:
            for one, its_state in zip(self._passes, state, strict=True):
                one.set_state(its_state)
        except NotResumableError:
            for one, its_state in zip(self._passes, before, strict=True):
                one.set_state(its_state)
            raise

    def _pull(self, elements: Pass) -> Any:
        element = next(elements, END)
        return element if element is END or self._is_immutable else jax.tree.map(_kept, element)


def _count_of(elements: Sequence[Any]) -> str:
    """Returns ``2 elements``, or ``2 elements (8 rows)`` for batches."""
    firsts = [jax.tree.leaves(element)[0] for element in elements]
    count = f"{len(elements)} element" + "s" * (len(elements) > 1)
    return count if firsts[0].ndim == 0 else f"{count} ({sum(len(first) for first in firsts)} rows)"


def without_rows(array: Any) -> Any:
    """Returns an array of the same structure with 0 rows. For a number, returns 0."""
    return array[:0] if array.ndim else np.zeros((), array.dtype)
