"""The one rule for splitting batches over replicas, and the options and context of input functions.

A global batch of B rows over R replicas is split into R contiguous slices whose sizes differ by at most one, larger
first. Slice r is the half-open interval ``[offsets[r], offsets[r + 1])``. Pure: no jax.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import _NamedOption, whole_number


def split_sizes(num_rows: int, num_replicas: int) -> tuple[int, ...]:
    """Returns the number of ``num_rows`` rows that each replica gets: ``9, 4 -> (3, 2, 2, 2)``.

    The sizes sum to ``num_rows``, differ by at most one, and never increase. With fewer rows than replicas, the last
      replicas get none: ``1, 2 -> (1, 0)``.

    Raises:
      InvalidArgumentError: ``num_rows`` is negative, or there are no replicas.
    """
    if num_replicas < 1:
        raise InvalidArgumentError(
            f"A batch must be split over at least one replica, got num_replicas={num_replicas}."
        )
    if num_rows < 0:
        raise InvalidArgumentError(
            f"The number of rows of a batch must not be negative, got num_rows={num_rows}."
        )
    size, num_larger = divmod(num_rows, num_replicas)
    return (size + 1,) * num_larger + (size,) * (num_replicas - num_larger)


def split_offsets(num_rows: int, num_replicas: int) -> tuple[int, ...]:
    """Returns the R + 1 row numbers where the slices meet: ``9, 4 -> (0, 3, 5, 7, 9)``."""
    offsets = [0]
    for size in split_sizes(num_rows, num_replicas):
        offsets.append(offsets[-1] + size)
    return tuple(offsets)


@dataclass(frozen=True)
class InputContext:
    """Facts about the pipeline that a dataset function must make.

    Attributes:
      num_input_pipelines: The number of calls of the function: one per worker, or one per replica.
      input_pipeline_id: The index of this call, from 0. ``shard(num_input_pipelines, input_pipeline_id)`` gives every
        pipeline its own rows.
      num_replicas_in_sync: R, the number of replicas of all workers.

    Raises:
      InvalidArgumentError: ``input_pipeline_id`` is not less than ``num_input_pipelines``, or negative.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise InvalidArgumentError(
                f"input_pipeline_id must be at least 0 and less than num_input_pipelines={self.num_input_pipelines}, got "
                f"{self.input_pipeline_id}. Pipelines are numbered from 0."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns ``global_batch_size / num_replicas_in_sync``, the batch size of one replica.

        Raises:
          InvalidArgumentError: The division has a remainder.
        """
        if global_batch_size % self.num_replicas_in_sync:
            # TensorFlow's text, including the space at its end.
            raise InvalidArgumentError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync!r} "
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        # TensorFlow's text, which programs log and compare, so the name must be the same.
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


class InputReplicationMode(_NamedOption):
    """The number of calls of a dataset function: one per worker, or one per replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """The options for moving the elements of a distributed dataset to the replicas.

    Attributes:
      experimental_fetch_to_device: True places elements on the devices before they are returned. False keeps them on
        the host until a program takes them.
      experimental_replication_mode: ``PER_WORKER`` or ``PER_REPLICA``, or their names; only for
        ``distribute_datasets_from_function``.
      experimental_place_dataset_on_device: Accepted as in TensorFlow, and ignored: datasets are Python and run on the
        host. As in TensorFlow, it needs ``PER_REPLICA`` and ``experimental_fetch_to_device=False``.
      experimental_per_replica_buffer_size: The least number of elements that may wait on the devices. More small
        batches of arrays in memory are prefetched. One further element is being read.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    @property
    def is_per_replica(self) -> bool:
        """True if a dataset function is called once for each replica."""
        return self.experimental_replication_mode is InputReplicationMode.PER_REPLICA

    def __post_init__(self) -> None:
        mode = InputReplicationMode.parse(self.experimental_replication_mode)
        object.__setattr__(self, "experimental_replication_mode", mode)
        whole_number(
            "InputOptions(experimental_per_replica_buffer_size=…)",
            self.experimental_per_replica_buffer_size,
            least=1,
        )
        if not self.experimental_place_dataset_on_device:
            return
        if mode is not InputReplicationMode.PER_REPLICA:
            raise InvalidArgumentError(
                "When `experimental_place_dataset_on_device` is set for dataset placement, you must also "
                f"specify `PER_REPLICA` for the replication mode; it is `{mode.name}`."
            )
        if self.experimental_fetch_to_device:
            raise InvalidArgumentError(
                "`experimental_place_dataset_on_device` can not be set to True when "
                "experimental_fetch_to_device is True and replication mode is set to `PER_REPLICA`; "
                "pass experimental_fetch_to_device=False."
            )
