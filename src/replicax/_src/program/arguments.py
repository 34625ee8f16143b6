"""Arguments of functions that are traced: tensors of other libraries as arrays, 64-bit arrays as JAX has them.

Classes of other libraries are known by their methods, or by their names: no library is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from replicax._src import jax_compat
from replicax._src.errors import InvalidArgumentError
from replicax._src.input.narrowing import name_of, narrowed

_ROOTS = ("args", "kwargs", "closure")


def as_arguments(leaves: Sequence[Any], tree: Any) -> Sequence[Any]:
    """Returns the leaves of ``(args, kwargs, cells)`` as programs take them.

    Raises:
      InvalidArgumentError: One has to be made an array by the user: see ``_as_array``.
      NarrowingError: A number does not fit into the dtype that JAX gives its array.
    """
    if not any(map(_needs_a_look, map(type, leaves))):
        return leaves
    if any(map(_may_be_foreign, map(type, leaves))):
        leaves = [
            _as_array(leaf, lambda leaf=leaf: name_of(leaf, tree.unflatten(leaves), _ROOTS))
            if _may_be_foreign(type(leaf))
            else leaf
            for leaf in leaves
        ]
    return narrowed(leaves, tree, *_ROOTS)


@functools.lru_cache(maxsize=512)
def _needs_a_look(kind: type) -> bool:
    return issubclass(kind, np.ndarray | np.generic) or _may_be_foreign(kind)


@functools.lru_cache(maxsize=512)
def _may_be_foreign(kind: type) -> bool:
    """True if objects of a class may be tensors of another library than NumPy and JAX."""
    # What has __jax_array__ JAX knows itself: variables of replicax, Keras and flax, and values of strategies.
    if issubclass(kind, np.ndarray | np.generic | jax.Array | jax_compat.Tracer) or _has(
        kind, "__jax_array__"
    ):
        return False
    return _has(kind, "__array__") or _has(kind, "__dlpack__")


def _as_array(value: Any, name: Callable[[], str]) -> Any:
    """Returns a tensor of another library as a NumPy array, or as a JAX array if its device needs that.

    On CPUs nothing is copied: the array shares the tensor's memory.

    Args:
      value: Of a class that may be foreign. What has no shape and dtype, or holds text, is returned as it is.
      name: Returns what errors call it.

    Raises:
      InvalidArgumentError: It is a variable, or rows that are elsewhere or labelled, and has to be converted by the user.
    """
    kind = type(value)
    remedy = _remedy(kind)
    if remedy is not None:
        library = kind.__module__.partition(".")[0]
        raise InvalidArgumentError(f"{name()} is a {kind.__name__} of {library}, which is no array: {remedy}")
    if not (_has(value, "shape") and _has(value, "dtype")):
        return value
    try:
        array = np.asarray(value)
    except Exception as error:  # of a GPU, or of a dtype that NumPy lacks, as torch.bfloat16
        try:
            return jax.dlpack.from_dlpack(value)
        except Exception:
            raise InvalidArgumentError(
                f"{name()} is a {kind.__module__}.{kind.__name__} that cannot be made an array: {error} Pass an array, or a tensor "
                "on this process's devices whose gradient is not recorded (torch: x.detach())."
            ) from error
    return array if array.dtype.kind in "biufcV" else value


@functools.lru_cache(maxsize=512)
def _remedy(kind: type) -> str | None:
    """What to write in place of an object of a class; None if it can be taken as an array."""
    names = {(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__}
    if ("tensorflow", "Variable") in names:
        return (
            "programs of JAX neither read nor assign it. Make an rx.Variable of it, which they do; or pass its value now, "
            "variable.numpy()."
        )
    if ("h5py", "Dataset") in names:
        return "its rows are in a file. Read those that the call needs: dataset[start:stop]."
    if any(library == "pandas" for library, _ in names):
        return "its rows have labels and its columns may have different dtypes. Pass .to_numpy(), or a dict of arrays."
    return None


def _has(value: Any, name: str) -> bool:
    return getattr(value, name, None) is not None
