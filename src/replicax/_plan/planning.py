"""``Strategy.plan``: compiles the program of a step for hardware, and collects the facts of it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from replicax._plan.compilation import Compilation, argument_bytes, bytes_on_device, compiled_for
from replicax._plan.costs import Costs, costs_of
from replicax._plan.hlo import read_hlo
from replicax._plan.printed_plan import answer, outcome
from replicax._plan.remedies import Attempt, PlanChange, Search, notes_of_whole_arguments
from replicax._plan.roofline import bounds_of, memory_traffic
from replicax._src.cluster.progress import working
from replicax._src.devices.ahead_of_time import topology_ahead
from replicax._src.devices.hardware import Chip, Hardware, chips, hardware_of, this_machine
from replicax._src.devices.plan import Plan, PlannedArray
from replicax._src.devices.topology import Topology
from replicax._src.drawing.text import size
from replicax._src.strategies.lower_method import (
    NamedArray,
    StepProgram,
    StepToLower,
    check,
    own_devices,
    program_on,
)
from replicax._src.strategies.strategy import Strategy
from replicax._src.variables.state_shards import StateShards
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError
from replicax._src.vocabulary.options import ShardState, whole_number

Tell = Callable[[str, Plan | None], None]


def plan_of(
    strategy: Strategy,
    step: StepToLower,
    topology: str | None,
    remedy_limit_s: float,
    tell: Tell = lambda text, plan: None,
) -> Plan:
    """Returns the plan of a step; see ``Strategy.plan``.

    Args:
      tell: Called with a progress text, and with the plan when it exists. Remedies come afterwards.
    """
    check(strategy, step)
    _check(step.global_batch, remedy_limit_s)
    if topology is None:
        devices = own_devices(strategy)
        hardware = _own_hardware(list(devices.grid.flat))
    else:
        hardware = hardware_of(topology)
        devices = topology_ahead(hardware, strategy.num_logical_devices)
    planning = _Planning(strategy, step, hardware, devices, tell)
    what = f"{step.name.rpartition('<locals>.')[2]} for {hardware.name}"
    with working(f"planning {what}", f"planned {what}"):
        plan = planning.plan()
        tell(answer(plan), plan)
        return plan if plan.fits else planning.with_remedies(plan, remedy_limit_s)


def _check(rows: Any, limit: Any) -> None:
    if rows is not None:
        whole_number("global_batch", rows, least=1)
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit >= 0:
        raise InvalidArgumentError(f"remedy_limit_s must be a number of seconds, at least 0, got {limit!r}.")


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


@final
@dataclass(frozen=True)
class _Planning:
    """A step to plan, possibly several times with changes."""

    strategy: Strategy
    step: StepToLower
    hardware: Hardware
    topology: Topology
    tell: Tell

    def plan(self) -> Plan:
        """Compiles the step as requested."""
        start = time.monotonic()
        with self._placed(self.step, self.topology, None) as (program, shard_size):
            trace_s = time.monotonic() - start
            arguments = size(argument_bytes(program))
            self.tell(
                f"traced in {trace_s:.1f} s, {arguments} of arguments on a device; compiling for {self.hardware.name}",
                None,
            )
            compilation = compiled_for(self.hardware, program)
        plan = _assembled(program, compilation, self.hardware, self.topology, trace_s)
        notes = [
            *plan.notes,
            *_notes_of_rows(self.step.global_batch, self.strategy.num_replicas_in_sync, plan),
        ]
        return dataclasses.replace(plan, shard_size=shard_size, notes=notes)

    def with_remedies(self, plan: Plan, limit_s: float) -> Plan:
        """Returns a plan that does not fit, together with the changes that would make it fit."""
        end = time.monotonic() + limit_s
        may_divide = self.topology.num_replicas > 1
        search = Search(plan, self._attempt, may_divide=may_divide, time_left=lambda: end - time.monotonic())
        found, notes = [], [*plan.notes, *notes_of_whole_arguments(plan)]
        try:
            for remedy in search.remedies():
                found.append(remedy)
                self.tell(f"{remedy.change}: {outcome(remedy)}", None)
        except ReplicaxError as error:
            # The plan itself is valid. For example, a dataset that yields only one batch cannot be planned twice.
            notes.append(f"Further remedies could not be computed: {error}")
        return dataclasses.replace(plan, remedies=found, notes=notes)

    def _attempt(self, change: PlanChange, below: float) -> Attempt:
        """Plans the step with a change. Compiles it if its arguments fit and have fewer bytes than ``below``."""
        hardware, memory = change.hardware, None
        topology = self.topology
        if hardware != self.hardware:
            topology = topology_ahead(hardware, self.topology.num_logical_devices)
        step = dataclasses.replace(self.step, global_batch=change.global_batch)
        with self._placed(step, topology, change.shard_state) as (program, shard_size):
            arguments = argument_bytes(program)
            if arguments < below and arguments <= hardware.chip.memory_bytes:
                memory = compiled_for(hardware, program).memory
        limit = memory.limit if memory else hardware.chip.memory_bytes
        peak = memory.peak if memory else None
        return Attempt(topology.num_replicas, program.rows, shard_size, arguments, peak, limit)

    @contextlib.contextmanager
    def _placed(
        self, step: StepToLower, topology: Topology, state: ShardState | None
    ) -> Iterator[tuple[StepProgram, int | None]]:
        """Yields the program, and the number of replicas that shard its state (by ``state``, or as the strategy
        does).
        """
        if state is None:
            shards = self.strategy.shards_on(topology)
        else:
            shards = StateShards.of(state, None, topology.num_replicas)
        with program_on(self.strategy.view_on(topology, shards), step) as program:
            yield program, shards.num_shards if shards else None


def _assembled(
    program: StepProgram,
    compilation: Compilation,
    hardware: Hardware,
    topology: Topology,
    trace_s: float,
) -> Plan:
    domain_size, num_logical = hardware.domain_size, topology.num_logical_devices
    costs = costs_of(
        compilation.jaxpr,
        hardware.num_devices,
        is_split=program.is_split,
        domain_size=domain_size,
        num_logical_devices=num_logical,
    )
    mesh = dict(topology.mesh.shape) if num_logical > 1 else None
    compiled = read_hlo(compilation.text, hardware.num_devices, domain_size, mesh)
    # Over logical devices the compiler splits values and adds the collectives.
    collectives = compiled.collectives if mesh else costs.collectives or compiled.collectives
    traffic = memory_traffic(compilation.memory, costs.matrix_bytes)
    return Plan(
        name=program.name,
        hardware=hardware,
        num_replicas=topology.num_replicas,
        rows=program.rows,
        memory=compilation.memory,
        arrays=[_planned(array) for array in (*program.arrays, *_constants(program))],
        flops=costs.flops,
        requested=costs.collectives,
        compiled=compiled.collectives,
        bounds=bounds_of(hardware, costs.flops, traffic, collectives),
        estimated_cycles=compiled.cycles,
        seconds={"tracing": trace_s, "lowering": compilation.lower_s, "compiling": compilation.compile_s},
        notes=[*_notes(costs), *_notes_of_logical_devices(topology)],
        num_logical_devices=num_logical,
    )


def _constants(program: StepProgram) -> list[NamedArray]:
    """Returns the arrays that the step closes over."""
    leaves = jax.tree_util.tree_leaves(program.operands[2])
    return [NamedArray("argument", f"constant {i}", leaf) for i, leaf in enumerate(leaves)]


def _planned(array: NamedArray) -> PlannedArray:
    """Returns one array with its placement."""
    described = array.value
    spec = tuple(described.sharding.spec) if described.sharding is not None else ()
    axes = ["+".join(axis) if isinstance(axis, tuple) else axis for axis in spec]
    split = (*axes, *[None] * (len(described.shape) - len(spec)))
    shape = tuple(described.shape)
    of_device = described.sharding.shard_shape(shape) if described.sharding is not None else shape
    pieces = tuple(-(-whole // part) if part else 1 for whole, part in zip(shape, of_device, strict=True))
    return PlannedArray(
        array.role,
        array.name,
        shape,
        str(described.dtype),
        bytes_on_device(described),
        split,
        array.is_written,
        pieces,
    )


def _notes(costs: Costs) -> list[str]:
    if not costs.has_open_loops:
        return []
    return ["It has loops whose length is known only when they run: their operations are counted once."]


def _notes_of_rows(asked: int | None, num_replicas_here: int, plan: Plan) -> Iterator[str]:
    if plan.rows is None:
        return
    if asked is None and plan.num_replicas != num_replicas_here:
        yield (
            f"Each of the {plan.num_replicas:,} replicas has {plan.rows:,} rows, as each of the {num_replicas_here:,} here: "
            f"{plan.global_batch:,} in all. Set global_batch for another batch."
        )
    if asked is not None and asked != plan.global_batch:
        yield (
            f"A global batch of {asked:,} rows does not divide by {plan.num_replicas:,} replicas: the plan uses "
            f"{plan.rows:,} rows for each, the number of the largest replica batches."
        )


def _notes_of_logical_devices(topology: Topology) -> Iterator[str]:
    count = topology.num_logical_devices
    if count == 1:
        return
    yield (
        f"Multiplications, and their memory traffic, are counted as if the compiler split all of them over the {count} "
        "logical devices of a replica. Each device computes in full the operations that are not split. The requested "
        "collectives are those of the full replica."
    )
    hosts = max(len({device.process_index for device in replica}) for replica in topology.grid)
    if hosts > 1:
        yield (
            f"A replica has devices of {hosts} hosts here, but all devices of a replica must be in one process. Use "
            "fewer devices for each replica."
        )
