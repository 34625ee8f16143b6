"""Checkpoints of orbax: a directory that orbax restores as nested dicts of arrays, without replicax."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from replicax._src.checkpoint.array_files import tensorstore
from replicax._src.checkpoint.saved import SavedValue
from replicax._src.packaging.extras import missing_extra


def orbax() -> Any:
    """Imports and returns orbax.

    Raises:
      MissingExtraError: It is not installed.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise missing_extra("Exporting a checkpoint to a directory", "orbax", "orbax-checkpoint") from error
    return ocp


def write(directory: str, *, arrays: Mapping[str, SavedValue]) -> None:
    """Writes arrays as a pytree of nested dicts, by the parts of their keys.

    Orbax takes full arrays only. So it writes the pytree with a number in place of each array. Then each number is
    replaced by the array, in zarr 3 with checksums.

    Raises:
      CorruptCheckpointError: An array is damaged.
      Exception: The directory cannot be written.
    """
    ocp = orbax()
    tree: dict[str, Any] = {}
    for key, array in arrays.items():
        *parents, last = key.split("/")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = np.zeros((), array.dtype)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory, tree)
    for key, array in arrays.items():
        folder = os.path.join(directory, key.replace("/", "."))  # where orbax has put the number
        shutil.rmtree(folder)
        _write_array(folder, array)


def _write_array(folder: str, array: SavedValue) -> None:
    opened = None
    for index, values in array.slabs():
        opened = opened or _opened(folder, array, values.shape)
        opened[index] = values
    if opened is None:
        _opened(folder, array, array.shape)


def _opened(folder: str, array: SavedValue, chunk: tuple[int, ...]) -> Any:
    """Creates an array in files. Each slab is one chunk, so writing reads nothing."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": array.shape,
            "data_type": array.dtype.name,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [max(1, size) for size in chunk]},
            },
        },
    }
    return tensorstore().open(spec, create=True).result()
