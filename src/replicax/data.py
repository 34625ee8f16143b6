"""Datasets over arrays in memory."""

from replicax._src.input.arrays import ArrayDataset, from_arrays

__all__ = ["ArrayDataset", "from_arrays"]
