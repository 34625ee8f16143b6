"""A plan as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from replicax._plan.substitutes import EXPLAINED
from replicax._src.devices.plan import Bound, Collective, Plan, PlannedArray, Remedy
from replicax._src.drawing.text import aligned, seconds, size

_MAX_ROWS = 20


def text(plan: Plan) -> str:
    """Returns the full report."""
    sections = [_heading(plan), _memory(plan), _arrays(plan), _collectives(plan), _time(plan), _end(plan)]
    return "\n".join(line for section in sections for line in [*section, ""]).rstrip()


def _heading(plan: Plan) -> Iterator[str]:
    chip, logical = plan.hardware.chip, plan.num_logical_devices
    of_each = f" of {logical} logical devices" if logical > 1 else ""
    yield (
        f"{plan.name} on {plan.hardware.name}: {plan.hardware.num_devices:,} × {chip.name}, {plan.num_replicas:,} "
        f"replicas{of_each}"
    )
    if plan.rows is not None:
        yield f"a batch of {plan.rows:,} {'row' if plan.rows == 1 else 'rows'} for each replica, {plan.global_batch:,} in all"
    yield f"{answer(plan)}."
    if plan.state_bytes > plan.memory.limit:
        yield f"  variables and unsplit arguments take {size(plan.state_bytes)} of a device: no batch is small enough"
    for remedy in plan.remedies:
        yield f"  {remedy.change}: {outcome(remedy)}"


def answer(plan: Plan) -> str:
    """Returns whether the program fits, and by how much it is too large."""
    memory = plan.memory
    over = memory.peak - memory.limit
    word, by_how_much = ("It does not fit", f", {size(over)} too much") if over > 0 else ("It fits", "")
    return f"{word}: {size(memory.peak)} of the {size(memory.limit)} of a device{by_how_much}"


def outcome(remedy: Remedy) -> str:
    """Returns whether a change would make the program fit, and how that is known."""
    if remedy.is_compiled:
        return f"{size(remedy.peak)}, which {'fits' if remedy.fits else 'does not fit either'}"
    if remedy.fits is False:
        return f"{size(remedy.peak)} of arguments alone, which do not fit either"
    return f"{size(remedy.peak)} of arguments; there was no time to compile it, so temporaries may not fit"


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    of_variables = sum(a.device_bytes for a in plan.arrays if a.role == "variable")
    of_arguments = sum(a.device_bytes for a in plan.arrays if a.role == "argument")
    yield "memory of a device"
    yield f"  arguments    {size(memory.arguments):>10}  variables {size(of_variables)}, batch and others {size(of_arguments)}"
    if memory.is_exact:
        yield f"  outputs      {size(memory.outputs):>10}  of which {size(memory.donated)} overwrite arguments (donated)"
        yield f"  temporaries  {size(memory.temporaries):>10}"
        yield f"  peak         {size(memory.peak):>10}"
    else:
        yield f"  temporaries  {size(memory.temporaries):>10}  at least; the compiler failed and reported only this"


def _arrays(plan: Plan) -> Iterator[str]:
    largest_first = sorted(plan.arrays, key=lambda a: -a.device_bytes)
    variables = [a for a in largest_first if a.role == "variable"]
    others = [a for a in largest_first if a.role != "variable"]
    lines = iter(_table([_array_row(array) for array in (*variables[:_MAX_ROWS], *others[:_MAX_ROWS])]))
    yield "where the variables and the batch are"
    for arrays, name in ((variables, "variables"), (others, "arguments")):
        yield from itertools.islice(lines, len(arrays[:_MAX_ROWS]))
        if left := arrays[_MAX_ROWS:]:
            yield f"  … and {len(left)} smaller {name}, {size(sum(a.device_bytes for a in left))} together"


def _array_row(array: PlannedArray) -> tuple[str, ...]:
    split = [f"dim {i} over {axis}" for i, axis in enumerate(array.split) if axis]
    where = " and ".join(split) if split else "whole on each device"
    changes = "" if array.role == "argument" else "written" if array.is_written else "read"
    return array.name, f"{array.dtype}{list(array.shape)}", size(array.device_bytes), where, changes


def _collectives(plan: Plan) -> Iterator[str]:
    if plan.requested:
        yield "collectives of a step, as the program asks for them"
        yield from _table(_collective_rows(plan.requested, plan))
    yield "collectives of a step, as compiled"
    if plan.compiled:
        yield from _table(_collective_rows(plan.compiled, plan))
        for kind in sorted({one.stands_for for one in plan.compiled if one.stands_for}):
            yield f"  {EXPLAINED[kind]}"
    else:
        yield "  none" if plan.memory.is_exact else "  unknown: the compiler failed"


def _across(one: Collective, plan: Plan) -> str:
    what = "hosts" if plan.hardware.chip.kind == "gpu" else "slices"
    over = f" over {'+'.join(one.axes)}" if one.axes and plan.num_logical_devices > 1 else ""
    return over + (f" on {one.num_domains:,} {what}" if one.num_domains > 1 else "")


def _collective_rows(found: Sequence[Collective], plan: Plan) -> list[tuple[str, ...]]:
    rows = [
        (
            f"{one.count:,} × {one.kind}" + (f" for {one.stands_for}" if one.stands_for else ""),
            size(one.bytes),
            f"groups of {one.group_size:,}{_across(one, plan)}",
            f"a device sends {size(one.wire_bytes)}",
        )
        for one in found[:_MAX_ROWS]
    ]
    if len(found) > _MAX_ROWS:
        rest = sum(one.wire_bytes for one in found[_MAX_ROWS:])
        rows.append((f"… {len(found) - _MAX_ROWS} more kinds", "", "", f"a device sends {size(rest)}"))
    if len(found) > 1:
        rows.append(("in all", "", "", f"a device sends {size(sum(one.wire_bytes for one in found))}"))
    return rows


def _time(plan: Plan) -> Iterator[str]:
    if not plan.bounds:
        yield f"no roofline: there are no published figures for a {plan.hardware.chip.name}"
        flops = sum(plan.flops.values())
        yield f"  {flops:.3g} FLOP of matrix products and convolutions on each device"
        return
    yield "roofline of a step: no part of it can be faster"
    yield from _table([_bound_row(bound) for bound in plan.bounds])
    yield f"  at least {seconds(plan.at_least_s or 0)}, if they overlap"
    if plan.estimated_s is not None:
        yield (
            f"  the compiler's own estimate: {seconds(plan.estimated_s)} ({plan.estimated_cycles:.3g} cycles, at "
            f"{plan.hardware.chip.clock_hz / 1e9:g} GHz), collectives not counted"
        )
    elif plan.estimated_cycles:
        yield f"  the compiler's own estimate: {plan.estimated_cycles:.3g} cycles, collectives not counted"


def _bound_row(bound: Bound) -> tuple[str, ...]:
    is_flops = bound.name == "multiplications"
    amount = f"{bound.amount:.3g} FLOP" if is_flops else size(bound.amount)
    rate = f"at {bound.rate / 1e12:g} TFLOP/s" if is_flops else f"at {bound.rate / 1e9:g} GB/s"
    return bound.name, amount, rate, seconds(bound.seconds), bound.source


def _end(plan: Plan) -> Iterator[str]:
    chip = plan.hardware.chip
    if chip.notes:
        yield f"{chip.name}: {chip.notes}."
    yield from plan.notes
    took = ", ".join(f"{name} {value:.1f} s" for name, value in plan.seconds.items())
    yield f"Planned here, nothing was run: {took}."


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    return (f"  {line}" for line in aligned(rows))
