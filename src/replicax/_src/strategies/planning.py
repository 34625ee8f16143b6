"""``Strategy.plan``: a step placed on hardware that it is planned for, compiled, and what is known of it then."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from replicax._src import context
from replicax._src.errors import InvalidArgumentError, ReplicaxError, UnsupportedError
from replicax._src.frameworks.framework import frameworks_in_use
from replicax._src.options import RunOptions, ShardState
from replicax._src.placement.ahead import Compilation, bytes_on_device, compile_ahead, topology_ahead
from replicax._src.plan.costs import Costs, costs_of
from replicax._src.plan.hardware import Chip, Hardware, chips, hardware_of, this_machine
from replicax._src.plan.hlo import read_hlo
from replicax._src.plan.plan import Plan, PlannedArray, bounds_of, memory_traffic
from replicax._src.plan.remedies import Attempt, Change, Search, notes_of_whole_arguments
from replicax._src.plan.report import answer, outcome, size
from replicax._src.program import key
from replicax._src.program.arguments import as_arguments
from replicax._src.program.capture import planning
from replicax._src.program.slots import Slot
from replicax._src.progress import working
from replicax._src.topology import Topology
from replicax._src.values import Mirrored, PerReplica, is_value, largest_shape
from replicax._src.variables.state_layouts import StateLayouts
from replicax._src.variables.state_shards import StateShards

# Arrays that stand for the components of a single replica, by id: what distributed datasets yield there are plain arrays.
components_of_one: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class PlanRequest:
    """What is asked of a plan; see ``Strategy.plan``.

    Attributes:
      remedy_limit_s: For how long something is compiled that would make it fit.
      tell: Called with what the plan has come to: in words, and the plan when there is one. Remedies come afterwards.
      num_replicas_here: R of the strategy as it is, for which the arguments are.
      shard_state: What replicas divide in place of what the strategy says; None: what it says.
    """

    topology: str | None = None
    global_batch: int | None = None
    options: RunOptions = dataclasses.field(default_factory=RunOptions)
    remedy_limit_s: float = 120.0
    tell: Callable[[str, Plan | None], None] = lambda text, plan: None
    num_replicas_here: int = 1
    shard_state: ShardState | None = None


@dataclass
class Unrun:
    """A program that is placed, and not run.

    Attributes:
      name: Of the function, for people.
      compiled: As ``jax.jit`` gave it.
      operands: What it takes, described: the variables that it writes, and reads, its constants, then the arguments.
      arrays: Its variables and arguments, and where they are.
      rows: Of a replica's batch; None where no argument is split.
      is_split: It is the program of all replicas together, which the partitioner splits.
    """

    name: str
    compiled: Any
    operands: Sequence[Any]
    arrays: Sequence[PlannedArray]
    rows: int | None
    is_split: bool = False


class PlannableFunction(abc.ABC):
    """A function of replicax that is no replica function, and places itself for a plan."""

    @abc.abstractmethod
    def place_for_plan(
        self, strategy: Any, args: Sequence[Any], kwargs: dict[str, Any], request: PlanRequest
    ) -> Unrun:
        """Places a call; nothing is run."""


def plan_of(
    strategy: Any, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], request: PlanRequest
) -> Plan:
    """The plan of a step; see ``Strategy.plan``."""
    _check(strategy, fn, args, kwargs, request)
    request = dataclasses.replace(request, num_replicas_here=strategy.num_replicas_in_sync)
    hardware, topology = _target(strategy, request.topology)
    step = _Step(strategy, fn, args, dict(kwargs), request, hardware, topology)
    what = f"{key.name_of(fn).rpartition('<locals>.')[2]} for {hardware.name}"
    with working(f"planning {what}", f"planned {what}"):
        plan = step.plan()
        request.tell(answer(plan), plan)
        return plan if plan.fits else _with_remedies(plan, step)


def _check(strategy: Any, fn: Any, args: Any, kwargs: Any, request: PlanRequest) -> None:
    if not callable(fn):
        raise InvalidArgumentError(f"strategy.plan needs a function, got {fn!r}.")
    if not isinstance(args, (list, tuple)):
        raise InvalidArgumentError(
            f"strategy.plan takes args as a list or tuple, got {type(args)}. For one argument write (argument,)."
        )
    if not isinstance(kwargs, Mapping):
        raise InvalidArgumentError(
            f"kwargs must be a dict of keyword arguments, got {kwargs!r}. The hardware is said by name: topology='v5p:16x16x16'."
        )
    if not isinstance(request.options, RunOptions):
        raise InvalidArgumentError(f"options must be an rx.RunOptions, got {request.options!r}.")
    if any(not -len(args) <= i < len(args) for i in request.options.donate_args):
        raise InvalidArgumentError(
            f"RunOptions(donate_args={request.options.donate_args}) names positions in args, of which there are {len(args)}. Give "
            "those of the arguments that the program may overwrite."
        )
    rows = request.global_batch
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise InvalidArgumentError(f"global_batch is a number of rows of at least 1, got {rows!r}.")
    limit = request.remedy_limit_s
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit >= 0:
        raise InvalidArgumentError(f"remedy_limit_s is a number of seconds, 0 or more, got {limit!r}.")
    placement = strategy.variable_placement
    if strategy.has_servers or getattr(placement, "parameter_device", None) is not None:
        raise UnsupportedError(
            f"{type(strategy).__name__} keeps its variables elsewhere than on the replicas' devices, and a plan is of these. "
            "Plan the step with rx.MirroredStrategy."
        )


# --- where ----------------------------------------------------------------------------------------------


def _target(strategy: Any, name: str | None) -> tuple[Hardware, Topology]:
    """The hardware to plan for, and its devices as a topology on which arrays are only described."""
    if name is not None:
        hardware = hardware_of(name)
        return hardware, topology_ahead(hardware, strategy.num_logical_devices)
    own = strategy.topology
    return _own_hardware(list(own.grid.flat)), Topology.of_mesh(own.mesh, is_ahead=True)


def _own_hardware(devices: Sequence[Any]) -> Hardware:
    first, count = devices[0], len(devices)
    if first.platform == "cpu":
        return Hardware(f"cpu:{count}", this_machine(count), (count,))
    kind = first.device_kind
    known = next((chip for chip in chips().values() if kind in chip.device_kinds), None)
    limit = (first.memory_stats() or {}).get("bytes_limit", 0)
    chip = known or Chip(first.platform, first.platform, kind, {}, limit)
    hosts = len({device.process_index for device in devices})
    shape = hosts, count // hosts // chip.devices_per_chip
    return Hardware(f"{chip.key}:{shape[0]}x{shape[1]}", chip, shape)


def _layouts(strategy: Any, topology: Topology, state: ShardState | None) -> StateLayouts | None:
    """How variables lie over the devices: as the strategy says, or as a remedy would have it."""
    if state is None:
        return strategy.layouts_on(topology)
    shards = StateShards.of(state, None, topology.num_replicas)
    return shards and StateLayouts(shards, topology)


@contextlib.contextmanager
def _placed_on(strategy: Any, topology: Topology, layouts: StateLayouts | None) -> Iterator[None]:
    """Inside, the strategy has the devices of a plan, and variables without values are taken as they will be."""
    token = planning.set(True)
    try:
        with context.standing_in(strategy, strategy.parts_on(topology, layouts)):
            yield
    finally:
        planning.reset(token)


# --- what -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """The arguments of a step on other devices than they are for.

    Attributes:
      rows: Of a replica's batch; None where no argument is split.
      topology: The devices.
    """

    args: Sequence[Any]
    kwargs: dict[str, Any]
    rows: int | None
    topology: Topology

    @property
    def arrays(self) -> list[PlannedArray]:
        """Those that are on the devices, under their names."""
        leaves, _ = jax.tree_util.tree_flatten_with_path((self.args, self.kwargs), is_leaf=is_value)
        named = [(f"args{jax.tree_util.keystr(path[1:])}", self._stored(leaf)) for path, leaf in leaves]
        return [planned_array("argument", name, stored) for name, stored in named if stored is not None]

    def _stored(self, leaf: Any) -> Any:
        """An argument as it is on the devices; None if it is no array."""
        if isinstance(leaf, (PerReplica, Mirrored)):
            return leaf.stored
        return self.topology.put_whole(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else None


def arguments_on(
    topology: Topology, args: Sequence[Any], kwargs: Mapping[str, Any], global_batch: int | None
) -> Arguments:
    """Describes arguments as the planned devices have them: as many rows for each replica, or those of a global
    batch.
    """
    leaves, tree = jax.tree_util.tree_flatten((tuple(args), dict(kwargs)), is_leaf=is_value)
    leaves = as_arguments(leaves, tree)
    components = [_component(leaf) for leaf in leaves]
    have = next((shape[0] for shape, _ in filter(None, components) if shape), None)
    rows = have
    if global_batch is not None and have is not None:
        rows = math.ceil(global_batch / topology.num_replicas)
    placed = []
    for leaf, component in zip(leaves, components, strict=True):
        if component is not None:
            shape, dtype = component
            if shape and shape[0] == have:
                shape = (rows, *shape[1:])
            array = jax.ShapeDtypeStruct(
                (topology.num_replicas, *shape), dtype, sharding=topology.per_replica
            )
            placed.append(PerReplica(array, topology.num_replicas))
        elif isinstance(leaf, (Mirrored, PerReplica)):
            placed.append(Mirrored(topology.put_whole(leaf.stored), topology.num_replicas))
        else:
            placed.append(leaf)
    new_args, new_kwargs = jax.tree_util.tree_unflatten(tree, placed)
    return Arguments(new_args, new_kwargs, rows, topology)


def _component(leaf: Any) -> tuple[tuple[int, ...], Any] | None:
    """Shape and dtype of what one replica has of an argument that is split; None for others."""
    if isinstance(leaf, PerReplica) and not leaf.is_equal:
        shapes = leaf.shapes or (leaf.component_shape(0),)
        return tuple(largest_shape(shapes)), leaf.dtype
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return tuple(leaf.shape), leaf.dtype
    of_one = components_of_one.get(id(leaf))
    if of_one is not None and of_one is leaf:
        return tuple(of_one.shape), of_one.dtype
    return None


def on_plan(arrays: Sequence[Any], topology: Topology) -> list[Any]:
    """Arrays as programs over the planned devices take them: described, whole on each where nothing else is said."""
    return [
        a if isinstance(a, jax.ShapeDtypeStruct) and a.sharding is not None else topology.put_whole(a)
        for a in arrays
    ]


def of_slots(written: Sequence[Slot], read: Sequence[Slot], topology: Topology) -> list[PlannedArray]:
    """The variables of a program, and where they are."""
    return [
        planned_array("variable", slot.name, slot.described(topology), is_written=is_written)
        for slots, is_written in ((written, True), (read, False))
        for slot in slots
    ]


def planned_array(role: str, name: str, described: Any, *, is_written: bool = False) -> PlannedArray:
    """One array, and where it is."""
    spec = tuple(described.sharding.spec) if described.sharding is not None else ()
    axes = ["+".join(axis) if isinstance(axis, tuple) else axis for axis in spec]
    split = (*axes, *[None] * (len(described.shape) - len(spec)))
    shape = tuple(described.shape)
    of_device = described.sharding.shard_shape(shape) if described.sharding is not None else shape
    pieces = tuple(-(-whole // part) if part else 1 for whole, part in zip(shape, of_device, strict=True))
    return PlannedArray(
        role,
        name,
        shape,
        str(described.dtype),
        bytes_on_device(described),
        split,
        is_written,
        pieces,
    )


def place_replica_function(
    strategy: Any, fn: Any, args: Sequence[Any], kwargs: dict[str, Any], request: PlanRequest
) -> Unrun:
    """Places what ``strategy.run`` would run."""
    topology = strategy.topology
    given = arguments_on(topology, args, kwargs, request.global_batch)
    placed, arrays = strategy.runner.place(fn, given.args, given.kwargs, request.options)
    launcher = placed.launcher
    operands = launcher.ahead(on_plan(arrays, topology))
    written, read = launcher.state_slots
    variables = of_slots(written, read, topology)
    return Unrun(key.name_of(fn), launcher.compiled, operands, [*variables, *given.arrays], given.rows)


def _placed(
    strategy: Any, fn: Any, args: Sequence[Any], kwargs: dict[str, Any], request: PlanRequest
) -> Unrun:
    if isinstance(fn, PlannableFunction):
        return fn.place_for_plan(strategy, args, kwargs, request)
    for framework in frameworks_in_use():
        place = framework.placer_of(fn)
        if place is not None:
            return place(strategy, args, kwargs, request)
    return place_replica_function(strategy, fn, args, kwargs, request)


# --- the plan -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """What is planned, perhaps again with changes."""

    strategy: Any
    fn: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    request: PlanRequest
    hardware: Hardware
    topology: Topology

    def plan(self) -> Plan:
        """Compiled, as it was asked for."""
        start = time.monotonic()
        with self._placed(self.request, self.topology) as (unrun, shard_size):
            trace_s = time.monotonic() - start
            arguments = size(_argument_bytes(unrun))
            self.request.tell(
                f"traced in {trace_s:.1f} s, {arguments} of arguments on a device; compiling for {self.hardware.name}",
                None,
            )
            compilation = compile_ahead(unrun.compiled, unrun.operands, self.hardware)
        plan = _assembled(unrun, compilation, self.hardware, self.topology, trace_s)
        notes = [*plan.notes, *_notes_of_rows(self.request.global_batch, plan)]
        return dataclasses.replace(plan, shard_size=shard_size, notes=notes)

    def attempt(self, change: Change, below: float) -> Attempt:
        """With a change, and compiled if its arguments fit and have fewer bytes than that."""
        hardware, memory = change.hardware, None
        topology = self.topology
        if hardware != self.hardware:
            topology = topology_ahead(hardware, self.topology.num_logical_devices)
        request = dataclasses.replace(
            self.request, global_batch=change.global_batch, shard_state=change.shard_state
        )
        with self._placed(request, topology) as (unrun, shard_size):
            arguments = _argument_bytes(unrun)
            if arguments < below and arguments <= hardware.chip.memory_bytes:
                memory = compile_ahead(unrun.compiled, unrun.operands, hardware).memory
        limit = memory.limit if memory else hardware.chip.memory_bytes
        peak = memory.peak if memory else None
        return Attempt(topology.num_replicas, unrun.rows, shard_size, arguments, peak, limit)

    @contextlib.contextmanager
    def _placed(self, request: PlanRequest, topology: Topology) -> Iterator[tuple[Unrun, int | None]]:
        """The program, and over how many replicas its state is divided."""
        layouts = _layouts(self.strategy, topology, request.shard_state)
        with _placed_on(self.strategy, topology, layouts):
            unrun = _placed(self.strategy, self.fn, self.args, self.kwargs, request)
            yield unrun, layouts.shards.num_shards if layouts else None


def _argument_bytes(unrun: Unrun) -> int:
    """What a device holds of the arguments, variables among them, from their shapes."""
    return sum(bytes_on_device(leaf) for leaf in jax.tree_util.tree_leaves(unrun.operands))


def _with_remedies(plan: Plan, step: _Step) -> Plan:
    topology = step.topology
    end = time.monotonic() + step.request.remedy_limit_s
    may_divide = topology.num_replicas > 1 and topology.num_logical_devices == 1
    search = Search(plan, step.attempt, may_divide=may_divide, time_left=lambda: end - time.monotonic())
    found, notes = [], [*plan.notes, *notes_of_whole_arguments(plan)]
    try:
        for remedy in search.remedies():
            found.append(remedy)
            step.request.tell(f"{remedy.change}: {outcome(remedy)}", None)
    except ReplicaxError as error:
        # The plan stands. A dataset that gives one batch only cannot be planned a second time, for example.
        notes.append(f"Further remedies could not be computed: {error}")
    return dataclasses.replace(plan, remedies=found, notes=notes)


def _assembled(
    unrun: Unrun,
    compilation: Compilation,
    hardware: Hardware,
    topology: Topology,
    trace_s: float,
) -> Plan:
    domain_size, num_logical = hardware.domain_size, topology.num_logical_devices
    costs = costs_of(
        compilation.jaxpr,
        hardware.num_devices,
        is_split=unrun.is_split,
        domain_size=domain_size,
        num_logical_devices=num_logical,
    )
    mesh = dict(topology.mesh.shape) if num_logical > 1 else None
    compiled = read_hlo(compilation.text, hardware.num_devices, domain_size, mesh)
    # Over logical devices it is the compiler who divides values, and exchanges them.
    collectives = compiled.collectives if mesh else costs.collectives or compiled.collectives
    traffic = memory_traffic(compilation.memory, costs.matrix_bytes)
    return Plan(
        name=unrun.name,
        hardware=hardware,
        num_replicas=topology.num_replicas,
        rows=unrun.rows,
        memory=compilation.memory,
        arrays=[*unrun.arrays, *_constants(unrun)],
        flops=costs.flops,
        requested=costs.collectives,
        compiled=compiled.collectives,
        bounds=bounds_of(hardware, costs.flops, traffic, collectives),
        estimated_cycles=compiled.cycles,
        seconds={"tracing": trace_s, "lowering": compilation.lower_s, "compiling": compilation.compile_s},
        notes=[*_notes(costs), *_notes_of_logical_devices(topology)],
        num_logical_devices=num_logical,
    )


def _constants(unrun: Unrun) -> list[PlannedArray]:
    """The arrays that the step closes over."""
    leaves = jax.tree_util.tree_leaves(unrun.operands[2])
    return [planned_array("argument", f"constant {i}", leaf) for i, leaf in enumerate(leaves)]


def _notes(costs: Costs) -> list[str]:
    if not costs.has_open_loops:
        return []
    return ["It has loops whose length is known only when they run: their operations are counted once."]


def _notes_of_rows(asked: int | None, plan: Plan) -> Iterator[str]:
    if asked is not None and plan.rows is not None and asked != plan.global_batch:
        yield (
            f"A global batch of {asked:,} rows does not divide by {plan.num_replicas:,} replicas: the plan is of {plan.rows:,} for "
            "each, which is what those with the most have."
        )


def _notes_of_logical_devices(topology: Topology) -> Iterator[str]:
    count = topology.num_logical_devices
    if count == 1:
        return
    yield (
        f"Multiplications, and their memory traffic, are counted as if the compiler divided all of them over the {count} logical "
        "devices of a replica: what nothing divides each of them computes. What the program asks for is of the whole replica."
    )
    hosts = max(len({device.process_index for device in replica}) for replica in topology.grid)
    if hosts > 1:
        yield (
            f"A replica has devices of {hosts} hosts here. TPUStrategy needs them in one process: use a device assignment with fewer "
            "devices for each replica."
        )
