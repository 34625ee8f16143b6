"""The rows of a dataset that a worker feeds to its replicas: autoshard policies and the share of a worker.

Workers and replicas are numbered from 0; worker w has the replicas ``[first_replica, first_replica +
replicas_per_worker)``. Pure: no jax.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, SupportsIndex

from replicax._src.devices.split import split_offsets, split_sizes
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import _NamedOption, whole_number


class NotEnoughFilesError(InvalidArgumentError):
    """A dataset must be sharded by file, but it has no files, or fewer than there are workers."""


class AutoShardPolicy(_NamedOption):
    """The policy by which workers share a dataset. A single worker reads all of it.

    AUTO: FILE if the source has at least as many files as there are workers, otherwise DATA. FILE: worker w of W reads
      the files w, w + W, ... DATA: every worker reads all global batches and keeps its replicas' rows. HINT:
      ``dataset.shard(SHARD_HINT, SHARD_HINT)`` decides. OFF: every worker reads its full dataset, and the program must
      give the workers different data.
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    HINT = "HINT"
    OFF = "OFF"


@dataclass(frozen=True)
class DistributeOptions:
    """The options for distributing a dataset, if the dataset has no such options itself.

    Attributes:
      auto_shard_policy: An ``AutoShardPolicy`` or its name.
      num_devices: Accepted as in TensorFlow, and ignored. The strategy knows the number of devices.

    Source: tf.data.experimental.DistributeOptions.
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    num_devices: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "auto_shard_policy", AutoShardPolicy.parse(self.auto_shard_policy))


@dataclass(frozen=True)
class WorkerShare:
    """The position of a worker among all workers, which determines the replicas that it feeds.

    Attributes:
      num_workers: W, the number of workers.
      worker_index: w, the index of this worker, from 0.
      num_replicas: R, the number of replicas of all workers. Each has R / W.

    Raises:
      InvalidArgumentError: The index is out of range, or the workers would have different numbers of replicas.
    """

    num_workers: int = 1
    worker_index: int = 0
    num_replicas: int = 1

    def __post_init__(self) -> None:
        check_shard(self.num_workers, self.worker_index, "num_workers", "worker_index")
        if self.num_replicas < 1 or self.num_replicas % self.num_workers:
            raise InvalidArgumentError(
                "tf.distribute expects every worker to have the same number of replicas; got "
                f"num_replicas={self.num_replicas} over num_workers={self.num_workers}."
            )

    @property
    def replicas_per_worker(self) -> int:
        """R / W, the number of replicas of each worker."""
        return self.num_replicas // self.num_workers

    @property
    def first_replica(self) -> int:
        """The number of this worker's first replica."""
        return self.worker_index * self.replicas_per_worker


def check_shard(
    num_shards: Any, index: Any, num_name: str = "num_shards", index_name: str = "index"
) -> tuple[int, int]:
    """Returns both as ints.

    Raises:
      InvalidArgumentError: ``0 <= index < num_shards`` does not hold.
    """
    num_shards = whole_number(num_name, num_shards, least=1)
    if not isinstance(index, SupportsIndex) or not 0 <= operator.index(index) < num_shards:
        raise InvalidArgumentError(
            f"{index_name} must be at least 0 and less than {num_name}={num_shards}, got {index!r}. Shards are "
            "numbered from 0."
        )
    return num_shards, operator.index(index)


@dataclass(frozen=True)
class BatchRows:
    """Adjacent rows of one batch, split over the replicas of one worker.

    Attributes:
      start: The first row.
      sizes: The number of rows of each of the worker's replicas.
    """

    start: int
    sizes: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + sum(self.sizes)


@functools.lru_cache(maxsize=256)  # it is called for every batch
def rows_of_global_batch(num_rows: int, share: WorkerShare) -> BatchRows:
    """Returns the rows of a global batch that a worker feeds: one step of the policy DATA.

    ``split_sizes`` splits the batch over all R replicas. Over all workers, every row is used once.
    """
    first, last = share.first_replica, share.first_replica + share.replicas_per_worker
    return BatchRows(
        split_offsets(num_rows, share.num_replicas)[first],
        split_sizes(num_rows, share.num_replicas)[first:last],
    )


def rows_of_own_batch(num_rows: int, share: WorkerShare) -> Iterator[BatchRows]:
    """Yields the steps into which a worker splits a batch of its own: the policies FILE and OFF.

    The batch is as large as the global batch, and the worker feeds only its part per step, so the batch lasts for about
    W steps. Its R slices have the sizes of ``split_sizes``, starting with this worker's slices, so that all workers
    together take B rows in a step: ``7 rows, 2 workers of 2 replicas: (2, 2), (2, 1)`` and ``(2, 1), (2, 2)``. Steps
    without rows are skipped.

    Source: tf.data's _RebatchDataset, ``batch_sizes_for_worker``.
    """
    sizes = split_sizes(num_rows, share.num_replicas)
    turned = sizes[share.first_replica :] + sizes[: share.first_replica]
    start = 0
    for first in range(0, share.num_replicas, share.replicas_per_worker):
        rows = BatchRows(start, turned[first : first + share.replicas_per_worker])
        start = rows.stop
        if rows.stop > rows.start:
            yield rows


@dataclass(frozen=True)
class ShardingDecision:
    """The chosen policy and the reason to display.

    Attributes:
      policy: The chosen policy.
      reason: The reason for it.
      is_fallback: True if it is not the usual policy for files, because there are too few files.
    """

    policy: AutoShardPolicy
    reason: str
    is_fallback: bool = False


def choose_policy(
    wanted: AutoShardPolicy, share: WorkerShare, num_files: int | None, *, has_hint: bool, source: str
) -> ShardingDecision:
    """Chooses how the workers share a dataset.

    Args:
      wanted: The policy in the options.
      num_files: The number of files that the source reads; None if it cannot be sharded by file.
      has_hint: True if the dataset has a ``shard(SHARD_HINT, SHARD_HINT)``.
      source: The description of the dataset, for messages.

    Returns:
      The decision. With several workers its policy is FILE, DATA, HINT or OFF, never AUTO.

    Raises:
      NotEnoughFilesError: The policy is FILE, and there are fewer files than workers.
    """
    policy = AutoShardPolicy
    workers = share.num_workers
    if workers == 1:
        return ShardingDecision(wanted, "one worker reads everything")
    if wanted is policy.FILE:
        if num_files is None:
            raise NotEnoughFilesError(
                f"The policy FILE needs a source that reads files, got {source}. Use rx.data.from_tfrecords, "
                "from_parquet, from_csv, from_text_lines or from_array_records, or the policy DATA."
            )
        if num_files < workers:
            raise NotEnoughFilesError(
                f"The policy FILE needs at least one file for each of the {workers} workers, got {num_files} "
                f"({source}). Write the data to more files, or use the policy DATA."
            )
        return ShardingDecision(wanted, f"the {num_files} files are distributed over {workers} workers")
    if wanted is policy.HINT:
        said = "the dataset's shard(SHARD_HINT, SHARD_HINT) gives each worker its part"
        return ShardingDecision(
            wanted, said if has_hint else "no SHARD_HINT in the dataset: every worker reads everything"
        )
    if wanted is not policy.AUTO:
        said = (
            "every worker keeps its rows of each global batch"
            if wanted is policy.DATA
            else "as the options say"
        )
        return ShardingDecision(wanted, said)
    if num_files is None:
        return ShardingDecision(
            policy.DATA, f"AUTO: {source} has no files, so every worker keeps its rows of each global batch"
        )
    if num_files < workers:
        return ShardingDecision(
            policy.DATA,
            f"AUTO: {num_files} file{'s are' if num_files > 1 else ' is'} not enough for {workers} workers, so every worker "
            f"reads {'all of them' if num_files > 1 else 'it'} and keeps its rows of each global batch",
            is_fallback=True,
        )
    return ShardingDecision(
        policy.FILE, f"AUTO: the {num_files} files are distributed over {workers} workers"
    )
