"""Collectives between replicas that run one after the other in threads of one process.

They are JAX primitives that Python evaluates, so that ``jax.grad`` and tapes go through them; inside functions
that JAX compiles they cannot work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src import jax_compat
from replicax._src.collectives.in_replica import Communicator
from replicax._src.collectives.meeting import Meeting
from replicax._src.errors import ReductionError, StructureError, UnsupportedError
from replicax._src.options import CommunicationOptions

# Frameworks (Keras) that keep a replica's state where all threads reach it add a function here. It is called before a
# replica waits for others, and returns what restores that state.
kept_states: list[Callable[[], Callable[[], None]]] = []


@dataclass(frozen=True, eq=False)
class HostKeys:
    """Typed random keys, brought to the host."""

    data: np.ndarray
    impl: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape[:-1]

    @property
    def dtype(self) -> Any:
        return self.impl

    def __getitem__(self, index: Any) -> HostKeys:
        return HostKeys(self.data[index], self.impl)


def to_host(array: Any) -> Any:
    """A copy of an array on the host, typed random keys included."""
    if isinstance(array, jax.Array) and jax_compat.is_typed_key(array.dtype):
        return HostKeys(np.array(jax.random.key_data(array)), jax.random.key_impl(array))
    return np.array(array)


def from_host(host: Any) -> jax.Array:
    """A copy on this thread's default device, bound to no device, so that it mixes with all others."""
    if isinstance(host, HostKeys):
        return jax.random.wrap_key_data(jnp.array(host.data), impl=host.impl)
    return jnp.array(host)


def host_bytes(host: Any) -> bytes:
    """The bits of an array on the host."""
    return (host.data if isinstance(host, HostKeys) else host).tobytes()


@final
class EagerCommunicator(Communicator):
    """The collectives of one replica of a ``Meeting``.

    Args:
      replica_id: Index of the replica.
      index: The same as an array, as replica functions see it.
    """

    def __init__(self, meeting: Meeting, replica_id: int, index: jax.Array):
        self._meeting = meeting
        self._replica_id = replica_id
        self._index = index
        self._is_counting = True

    @property
    def num_replicas(self) -> int:
        return self._meeting.num_replicas

    def replica_id(self) -> jax.Array:
        return self._index

    def sum(self, values: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        del options
        arrays = [jnp.asarray(v) for v in values]
        results = list(arrays)
        floating = [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.inexact)]
        others = [i for i in range(len(arrays)) if i not in floating]
        for chosen in (floating, others):
            if chosen and self.num_replicas > 1:
                totals = _sum_p.bind(*[arrays[i] for i in chosen], communicator=self, is_derivative=False)
                for i, total in zip(chosen, totals, strict=True):
                    results[i] = total
        return results

    def components(self, value: Any) -> list[Any]:
        value = jnp.asarray(value)
        if self.num_replicas == 1:
            return [value]
        shapes = self.agree("the shapes of a gathered array", tuple(value.shape))
        if len({len(shape) for shape in shapes}) > 1:
            raise ReductionError(f"Replicas hold arrays of different ranks: shapes {shapes}.")
        return list(_components_p.bind(value, communicator=self, shapes=tuple(shapes), is_derivative=False))

    def agree(self, what: str, value: Any, is_collective: bool = False) -> list[Any]:
        """All replicas' values of something that is no array."""
        restore_all = [keep() for keep in kept_states]
        values = self._meeting.exchange(self._replica_id, what, value, is_collective and self._is_counting)
        for restore in restore_all:
            restore()
        return values

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What replicas do inside is part of one collective, for who counts them."""
        was_counting, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = was_counting

    # --- evaluation -----------------------------------------------------------------------------------

    def meet_and_sum(self, *values: Any, is_derivative: bool) -> list[Any]:
        what = "the gradient of a sum over replicas" if is_derivative else "a sum over replicas"
        met = self.agree(what, [to_host(v) for v in values], is_collective=True)
        return [from_host(_total([given[i] for given in met])) for i in _positions(met)]

    def meet_and_gather(self, value: Any, *, shapes: Any, is_derivative: bool) -> list[Any]:
        del shapes
        what = "the gradient of a gathering" if is_derivative else "a gathering"
        return [from_host(v) for v in self.agree(what, to_host(value), is_collective=True)]

    def meet_and_scatter(self, *parts: Any, shapes: Any, is_derivative: bool) -> list[Any]:
        del shapes, is_derivative
        what = "the gradient of a gathering"
        met = self.agree(what, [to_host(p) for p in parts], is_collective=True)
        return [from_host(_total([given[self._replica_id] for given in met]))]

    def own_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Of the shapes of all replicas' arrays, that of this replica's."""
        return shapes[self._replica_id]


def _positions(met: Sequence[Sequence[Any]]) -> range:
    counts = [len(given) for given in met]
    if len(set(counts)) > 1:
        raise StructureError(f"The replicas sum different numbers of arrays over replicas: {counts}.")
    return range(counts[0])


def _total(values: Sequence[Any]) -> np.ndarray:
    kinds = [(v.shape, v.dtype) for v in values]
    if any(kind != kinds[0] for kind in kinds):
        raise StructureError(
            f"The replicas sum arrays that are not alike: {', '.join(f'{d}{list(s)}' for s, d in kinds)}. Replicas can "
            f"only sum arrays of equal shapes: reduce over the batch first (for example jnp.sum(x, axis=0)), or use "
            f"all_gather, which accepts different sizes."
        )
    return np.asarray(functools.reduce(np.add, values), values[0].dtype)


def _refuse(where: str) -> Exception:
    if where == "vmap":
        return UnsupportedError("A collective between replicas cannot be mapped by jax.vmap with eager=True.")
    return UnsupportedError(
        "With RunOptions(eager=True) replicas cannot meet inside a function that JAX compiles on its own (jax.jit, "
        "lax.scan, lax.cond, …). Move the collective out of it, or enter `with jax.disable_jit():` around run, which "
        "makes these plain Python, or run without eager=True."
    )


def _shaped_like(aval: Any, shape: tuple[int, ...]) -> Any:
    return jax_compat.shaped(shape, aval.dtype)


_sum_p = jax_compat.linear_primitive(
    "replicax_eager_sum",
    lambda *values, communicator, **params: communicator.meet_and_sum(*values, **params),
    lambda *avals, **_: [_shaped_like(a, a.shape) for a in avals],
    lambda *cotangents, communicator, **_: _sum_p.bind(
        *cotangents, communicator=communicator, is_derivative=True
    ),
    _refuse,
)
_components_p = jax_compat.linear_primitive(
    "replicax_eager_components",
    lambda value, *, communicator, **params: communicator.meet_and_gather(value, **params),
    lambda aval, *, shapes, **_: [_shaped_like(aval, shape) for shape in shapes],
    lambda *cotangents, communicator, shapes, **_: _scatter_p.bind(
        *cotangents, communicator=communicator, shapes=shapes, is_derivative=True
    ),
    _refuse,
)
_scatter_p = jax_compat.linear_primitive(
    "replicax_eager_scatter",
    lambda *parts, communicator, **params: communicator.meet_and_scatter(*parts, **params),
    lambda *avals, communicator, shapes, **_: [_shaped_like(avals[0], communicator.own_shape(shapes))],
    lambda cotangent, *, communicator, shapes, **_: _components_p.bind(
        cotangent, communicator=communicator, shapes=shapes, is_derivative=True
    ),
    _refuse,
)
COLLECTIVES = frozenset({"replicax_eager_sum", "replicax_eager_components"})
