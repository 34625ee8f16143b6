"""Descriptions of datasets: what a user's dataset is, and how to open all of it or the part of one worker.

``opening.py`` describes, and the autoshard policy chooses the part. Then the description opens it, once, as
``Elements``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from replicax._src.devices.autoshard import AutoShardPolicy
from replicax._src.input.elements import Elements


@final
@dataclass(frozen=True)
class DatasetPart:
    """The part of a dataset that one worker opens.

    Attributes:
      by: FILE for the files ``index, index + num_shards, ...``; HINT for all of it, with its SHARD_HINTs replaced.
    """

    by: AutoShardPolicy
    num_shards: int
    index: int


@final
@dataclass(frozen=True, eq=False)
class Description:
    """A dataset of any kind, which has not been opened.

    Attributes:
      text: The display text, such as ``"a grain.MapDataset"``.
      open_all: Opens all of it.
      open_part: Opens a part of it; None if it can be divided neither by files nor by SHARD_HINTs.
      is_batched: False if the elements are known to be rows, not batches.
      has_order_of_its_own: True if it is certain that other processes read another order.
      policy: The dataset's own autoshard policy.
      has_hint: True if it has a ``shard(SHARD_HINT, SHARD_HINT)``, or may have one.
      count_files: Returns the number of files that it reads, or None if it cannot be sharded by file. May be slow.
    """

    text: str
    open_all: Callable[[], Elements]
    open_part: Callable[[DatasetPart], Elements] | None = None
    is_batched: bool = True
    has_order_of_its_own: bool = False
    policy: AutoShardPolicy | None = None
    has_hint: bool = False
    count_files: Callable[[], int | None] = lambda: None
