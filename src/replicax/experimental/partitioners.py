"""How variables on parameter servers are cut into shards: ``rx.experimental.partitioners``."""

from replicax._src.user.public_names import publish_all
from replicax._src.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]

__dir__ = publish_all(globals())
