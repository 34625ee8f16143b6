"""The storage of a ``ShardedVariable``: one variable per shard, or one variable that has all rows.

Shards are cut along the first dim; shard i is the half-open interval of rows ``[start, stop)``.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.collectives.in_replica import IndexedSlices
from replicax._src.values.array_types import ConvertibleToArray
from replicax._src.values.distributed import ArrayLike
from replicax._src.variables.partitioners import shard_rows
from replicax._src.variables.variable import Variable, as_array
from replicax._src.vocabulary.errors import VariableError


class Shards(abc.ABC):
    """The storage of a ``ShardedVariable``. Callers check shapes before they call its methods.

    Attributes:
      name: The name of the full variable.
      shape: The shape of the full variable.
      dtype: The dtype of all shards.
      rows: The ``(start, stop)`` of each shard.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    rows: tuple[tuple[int, int], ...]

    @property
    @abc.abstractmethod
    def variables(self) -> list[Variable] | list[VariableShard]:
        """Returns the shards, each of which can be read and assigned."""

    @property
    @abc.abstractmethod
    def held(self) -> tuple[Any, ...]:
        """Returns the variables that programs read and write."""

    @property
    @abc.abstractmethod
    def description(self) -> tuple[str | int, ...]:
        """Returns the further arguments, after ``held``, that make equal shards. They are hashable."""

    @abc.abstractmethod
    def read(self) -> jax.Array:
        """Returns the full value, which is traced in a traced function."""

    @abc.abstractmethod
    def update(self, method: str, value: jax.Array) -> None:
        """Calls "assign", "assign_add" or "assign_sub" with a value of the full shape."""

    @abc.abstractmethod
    def update_rows(self, method: str, indices: jax.Array, values: jax.Array) -> None:
        """Calls "scatter_add", "scatter_update", … for rows [n] of the full variable, with values [n, ...].

        Rows out of range are ignored.
        """

    def read_rows(self, ids: jax.typing.ArrayLike) -> jax.Array:
        """Returns rows [*ids.shape, ...]. In traced functions it is one gather, which is recognised as a lookup."""
        return take_rows(self.read(), ids)


def take_rows(table: jax.Array, ids: jax.typing.ArrayLike) -> jax.Array:
    """Returns rows of a table. All lookups are this operation, so that programs for parameter servers find them."""
    return jnp.take(table, ids, axis=0)


@final
class ShardsInVariables(Shards):
    """Each shard is an ``rx.Variable``, of any number of rows.

    Raises:
      TypeError: The argument is not a list of variables, or is empty.
      VariableError: The shards differ in dtype, or in a dim other than the first.
    """

    def __init__(self, variables: Sequence[Variable], name: str):
        is_list = isinstance(variables, Sequence)
        if not is_list or not variables or not all(isinstance(v, Variable) for v in variables):
            raise TypeError(
                f"Argument `variables` should be a non-empty list of `rx.Variable`s. Received {variables!r}"
            )
        _check_alike(variables)
        sizes = [v.shape[0] for v in variables]
        self.name = name
        self.shape = (sum(sizes), *variables[0].shape[1:])
        self.dtype = variables[0].dtype
        self.rows = tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
        self._variables = tuple(variables)

    @property
    def variables(self) -> list[Variable]:
        return list(self._variables)

    @property
    def held(self) -> tuple[Variable, ...]:
        return self._variables

    @property
    def description(self) -> tuple[str]:
        return (self.name,)

    def read(self) -> jax.Array:
        return jnp.concatenate([v.read_value() for v in self._variables])

    def update(self, method: str, value: jax.Array) -> None:
        for variable, (start, stop) in zip(self._variables, self.rows, strict=True):
            getattr(variable, method)(value[start:stop])

    def update_rows(self, method: str, indices: jax.Array, values: jax.Array) -> None:
        for variable, (start, stop) in zip(self._variables, self.rows, strict=True):
            is_here = (indices >= start) & (indices < stop)
            # Variables ignore rows after their last one, but count negative rows from the end.
            local = jnp.where(is_here, indices - start, stop - start)
            getattr(variable, method)(IndexedSlices(values, local))


@final
class ShardsOfOne(Shards):
    """One variable has all the rows, and each shard is a view of some of them. Sizes differ by at most one.

    Args:
      held: The one variable, with ``name``, ``shape``, ``dtype`` and the methods of ``rx.Variable``.
      num_shards: The number of shards: at least 1, and at most the number of rows.
    """

    def __init__(self, held: Sequence[Any], num_shards: int):
        (variable,) = held
        self.name = variable.name
        self.shape = tuple(variable.shape)
        self.dtype = variable.dtype
        self.rows = tuple(shard_rows(self.shape[0], num_shards))
        self._variable = variable

    @property
    def variables(self) -> list[VariableShard]:
        return [VariableShard(self, i) for i in range(len(self.rows))]

    @property
    def held(self) -> tuple[Any]:
        return (self._variable,)

    @property
    def description(self) -> tuple[int]:
        return (len(self.rows),)

    def read(self) -> jax.Array:
        return self._variable.read_value()

    def update(self, method: str, value: jax.Array) -> None:
        getattr(self._variable, method)(value)

    def update_rows(self, method: str, indices: jax.Array, values: jax.Array) -> None:
        is_there = (indices >= 0) & (indices < self.shape[0])
        rows = jnp.where(is_there, indices, self.shape[0])
        getattr(self._variable, method)(IndexedSlices(values, rows))


@final
class VariableShard(ArrayLike):
    """A view of some rows of a variable that acts as a variable.

    Attributes:
      name: ``"w/part_0"`` for the first shard of ``"w"``.
      shape: The shape of these rows.
      dtype: The dtype of the variable.
    """

    def __init__(self, shards: Shards, number: int):
        start, stop = shards.rows[number]
        self.name = f"{shards.name}/part_{number}"
        self.shape = (stop - start, *shards.shape[1:])
        self.dtype = shards.dtype
        self._shards = shards
        self._rows = slice(start, stop)

    @property
    def value(self) -> jax.Array:
        """The rows."""
        return self.read_value()

    def read_value(self) -> jax.Array:
        """Returns ``value``."""
        return self._shards.read()[self._rows]

    def as_array(self) -> jax.Array:
        return self.read_value()

    def numpy(self) -> np.ndarray:
        """Returns the rows as a NumPy array (a copy). Blocks until they are computed."""
        return np.array(self.read_value())

    def assign(self, value: Any) -> VariableShard:
        """Replaces the rows and leaves those of other shards."""
        return self._update("scatter_update", "assign", value)

    def assign_add(self, delta: Any) -> VariableShard:
        """Adds to the rows."""
        return self._update("scatter_add", "assign_add", delta)

    def assign_sub(self, delta: Any) -> VariableShard:
        """Subtracts from the rows."""
        return self._update("scatter_sub", "assign_sub", delta)

    def _update(self, method: str, called: str, value: ConvertibleToArray) -> VariableShard:
        array = array_of_shape(value, self.shape, f"{called} of {self.name!r}")
        self._shards.update_rows(method, jnp.arange(self._rows.start, self._rows.stop), array)
        return self

    def __repr__(self) -> str:
        return f"VariableShard({self.name!r}, shape={self.shape}, dtype={jnp.dtype(self.dtype).name})"


def array_of_shape(value: ConvertibleToArray, shape: tuple[int, ...], what: str) -> jax.Array:
    """Returns ``value`` as an array.

    Raises:
      VariableError: It is not an array, or has another shape.
    """
    array = as_array(value, f"The value for {what}")
    if array.shape != shape:
        raise VariableError(
            f"{what}: its shape is {shape}, and a value of shape {array.shape} was given. Give one of this shape."
        )
    return array


def _check_alike(variables: Sequence[Variable]) -> None:
    dtypes = [jnp.dtype(v.dtype).name for v in variables]
    if len(set(dtypes)) > 1:
        raise VariableError(
            f"All elements in argument `variables` must have the same dtype. Received dtypes: {dtypes}"
        )
    shapes = [v.shape for v in variables]
    if len({shape[1:] for shape in shapes}) > 1 or not all(shapes):
        raise VariableError(
            f"All elements in argument `variables` must have the same shapes except for the first axis, which they "
            f"all have. Received shapes: {shapes}"
        )
