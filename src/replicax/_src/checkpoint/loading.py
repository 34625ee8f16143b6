"""Loads safetensors files into the variables of a program. Each process reads only what its devices need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax._src.checkpoint.array_leaves import ArrayLeaf
from replicax._src.checkpoint.errors import CheckpointMismatchError, listed
from replicax._src.checkpoint.graph import Graph, contents_of
from replicax._src.checkpoint.safetensors_files import Tensor, tensors_of
from replicax._src.checkpoint.trees import HeldTree
from replicax._src.values.framework import trackings, use_imported
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import path_of

Names = Mapping[str, str] | Callable[[str], str | None] | None


def load_safetensors(tracked: Any, file: str | os.PathLike[str], *, names: Names = None) -> None:
    """Loads the tensors of a safetensors file into variables, one after the other.

    Each process reads the parts that its devices hold. So a model that is sharded over devices or processes needs
    its own shards and one variable of memory. All processes call it, with the same file. It does not communicate.

    Variables are named by structure, as in checkpoints: ``layers/0/kernel`` in a model, ``model/layers/0/kernel`` in
    ``rx.Checkpoint(model=model)``. ``rx.checkpoint.export`` writes files with the second names.

    Args:
      tracked: A built Keras model or layer, an nnx module, a variable, or an ``rx.Checkpoint`` of several.
      file: The file, or the index of several files, ``model.safetensors.index.json``.
      names: The name in the file for the name of each variable: a dict with the variables to load, or a function
        that returns None for a variable that keeps its value. By default the names are equal, and the file has all
        variables and no others.

    Raises:
      CheckpointMismatchError: Names, shapes or kinds of dtypes differ; nothing was changed. A floating-point tensor
        is cast to a variable of another floating-point dtype.
      InvalidArgumentError: ``tracked`` has no variables, or the file is no safetensors file.

    >>> import tempfile
    >>> import replicax as rx
    >>> directory = tempfile.mkdtemp()
    >>> variable = rx.Variable([0.0, 0.0])
    >>> path = rx.Checkpoint(weights=rx.Variable([1.0, 2.0])).save(directory + "/ckpt")
    >>> file = rx.checkpoint.export(path, directory + "/weights.safetensors")
    >>> rx.checkpoint.load_safetensors(rx.Checkpoint(weights=variable), file)
    >>> variable.numpy().tolist()
    [1.0, 2.0]
    """
    use_imported()
    file = os.path.abspath(path_of(file, "file", "model.safetensors"))
    if names is not None and not isinstance(names, Mapping) and not callable(names):
        raise InvalidArgumentError(
            "names is a dict from names of variables to names in the file, or a function; got "
            f"{type(names).__name__}: {names!r:.200}."
        )
    graph = Graph(tracked) if contents_of(tracked) is not None else None
    leaves = {key: leaf for key, leaf in graph.leaves() if isinstance(leaf, ArrayLeaf)} if graph else {}
    if graph is None or not leaves:
        raise InvalidArgumentError(
            f"load_safetensors needs an object with variables: a model that is built, or an rx.Checkpoint of it; got "
            f"{type(tracked).__name__}: {tracked!r:.200}."
        )
    tensors = tensors_of(file)
    wanted = _wanted(leaves, names)
    _check(file, leaves, tensors, wanted, unused=set(tensors) - set(wanted.values()) if names is None else ())
    for key, name in wanted.items():
        leaf = leaves[key]
        leaf.give(leaf.fetch(tensors[name].cast(leaf.dtype)))
    for node in graph.nodes:
        if isinstance(node.object, HeldTree):
            node.object.finish()
        for tracking in trackings():
            tracking.finish(node.object)


def _wanted(leaves: Mapping[str, ArrayLeaf], names: Names) -> dict[str, str]:
    """Returns the name in the file for each variable to load."""
    if names is None:
        return {key: key for key in leaves}
    if callable(names):
        found = {key: names(key) for key in leaves}
        return {key: name for key, name in found.items() if name is not None}
    return dict(names)


def _check(
    file: str,
    leaves: Mapping[str, ArrayLeaf],
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, str],
    unused: Iterable[str],
) -> None:
    differ = [text for key, name in wanted.items() if (text := _difference(key, name, leaves, tensors))]
    differ += [f"{name}: only in the file" for name in sorted(unused)]
    if differ:
        raise CheckpointMismatchError(
            f"The file {file!r} does not fit the variables, and nothing was loaded. These differ:\n{listed(differ)}\n"
            "Make the model with the shapes of the file. If only the names differ, give names, which may be a dict "
            "with a part of the variables."
        )


def _difference(key: str, name: str, leaves: Mapping[str, ArrayLeaf], tensors: Mapping[str, Tensor]) -> str:
    """Returns the reason why a tensor cannot be loaded into a variable; empty if it can."""
    if key not in leaves:
        return f"{key}: there is no such variable; there are {', '.join(sorted(leaves)[:5])}"
    if name not in tensors:
        return f"{key}: the file has no {name!r}"
    leaf, tensor = leaves[key], tensors[name]
    what = f"{key} ({leaf.label!r})" if name == key else f"{key} ({leaf.label!r}, {name!r} in the file)"
    if tensor.shape != tuple(leaf.shape):
        return f"{what}: shape {tensor.shape} in the file, {tuple(leaf.shape)} here"
    if not _can_cast(tensor.dtype, leaf.dtype):
        return f"{what}: dtype {tensor.dtype.name} in the file, {leaf.dtype.name} here"
    return ""


def _can_cast(source: np.dtype, target: np.dtype) -> bool:
    are_floats = jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.floating)
    return source == target or are_floats
