"""Datasets over arrays in memory and over files, and how datasets are distributed."""

from replicax._src.devices.autoshard import AutoShardPolicy, DistributeOptions
from replicax._src.input.files.constructors import (
    from_array_records,
    from_csv,
    from_parquet,
    from_text_lines,
    from_tfrecords,
)
from replicax._src.input.files.file_dataset import FileDataset
from replicax._src.input.pipeline import SHARD_HINT, ArrayDataset, Dataset, from_arrays
from replicax._src.user.public_names import publish_all

__all__ = [
    "SHARD_HINT",
    "ArrayDataset",
    "AutoShardPolicy",
    "Dataset",
    "DistributeOptions",
    "FileDataset",
    "from_array_records",
    "from_arrays",
    "from_csv",
    "from_parquet",
    "from_text_lines",
    "from_tfrecords",
]

__dir__ = publish_all(globals())
