"""Values with one component per replica: DistributedValues, PerReplica, Mirrored. No strategies here.

Layout: a ``PerReplica`` is one global array [R, ...], and device r holds row r. Components of different shapes are
padded to the largest, and the true shapes are kept beside. A ``PerReplica`` whose components are proven equal is stored
like a ``Mirrored``: one replicated array.
"""

from __future__ import annotations

import abc
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices.named_devices import device_name
from replicax._src.devices.topology import Topology
from replicax._src.drawing import html
from replicax._src.jax_internals import jax_compat
from replicax._src.user.listening import listener
from replicax._src.user.tracebacks import called_often
from replicax._src.user.user_code import user_line
from replicax._src.values.framework import is_variable
from replicax._src.vocabulary.errors import DonatedError, PerReplicaUseError, UnknownAxisError

_REFLECTED = [
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
]
_BINARY = [*_REFLECTED, "lt", "le", "gt", "ge", "eq", "ne"]
_UNARY = ["neg", "pos", "abs", "invert"]
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "__float__": float,
    "__int__": int,
    "__bool__": bool,
    "__complex__": complex,
    "__index__": operator.index,
    "__len__": len,
    "__iter__": iter,
}


class ArrayLike(abc.ABC):
    """Something that stands for an array in arithmetic, conversions and JAX functions."""

    __slots__ = ()
    __array_priority__ = 1000
    __hash__ = object.__hash__

    @abc.abstractmethod
    def as_array(self) -> Any:
        """Returns the array. Raises a typed error if there is none."""

    def __jax_array__(self) -> Any:
        return jnp.asarray(self.as_array())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.as_array(), dtype=dtype)
        return array.copy() if copy else array

    def __getitem__(self, index: Any) -> Any:
        return self.as_array()[index]

    def __format__(self, spec: str) -> str:
        return format(self.as_array(), spec) if spec else str(self)

    if TYPE_CHECKING:  # set below, from the tables above

        def __float__(self) -> float: ...
        def __int__(self) -> int: ...
        def __complex__(self) -> complex: ...
        def __bool__(self) -> bool: ...
        def __index__(self) -> int: ...
        def __len__(self) -> int: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __neg__(self) -> Any: ...
        def __pos__(self) -> Any: ...
        def __abs__(self) -> Any: ...
        def __invert__(self) -> Any: ...
        def __add__(self, other: Any) -> Any: ...
        def __radd__(self, other: Any) -> Any: ...
        def __sub__(self, other: Any) -> Any: ...
        def __rsub__(self, other: Any) -> Any: ...
        def __mul__(self, other: Any) -> Any: ...
        def __rmul__(self, other: Any) -> Any: ...
        def __truediv__(self, other: Any) -> Any: ...
        def __rtruediv__(self, other: Any) -> Any: ...
        def __floordiv__(self, other: Any) -> Any: ...
        def __rfloordiv__(self, other: Any) -> Any: ...
        def __mod__(self, other: Any) -> Any: ...
        def __rmod__(self, other: Any) -> Any: ...
        def __pow__(self, other: Any) -> Any: ...
        def __rpow__(self, other: Any) -> Any: ...
        def __matmul__(self, other: Any) -> Any: ...
        def __rmatmul__(self, other: Any) -> Any: ...
        def __and__(self, other: Any) -> Any: ...
        def __rand__(self, other: Any) -> Any: ...
        def __or__(self, other: Any) -> Any: ...
        def __ror__(self, other: Any) -> Any: ...
        def __xor__(self, other: Any) -> Any: ...
        def __rxor__(self, other: Any) -> Any: ...
        def __lshift__(self, other: Any) -> Any: ...
        def __rlshift__(self, other: Any) -> Any: ...
        def __rshift__(self, other: Any) -> Any: ...
        def __rrshift__(self, other: Any) -> Any: ...
        def __lt__(self, other: Any) -> Any: ...
        def __le__(self, other: Any) -> Any: ...
        def __gt__(self, other: Any) -> Any: ...
        def __ge__(self, other: Any) -> Any: ...


def _plain(other: Any) -> Any:
    return other.as_array() if isinstance(other, ArrayLike) else other


def _array_operator(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    # Calls the array's own dunder, so that weak types, dtypes and NotImplemented are those of the array.
    attribute = f"__{'r' if reflected else ''}{name}__"

    def method(self: ArrayLike, other: Any) -> Any:
        return getattr(jnp.asarray(self.as_array()), attribute)(_plain(other))

    return method


def _array_method(name: str) -> Callable[[Any], Any]:
    return lambda self: getattr(jnp.asarray(self.as_array()), f"__{name}__")()


def _array_conversion(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: convert(self.as_array())


for _name in _BINARY:
    setattr(ArrayLike, f"__{_name}__", _array_operator(_name, reflected=False))
for _name in _REFLECTED:
    setattr(ArrayLike, f"__r{_name}__", _array_operator(_name, reflected=True))
for _name in _UNARY:
    setattr(ArrayLike, f"__{_name}__", _array_method(_name))
for _name, _convert in _CONVERSIONS.items():
    setattr(ArrayLike, _name, _array_conversion(_convert))


class DistributedValues(ArrayLike):
    """A value with one component per replica."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in replica order."""

    def __copy__(self) -> Any:
        return jax.tree_util.tree_map(lambda array: array, self)  # flattening marks the array as shared


_MAX_SHOWN = 16  # numbers in a message


class PerReplica(DistributedValues):
    """One array per replica, which may differ between replicas.

    Inside ``Strategy.run`` each replica sees its own component. Outside, ask a strategy for one array
    (``Strategy.reduce``) or for all of them (``Strategy.experimental_local_results``).

    Attributes:
      num_replicas: The number of replicas R.
      shapes: The true shape of each component if they differ, else None.
      is_equal: True if the components were proven equal when the value was made.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "is_equal",
        "is_ours",
        "is_shared",
        "maker",
        "num_replicas",
        "shapes",
    )

    @called_often
    def __init__(
        self,
        array: Any,
        num_replicas: int,
        shapes: tuple[tuple[int, ...], ...] | None = None,
        is_equal: bool = False,
        is_ours: bool = False,
        maker: Any = None,
    ):
        self._array = array
        self.num_replicas = num_replicas
        self.maker = maker  # see ``ResultWatch``
        self.shapes = shapes
        self.is_equal = is_equal
        self.is_ours = is_ours  # a program made the array, and nobody else holds its buffer
        self.is_shared = False  # True after the array was handed out

    @property
    def array(self) -> Any:
        """The array behind the value. It will not be donated from now on.

        The array is [R, ...] with row r on the device of replica r, or a replicated [...] if ``is_equal``.
        """
        self.is_shared = True
        return self.stored

    @property
    @called_often
    def stored(self) -> Any:
        """The array, for internal callers that do not keep it."""
        if self._array is None:
            raise _donated("PerReplica")
        return self._array

    def donate(self) -> None:
        """Drops the array, because a program owns its buffer now."""
        self._array = None

    @property
    def dtype(self) -> Any:
        """The dtype of every component."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the one array that the value stands for.

        Raises:
          AttributeError: It has several components that are not proven equal.
        """
        if self.is_equal or self.num_replicas == 1:
            return self.component_shape(0)
        shapes = [self.component_shape(r) for r in range(self.num_replicas)]
        raise AttributeError(
            f"A PerReplica of {self.num_replicas} components has no shape: {_shapes_of_replicas(self.dtype, shapes)}. In a "
            "function that strategy.run runs, each replica sees its own array; outside, take "
            "strategy.experimental_local_results(value)[0].shape, or the shape of strategy.gather(value, axis=0)."
        )

    @property
    def ndim(self) -> int:
        """The number of dims of every component."""
        return len(self.component_shape(0))

    @property
    def description(self) -> str:
        """A description without the values."""
        shapes = dict.fromkeys(self.component_shape(r) for r in range(self.num_replicas))
        kinds = ", ".join(f"{self.dtype}{list(shape)}" for shape in shapes)
        return f"PerReplica({self.num_replicas} components of {kinds})"

    @property
    def is_of_whole_batch(self) -> bool:
        """True for a result of an eager run, whose one component is for the rows of all replicas."""
        return self.is_equal and self.num_replicas == 1

    def component_shape(self, replica_id: int) -> tuple[int, ...]:
        """Returns the true shape of one component."""
        if self.shapes is not None:
            return self.shapes[replica_id]
        shape = tuple(self.stored.shape)
        return shape if self.is_equal else shape[1:]

    @property
    def values(self) -> tuple[Any, ...]:
        array = self.array
        self.is_shared = True
        if not _is_on_replicas(array, self.num_replicas):
            rows = [array if self.is_equal else array[r] for r in range(self.num_replicas)]
        else:
            shards = shards_of_replicas(array, self.num_replicas, has_rows=not self.is_equal)
            rows = [shard.data if self.is_equal else shard.data[0] for shard in shards]
            if self.shapes is not None:
                shapes = [self.shapes[shard.index[0].start or 0] for shard in shards]
                return tuple(map(cut, rows, shapes))
        if self.shapes is None:
            return tuple(rows)
        return tuple(map(cut, rows, self.shapes))

    def as_array(self) -> Any:
        array = self._array
        is_placed = array is not None and self.is_equal and _is_on_replicas(array, self.num_replicas)
        if is_placed and array.is_fully_replicated:  # type: ignore[union-attr]
            return self.array.addressable_data(0)  # ``values`` would look at the shards of all replicas
        if array is None or self.is_equal or self.num_replicas == 1:
            return self.values[0]
        better = listener().converted("A PerReplica was used")
        if better is not None:
            raise better
        shown = self if self.stored.size <= _MAX_SHOWN else self.description
        what = (
            f"It looks like you are using a PerReplica object while not inside a replica context, which is "
            f"not supported: {shown} has {self.num_replicas} components and does not stand for one array."
        )
        if self.maker is not None and self.maker.drifted:
            raise PerReplicaUseError(f"{what} {self.maker.drifted}")
        raise PerReplicaUseError(
            f"{what} For one number use strategy.reduce(rx.ReduceOp.SUM or MEAN, value, axis=None); for the components "
            f"strategy.experimental_local_results(value); to compute with it per replica "
            f"strategy.run(fn, args=(value,))."
        )

    def _repr_html_(self) -> str:
        array = self._array
        title = f"PerReplica of {self.num_replicas} replica{'s' * (self.num_replicas != 1)}"
        if array is None:
            return html.page(title, html.facts({"value": "was given to a program (donate_args)"}))
        if isinstance(array, jax_compat.Tracer) or not isinstance(array, jax.Array):
            return html.page(title, html.facts({"value": array}))
        shards: dict[int, Any] = {}
        if _is_on_replicas(array, self.num_replicas) and not array.is_deleted():
            found = shards_of_replicas(array, self.num_replicas, has_rows=not self.is_equal)
            numbers = _local_replicas(array, self.num_replicas, self.is_equal)
            shards = dict(zip(numbers, found, strict=False))
        rows = []
        for r in range(self.num_replicas):
            shape = self.component_shape(r)
            shard = shards.get(r)
            where = "not in this process" if shard is None else device_name(shard.device)
            value = None if shard is None else _component_shown(shard.data, shape, self.is_equal)
            rows.append((r, where, f"{self.dtype}{list(shape)}", "…" if value is None else value))
        about = html.facts({"all replicas": "proven equal"}) if self.is_equal else ""
        return html.page(title, about, html.table(("replica", "device", "component", "value"), rows))

    def __repr__(self) -> str:
        array = self._array
        if array is None:
            return "PerReplica(<donated>)"
        if isinstance(array, jax_compat.Tracer) or not isinstance(array, (jax.Array, np.ndarray)):
            return f"PerReplica({self.num_replicas} components of {array})"
        shared = self.is_shared
        replicas = _local_replicas(array, self.num_replicas, self.is_equal)
        parts = "\n".join(
            f"  {i}: {on_host_or_keys(value)!r}" for i, value in zip(replicas, self.values, strict=True)
        )
        self.is_shared = shared
        return f"PerReplica:{{\n{parts}\n}}"


def _shapes_of_replicas(dtype: Any, shapes: Sequence[tuple[int, ...]]) -> str:
    """Returns ``replicas 0 to 2 have float32[3], replica 3 has float32[2]``."""
    if len(set(shapes)) == 1:
        return f"each has {dtype}{list(shapes[0])}, and they may differ"
    said, first = [], 0
    for shape, group in itertools.groupby(shapes):
        last = first + len(list(group)) - 1
        which = f"replica {first} has" if first == last else f"replicas {first} to {last} have"
        said.append(f"{which} {dtype}{list(shape)}")
        first = last + 1
    return ", ".join(said)


def on_host_or_keys(array: Any) -> Any:
    """Returns an array as NumPy's, to print it. Typed random keys stay JAX's, because NumPy has no such dtype."""
    return array if jax_compat.is_typed_key(getattr(array, "dtype", None)) else np.asarray(array)


def shown_value(array: Any) -> str | None:
    """Returns the text of a small value that is already computed in this process; None otherwise. It does not wait."""
    if isinstance(array, np.ndarray):
        return str(array) if array.size <= _MAX_SHOWN else None
    if not isinstance(array, jax.Array) or isinstance(array, jax_compat.Tracer) or array.size > _MAX_SHOWN:
        return None
    is_here = not array.is_deleted() and (array.is_fully_addressable or array.is_fully_replicated)
    if not is_here or not jnp.issubdtype(array.dtype, jnp.number):
        return None
    is_ready = array.is_ready()  # type: ignore[attr-defined]
    return str(np.asarray(array)) if is_ready else "being computed"


def _is_on_replicas(array: Any, num_replicas: int) -> bool:
    """Returns True if the replicas' devices hold ``array``. A coordinator has its workers' values in one place."""
    is_placed = isinstance(array, jax.Array) and not isinstance(array, jax_compat.Tracer)
    return is_placed and len(array.sharding.device_set) >= num_replicas


def _component_shown(data: Any, shape: Sequence[int], is_equal: bool) -> str | None:
    """Returns the text of one replica's component, given the data on its device."""
    if jnp.issubdtype(data.dtype, jax.dtypes.extended):  # random keys
        return None
    whole = data.size if data.is_ready() else _MAX_SHOWN + 1
    if whole > _MAX_SHOWN:
        return None if data.is_ready() else "being computed"
    array = np.asarray(data)
    return shown_value(cut(array if is_equal else array[0], shape))


def _local_replicas(array: Any, num_replicas: int, is_equal: bool) -> Sequence[int]:
    """Returns the indices of the replicas whose components are in this process."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return range(num_replicas)
    num_logical = len(array.sharding.device_set) // num_replicas
    return sorted(
        {
            shard.replica_id // num_logical if is_equal else (shard.index[0].start or 0)
            for shard in array.addressable_shards
        }
    )


def shards_of_replicas(array: jax.Array, num_replicas: int, *, has_rows: bool) -> list[Any]:
    """Returns the shard of an array for each of this process's replicas, in replica order.

    Args:
      has_rows: True if each replica holds one row; False if the array is replicated.
    """
    shards = sorted(
        array.addressable_shards,
        key=lambda shard: (shard.index[0].start or 0) if has_rows else shard.replica_id,
    )
    # All logical devices of a replica hold the same data.
    return shards[:: max(len(array.sharding.device_set) // num_replicas, 1)]


class Mirrored(DistributedValues):
    """One array that is replicated over the replicas' devices.

    Attributes:
      num_replicas: The number of replicas R.
    """

    __slots__ = ("__weakref__", "_array", "is_ours", "is_shared", "num_replicas")

    def __init__(self, array: Any, num_replicas: int, is_ours: bool = False):
        self._array = array
        self.num_replicas = num_replicas
        self.is_ours = is_ours
        self.is_shared = False

    @property
    def array(self) -> Any:
        """The array [...], replicated over the devices. It will not be donated from now on."""
        self.is_shared = True
        return self.stored

    @property
    @called_often
    def stored(self) -> Any:
        """The array, for internal callers that do not keep it."""
        if self._array is None:
            raise _donated("Mirrored")
        return self._array

    def donate(self) -> None:
        """Drops the array, because a program owns its buffer now."""
        self._array = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    @property
    def ndim(self) -> int:
        return self.stored.ndim

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def values(self) -> tuple[Any, ...]:
        array = self.array
        self.is_shared = True
        if not _is_on_replicas(array, self.num_replicas):
            return (array,) * self.num_replicas
        return tuple(shard.data for shard in shards_of_replicas(array, self.num_replicas, has_rows=False))

    def as_array(self) -> Any:
        self.is_shared = True
        return self.array

    def _repr_html_(self) -> str:
        about: dict[str, object] = {"replicas": self.num_replicas}
        if self._array is None:
            about["value"] = "was given to a program (donate_args)"
        else:
            about |= {"array": f"{self.dtype}{list(self.shape)}, whole on every replica's device"}
            about["value"] = shown_value(self._array)
        return html.page("Mirrored", html.facts(about))

    def __repr__(self) -> str:
        return f"Mirrored({self._array!r})" if self._array is not None else "Mirrored(<donated>)"


def _donated(kind: str) -> DonatedError:
    return DonatedError(
        f"This {kind} value was given to a program (RunOptions(donate_args=…)) and its memory is in use for "
        f"the program's results. Use what `run` returned instead, or do not donate this argument."
    )


def cut(array: Any, shape: Sequence[int]) -> Any:
    """Returns the leading corner of a padded array."""
    if tuple(array.shape) == tuple(shape):
        return array
    return array[tuple(slice(0, size) for size in shape)]


def pad(array: Any, shape: Sequence[int]) -> Any:
    """Returns ``array`` padded with zeros up to ``shape``. A NumPy array stays one."""
    if tuple(array.shape) == tuple(shape):
        return array
    widths = [(0, want - have) for have, want in zip(array.shape, shape, strict=True)]
    jnp_or_np = np if isinstance(array, np.ndarray) else jnp
    return jax_compat.on_words(
        lambda words: jnp_or_np.pad(words, [*widths, *[(0, 0)] * (words.ndim - array.ndim)]), array
    )


def largest_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the smallest shape that all of ``shapes`` (of one rank) fit in."""
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


@final
class Results:
    """Converts the arrays that a program returns into the results of ``run``.

    Args:
      tree: The structure that the function returned.
      leaves: For each leaf: True if it is an array; its shapes by replica, or the Python value; True if it is the same
        on all replicas; the maker of the value, for warnings of state that drifts apart.
    """

    def __init__(self, num_replicas: int, tree: Any, leaves: Sequence[tuple[bool, Any, bool, Any]]):
        self._num_replicas, self._tree, self._leaves = num_replicas, tree, leaves

    def wrap(self, arrays: Sequence[Any]) -> Any:
        """Returns the results of a call."""
        remaining = iter(arrays)
        num_replicas = self._num_replicas
        if num_replicas == 1:
            leaves = [next(remaining) if is_array else value for is_array, value, _, _ in self._leaves]
        else:
            leaves = [
                PerReplica(next(remaining), num_replicas, value, is_equal, True, maker) if is_array else value
                for is_array, value, is_equal, maker in self._leaves
            ]
        return jax.tree_util.tree_unflatten(self._tree, leaves)


def per_replica_from_components(
    topology: Topology, components: Sequence[Any], shapes: tuple[tuple[int, ...], ...] | None = None
) -> PerReplica:
    """Places one host or device array per replica of this process, or in a trace one per replica of all processes.

    Shapes may differ, but ranks and dtypes may not. All processes must call it.

    Args:
      shapes: The shapes of all R components, if they are known; else the processes exchange them.
    """
    arrays = [np.asarray(c) if not isinstance(c, jax.Array) else c for c in components]
    if shapes is None:
        shapes = tuple(tuple(a.shape) for a in arrays)
        if topology.peers is not None and len(arrays) < topology.num_replicas:
            found = topology.peers.gather("shapes", shapes, "to make a per-replica value")
            shapes = tuple(tuple(shape) for part in found for shape in part)
    padded = largest_shape(shapes)
    array = topology.join_rows([pad(a, padded)[None] for a in arrays], padded)
    return PerReplica(array, topology.num_replicas, shapes if len(set(shapes)) > 1 else None)


def per_replica_stack(components: Sequence[Any]) -> PerReplica:
    """Returns a per-replica value with one array per replica, stacked on the host or in the current trace."""
    shapes = tuple(tuple(part.shape) for part in components)
    padded = largest_shape(shapes)
    stack = np.stack if isinstance(components[0], np.ndarray) else jnp.stack
    rows = stack([pad(part, padded) for part in components])
    return PerReplica(rows, len(components), shapes if len(set(shapes)) > 1 else None)


@final
class LocalViews:
    """Replicated results, each with its *view*: the array on one device that the caller got in its place.

    If a view comes back unchanged as an argument, the result takes its place, so that nothing is copied to the other
    devices. Results live until their owners get others, or one of them ends.
    """

    def __init__(self) -> None:
        self._results: dict[int, tuple[Any, Any]] = {}
        self._owned: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], list[int]]] = {}

    def views_of(self, owners: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Returns the views of results, in place of those that the owners got before. Other values stay as they are."""
        views, numbers = [], []
        for result in results:
            view = result
            if isinstance(result, PerReplica):
                whole = result.stored
                view = result.as_array() if not whole.is_fully_replicated else whole.addressable_data(0)
                self._results[id(view)] = view, whole
                numbers.append(id(view))
            views.append(view)
        group = tuple(map(id, owners))
        self._drop(group, set(numbers))
        self._owned[group] = [weakref.ref(owner, lambda _: self._drop(group)) for owner in owners], numbers
        return views

    def result_of(self, view: Any, sharding: Any) -> Any:
        """Returns the result of a view, or None if there is none of this sharding."""
        known = self._results.get(id(view))
        if known is None or known[0] is not view or view.is_deleted():
            return None
        return known[1] if known[1].sharding == sharding else None

    def _drop(self, owners: tuple[int, ...], kept: Collection[int] = ()) -> None:
        for number in self._owned.pop(owners, ([], ()))[1]:
            if number not in kept:
                self._results.pop(number, None)


local_views = LocalViews()


def is_distributed(value: Any) -> bool:
    """Returns True if a value is a DistributedValues."""
    return isinstance(value, DistributedValues)


def is_value(value: Any) -> bool:
    """Returns True if a value is a DistributedValues or a variable, which are leaves of pytrees."""
    return isinstance(value, DistributedValues) or is_variable(value)


def _array_of(value: PerReplica | Mirrored) -> tuple[jax.Array]:
    """Returns the child of a value as a pytree. Code that flattens it may keep the array: ``array``, not ``stored``.

    Raises:
      UnknownAxisError: A collective of JAX gets the value, which exists outside of replica functions only.
    """
    if jax_compat.is_in_collective():
        raise UnknownAxisError(
            f"At {user_line()} a collective of JAX is called with a {type(value).__name__} value, outside of the functions "
            "that strategy.run runs, where the axis of the replicas does not exist. Write strategy.reduce('SUM', value, "
            "axis=None), or 'MEAN'; or call the collective in the function."
        )
    return (value.array,)


jax.tree_util.register_pytree_node(
    PerReplica,
    lambda v: (_array_of(v), (v.num_replicas, v.shapes, v.is_equal)),
    lambda aux, children: PerReplica(children[0], *aux),
)
jax.tree_util.register_pytree_node(
    Mirrored, lambda v: (_array_of(v), v.num_replicas), lambda aux, children: Mirrored(children[0], aux)
)
