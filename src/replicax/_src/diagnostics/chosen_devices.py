"""Refuses code that chooses devices itself (``jax.pmap``, ``jax.shard_map``, shardings) in the programs of a strategy.

XLA would fail on such programs, and its errors name its own operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax

from replicax._src.devices.topology import REPLICA_AXIS, Topology, is_replica_mesh
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import inner_jaxprs
from replicax._src.user.user_code import UNKNOWN, user_line
from replicax._src.vocabulary.errors import TransformationError


def _shardings_of_jit(params: Mapping[str, Any]) -> list[Any]:
    return [*params.get("in_shardings", ()), *params.get("out_shardings", ())]


_WRITE: Final = {
    "jax.pmap": "Call the inner function with the rows of this replica; for several parts of them use jax.vmap.",
    "jax.shard_map": "Call the inner function with the rows of this replica; its sums are jax.lax.psum(x, "
    f"{REPLICA_AXIS!r}) or rx.get_replica_context().all_reduce('SUM', x).",
    "jax.jit with shardings": "Leave in_shardings, out_shardings and device out; jax.jit without them works.",
    "jax.lax.with_sharding_constraint": "Leave the constraint out.",
    "jax.device_put with a sharding": "Leave it out; outside, strategy.replicate(value) puts a value on all devices.",
}
_CHOOSING: Final[Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Sequence[Any]]]]] = {
    "shard_map": ("jax.shard_map", lambda params: [params["mesh"]]),
    "sharding_constraint": ("jax.lax.with_sharding_constraint", lambda params: [params["sharding"]]),
    "jit": ("jax.jit with shardings", _shardings_of_jit),
    "device_put": ("jax.device_put with a sharding", lambda params: params["devices"]),
}


@final
@dataclass(frozen=True)
class _Choice:
    """An operation that chooses devices.

    Attributes:
      name: Its name in user code.
      line: The user's line.
      place: The sharding or mesh.
      axes: The names of the mesh's axes that it uses.
    """

    name: str
    line: str
    place: Any
    axes: frozenset[str]

    @property
    def mesh(self) -> Any:
        return getattr(self.place, "mesh", self.place)

    @property
    def devices(self) -> set[Any] | None:
        """The devices; None if an abstract mesh names none."""
        if isinstance(self.mesh, jax.sharding.AbstractMesh):
            return None
        if isinstance(self.mesh, jax.sharding.Mesh):
            return set(self.mesh.devices.flat)
        return set(self.place.device_set)

    @property
    def is_within_replica(self) -> bool:
        """True if it only divides the devices of one replica."""
        is_mesh = isinstance(self.mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh)
        return is_mesh and is_replica_mesh(self.mesh) and REPLICA_AXIS not in self.axes


def check_no_mesh_around() -> None:
    """Raises if ``jax.set_mesh`` has chosen a mesh for all programs, in which that of a strategy cannot run.

    Raises:
      TransformationError: It has.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and not is_replica_mesh(mesh):
        raise TransformationError(
            f"strategy.run was called at {user_line()} under jax.set_mesh, with a mesh of the axes "
            f"{', '.join(mesh.axis_names)}: its program needs the strategy's own mesh. Call it outside of "
            "`with jax.set_mesh(...)`, or give the mesh to the other code itself (jax.shard_map(..., mesh=mesh), "
            "NamedSharding(mesh, spec))."
        )


def check_replica_chooses_none(jaxpr: Any) -> None:
    """Raises if a replica function chooses devices other than those of its replica.

    Raises:
      TransformationError: The function uses ``jax.pmap``, ``jax.shard_map`` or a sharding.
    """
    for choice in _choices(jaxpr):
        if not choice.is_within_replica:
            raise replica_chooses(choice.name, choice.line)


def replica_chooses(name: str, line: str) -> TransformationError:
    """Returns the error for a replica function that chooses devices by the function of JAX of this name."""
    return TransformationError(
        f"At {line} a function that strategy.run runs uses {name}, which chooses devices. The strategy has chosen them: "
        f"each replica runs the function on its own device, with its own rows. {_WRITE[name]}"
    )


def check_same_devices(jaxpr: Any, topology: Topology, program: str) -> None:
    """Raises if a program of this process chooses other devices than those of its topology.

    Args:
      program: The name of its function.

    Raises:
      TransformationError: It does.
    """
    mesh = topology.mesh
    if topology.is_ahead or not isinstance(mesh, jax.sharding.Mesh):
        return
    devices = set(mesh.devices.flat)
    for choice in _choices(jaxpr):
        chosen = choice.devices
        if chosen is not None and chosen != devices:
            raise TransformationError(
                f"At {choice.line} {choice.name} chooses {_shown(chosen)}, and the program of {program} runs on "
                f"{_shown(devices)}: one program has one set of devices. Choose the devices of the strategy, or call the code "
                "outside, under jax.jit. Code for each replica needs no choice: pass it to strategy.run."
            )


def _choices(jaxpr: Any, line: str = UNKNOWN) -> Iterator[_Choice]:
    """Yields the operations that choose devices, at any depth; ``line`` is that of the call around them."""
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        own = jax_compat.equation_line(eqn) if name in _CHOOSING or params.get("jaxpr") is not None else line
        own = line if own == UNKNOWN else own
        if name == "shard_map":
            called = "jax.pmap" if jax_compat.is_pmap(eqn) else "jax.shard_map"
            yield _Choice(called, own, params["mesh"], jax_compat.axes_of_shard_map(eqn))
        elif name in _CHOOSING:
            called, places = _CHOOSING[name]
            for place in places(params):
                # To put a value on one device has no effect in a program.
                if isinstance(place, jax.sharding.Sharding) and (
                    name != "device_put" or place.num_devices > 1
                ):
                    yield _Choice(called, own, place, _axes_of(place))
        for inner in inner_jaxprs(eqn):
            yield from _choices(inner, own)


def _axes_of(sharding: Any) -> frozenset[str]:
    spec = getattr(sharding, "spec", ())
    return frozenset(name for dim in spec for name in (dim if isinstance(dim, tuple) else (dim,)))


def _shown(devices: Collection[Any]) -> str:
    return ", ".join(
        f"{device.platform}:{device.id}" for device in sorted(devices, key=lambda device: device.id)
    )
