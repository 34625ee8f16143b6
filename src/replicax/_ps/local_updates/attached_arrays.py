"""``AttachedArrays``: the arrays of a group's program that groups exchange, of any framework, by their numbers.

Keras and nnx are not imported: a model of theirs exists only if the program has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._ps.local_updates.fragment_values import beside, on_one_device
from replicax._ps.local_updates.replay_file import checksum_of
from replicax._src.program_kit.errors import InvalidArgumentError, StructureError, UnsupportedError
from replicax._src.program_kit.traced_programs import Topology
from replicax._src.program_kit.variables import owner_of_table, strategy_for_new_variable

_NAME: Final = "rx.experimental.LocalUpdates"


@final
@dataclass(frozen=True)
class TravellingArray:
    """An array that travels.

    Attributes:
      name: Its name in the program.
      shape, dtype: Its own. It travels as float32.
      is_state: True if no gradient changes it, as the statistics of BatchNorm: groups take its mean by rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_state: bool

    @property
    def described(self) -> str:
        return f"{self.dtype}{list(self.shape)}{' (state)' if self.is_state else ''}"


@final
@dataclass(frozen=True, eq=False)
class HeldVariable:
    """A variable, and how its value is read and replaced. A frozen one never changes, and does not travel."""

    name: str
    variable: Any
    is_state: bool
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    is_frozen: bool = False


@final
class AttachedArrays:
    """The arrays of a model, of variables, or of a pytree.

    Args:
      attached: A Keras or nnx model, a pytree of variables, or a pytree of arrays.

    Attributes:
      model: What was attached.
      specs: The arrays that travel. Integers, booleans, random keys and frozen weights do not.
      is_pytree: True if it has arrays and no variables: then ``tree`` and ``replace`` are used.

    Raises:
      InvalidArgumentError: There is nothing to exchange, or a variable is there twice.
      UnsupportedError: An array is in shards, or complex.
    """

    def __init__(self, attached: Any):
        if isinstance(attached, type):
            raise InvalidArgumentError(
                f"{_NAME}.attach got the class {attached.__name__}. Attach an object of it: groups.attach(model)."
            )
        self.model = attached
        self._sync: Callable[[], object] = getattr(attached, "jax_state_sync", _nothing)
        self._sync()
        self._all_holders = _holders_of(attached)
        self.is_pytree = self._all_holders is None
        if self._all_holders is None:
            paths, self._tree = jax.tree_util.tree_flatten_with_path(attached)
            self._leaves = [leaf for _, leaf in paths]
            names = [jax.tree_util.keystr(path) or "the array" for path, _ in paths]
            found = [(name, leaf, False) for name, leaf in zip(names, self._leaves, strict=True)]
        else:
            _check_distinct(self._all_holders)
            found = [(each.name, each.read(each.variable), each.is_state) for each in self._all_holders]
        floating = [at for at, (name, value, _) in enumerate(found) if _is_floating(name, value)]
        holders = self._all_holders or []
        self._frozen = [holders[at] for at in floating if holders and holders[at].is_frozen]
        travelling = [at for at in floating if not holders or not holders[at].is_frozen]
        if not travelling:
            raise InvalidArgumentError(
                f"{_NAME}.attach got {type(attached).__name__} without floating-point values: got {len(found)} values. Attach "
                "a Keras model that is built, an nnx model, variables, or a pytree of arrays."
            )
        self._at = travelling
        self.specs = [
            TravellingArray(name, tuple(value.shape), np.dtype(value.dtype), is_state)
            for name, value, is_state in (found[at] for at in travelling)
        ]
        for spec, at in zip(self.specs, travelling, strict=True):
            _check_is_in_one_place(spec, found[at][1])

    @property
    def topology(self) -> Topology:
        """The topology of the strategy that owns the variables, or of the current one."""
        strategy = None
        if self._all_holders:
            strategy, _ = owner_of_table(self._all_holders[0].variable)
        return (strategy or strategy_for_new_variable()).topology

    def frozen(self) -> list[tuple[str, str]]:
        """Returns the name of each frozen weight, with a text that differs if its values differ."""
        self._sync()
        values = [np.asarray(on_one_device(each.read(each.variable))) for each in self._frozen]
        described = [f"{each.dtype}{list(each.shape)} of checksum {checksum_of(each):08x}" for each in values]
        return [(each.name, text) for each, text in zip(self._frozen, described, strict=True)]

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """Returns the values of arrays by their numbers in ``specs``."""
        self._sync()
        if self._all_holders is None:
            return [self._leaves[self._at[number]] for number in numbers]
        holders = [self._all_holders[self._at[number]] for number in numbers]
        return [each.read(each.variable) for each in holders]

    def write(self, numbers: Sequence[int], arrays: Sequence[Any]) -> None:
        """Replaces values."""
        self._sync()
        for number, array in zip(numbers, arrays, strict=True):
            at = self._at[number]
            if self._all_holders is None:
                self._leaves[at] = beside(array, self._leaves[at])
            else:
                holder = self._all_holders[at]
                holder.write(holder.variable, array)

    @property
    def tree(self) -> Any:
        """The pytree with the values that it has now."""
        return jax.tree_util.tree_unflatten(self._tree, self._leaves)

    def replace(self, tree: Any) -> None:
        """Takes the values of a pytree of the same structure.

        Raises:
          StructureError: The structure, a shape or a dtype differs.
        """
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure != self._tree:
            raise StructureError(
                f"{_NAME}.step got a pytree of another structure than attach: {structure}, and not {self._tree}. Give it all "
                "parameters at each step."
            )
        for spec, at in zip(self.specs, self._at, strict=True):
            leaf = leaves[at]
            shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
            if shape != spec.shape or dtype != spec.dtype:
                got = type(leaf).__name__ if shape is None else f"{dtype}{list(shape)}"
                raise StructureError(
                    f"{_NAME}.step got {got} for {spec.name}, which was attached as "
                    f"{spec.described}. Give it the same parameters at each step."
                )
        self._leaves = leaves

    def check_not_replaced(self) -> None:
        """Checks that the model still has the variables that were attached.

        Raises:
          InvalidArgumentError: It has others.
        """
        if self._all_holders is None:
            return
        now = _holders_of(self.model) or []
        before = [each.variable for each in self._all_holders]
        if len(now) == len(before) and all(new.variable is old for new, old in zip(now, before, strict=True)):
            return
        known, held = {id(each) for each in before}, {id(each.variable) for each in now}
        added = next((each.name for each in now if id(each.variable) not in known), None)
        gone = next((each.name for each in self._all_holders if id(each.variable) not in held), None)
        what = f"has {added!r}, which was not there" if added else f"no longer has {gone!r}"
        raise InvalidArgumentError(
            f"{_NAME}: the model {what} when it was attached, and would go on alone. Change its variables before "
            "groups.attach(model), or make another LocalUpdates."
        )


def _nothing() -> None:
    pass


def _holders_of(attached: Any) -> list[HeldVariable] | None:
    """Returns the variables of a model or of a pytree of variables; None if it has arrays."""
    keras, nnx = sys.modules.get("keras"), sys.modules.get("flax.nnx")
    if keras is not None and isinstance(attached, keras.Layer):
        return list(_of_keras(attached))
    if nnx is not None and isinstance(attached, nnx.Module):
        return list(_of_nnx(nnx, attached))
    leaves = jax.tree_util.tree_leaves(attached, is_leaf=_is_variable)
    are_variables = [_is_variable(each) for each in leaves]
    if not any(are_variables):
        return None
    if not all(are_variables):
        other = leaves[are_variables.index(False)]
        raise InvalidArgumentError(
            f"{_NAME}.attach got variables and a {type(other).__name__} in one pytree. Attach either variables or arrays."
        )
    return [
        HeldVariable(
            _name(each), each, not getattr(each, "trainable", True), _value_in_brackets, _set_in_brackets
        )
        if nnx is not None and isinstance(each, nnx.Variable)
        else _assigned(each, is_state=not getattr(each, "trainable", True))
        for each in leaves
    ]


def _of_keras(model: Any) -> Iterator[HeldVariable]:
    from replicax._ps.keras.exchanged_weights import weights_with_kinds  # it loads Keras

    for weight, is_state, is_frozen in weights_with_kinds(model):
        yield replace(_assigned(weight, is_state=is_state), is_frozen=is_frozen)


def _is_variable(value: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    is_of_nnx = nnx is not None and isinstance(value, nnx.Variable)
    return is_of_nnx or (not isinstance(value, jax.Array) and callable(getattr(type(value), "assign", None)))


def _assigned(variable: Any, *, is_state: bool) -> HeldVariable:
    """A variable of Keras or of replicax."""
    return HeldVariable(_name(variable), variable, is_state, _value, _assign)


def _of_nnx(nnx: Any, model: Any) -> Iterator[HeldVariable]:
    for path, variable in nnx.iter_graph(model):
        is_local = isinstance(variable, (nnx.RngState, nnx.Intermediate))
        if isinstance(variable, nnx.Variable) and not is_local:
            name = "/".join(map(str, path))
            is_state = not isinstance(variable, nnx.Param)
            yield HeldVariable(name, variable, is_state, _value_in_brackets, _set_in_brackets)


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or type(variable).__name__)


def _value(variable: Any) -> Any:
    return variable.value


def _assign(variable: Any, value: Any) -> None:
    variable.assign(value)


def _value_in_brackets(variable: Any) -> Any:
    return variable[...]


def _set_in_brackets(variable: Any, value: Any) -> None:
    variable[...] = beside(value, variable[...])


def _check_distinct(holders: Sequence[HeldVariable]) -> None:
    seen: set[int] = set()
    for each in holders:
        if id(each.variable) in seen:
            raise InvalidArgumentError(f"{_NAME}.attach got the variable {each.name!r} twice. Give it once.")
        seen.add(id(each.variable))


def _is_floating(name: str, value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or getattr(value, "shape", None) is None:
        raise InvalidArgumentError(
            f"{_NAME}.attach got a {type(value).__name__} as {name}. Attach a Keras or nnx model, variables, or a pytree of "
            "arrays."
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise UnsupportedError(
            f"{_NAME}.attach got {name} of dtype {dtype}. Groups exchange real floating-point values: keep the real and the "
            "imaginary part in two arrays."
        )
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _check_is_in_one_place(spec: TravellingArray, value: Any) -> None:
    try:
        on_one_device(value)
    except UnsupportedError as error:
        raise UnsupportedError(f"{spec.name}: {error}") from None
