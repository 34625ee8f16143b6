"""Decides which part of an optimizer's update a parameter server computes, and which values the worker sends for it.

The update is traced once, over full variables. All decisions use the *slice* of each variable: the operations that
compute its new value and its new slots. No decision depends on the optimizer's name. A server has the variable, its
slots, and the shared state (the count of steps, the learning rate). The worker has all gradients. So a slice is

1. *elementwise*, if no operation in it mixes rows (``programs/row_parallel.py``) or reads another variable. A server
   then updates each shard from that shard's gradient, and a table from the rows that were looked up. This is so for
   SGD, Adam, Adagrad, RMSprop, Ftrl, Lion and similar optimizers, with weight decay, ``clipvalue`` and EMA, because
   these are operations of the slice, and the average of a variable is one of its slots.
2. elementwise except for *scalars* that follow from gradients: a global norm, a finite check, the norm of a sharded
   variable (``clipnorm``). The worker computes them from full gradients and sends them.
3. elementwise except for *another gradient* of the same shape that follows from gradients alone (centred, numbered
   by rows). The worker sends it in place of the gradient.
4. *per variable*, if it mixes rows of the variable or of its slots (Lamb, Muon,
   Adafactor). The variable is kept on one server, without shards. A table whose rows are looked up is refused,
   because it may not fit there.
5. *coupled*, if it needs the values of other variables. Such an update is refused.

If the gradients of several closures are averaged, the only scalars are conditions, which hold if they hold for each
closure. Other couplings of variables scale each closure's own gradient, which is the value of case 3.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replicax._ps.programs.operations import numbers_in
from replicax._ps.programs.row_parallel import Mixing, mixed_values
from replicax._ps.programs.traced_update import TracedUpdate
from replicax._src.program_kit.traced_programs import Atom, Operation


@dataclass(frozen=True)
class Slice:
    """A part of an update: that of one variable, or that of the shared state.

    Attributes:
      new_values: The new values.
      gradient: The gradient of the variable; None for shared state.
      at_server: The other inputs that a server has.
      with_rows: The inputs of which it may have only some rows.
    """

    new_values: Sequence[Atom]
    gradient: int | None
    at_server: Collection[int]
    with_rows: Collection[int] = ()


@dataclass(frozen=True)
class Sent:
    """The values that the worker sends.

    Attributes:
      gradient: The gradient, or the value in its place; None for shared state.
      scalars: Other values.
    """

    gradient: int | None
    scalars: Sequence[int] = ()

    @property
    def numbers(self) -> list[int]:
        return [*self.scalars, *(() if self.gradient is None else (self.gradient,))]


def find_mixed(traced: TracedUpdate, part: Slice, sent: Sent) -> Mapping[int, Mixing]:
    """Returns the values that mix rows, in the rest of a slice that the worker's values leave."""
    if not part.with_rows:
        return {}
    assert sent.gradient is not None
    wanted = numbers_in([], part.new_values)
    remaining = traced.program.slice(part.new_values, sent.numbers)
    return mixed_values(remaining, {*part.with_rows, sent.gradient}, wanted)


def find_sent(
    traced: TracedUpdate, part: Slice, at_worker: Collection[int], *, is_averaged: bool
) -> Sent | None:
    """Finds the values that a server needs from the worker to compute a slice.

    Args:
      traced: The update.
      part: The slice.
      at_worker: The values that the worker can compute.
      is_averaged: True if the gradients of several closures are averaged.

    Returns:
      None if no values suffice.
    """
    operations = traced.program.slice(part.new_values)
    mixed = find_mixed(traced, part, Sent(part.gradient))
    inputs = set(traced.program.inputs)
    by_server = set(part.at_server)
    if part.gradient is not None and not is_averaged:
        by_server.add(part.gradient)
    scalars: set[int] = set()
    for operation in operations:
        if operation.results[0] not in mixed and operation.numbers <= by_server:
            by_server.update(operation.results)
        else:
            scalars.update(
                n for n in operation.results if n in at_worker and _may_be_sent(traced, n, is_averaged)
            )
    for gradient in _gradients(traced, part, operations, at_worker):
        sent = Sent(gradient, sorted(scalars))
        used = numbers_in(traced.program.slice(part.new_values, sent.numbers), part.new_values)
        if used & inputs <= {*sent.numbers, *part.at_server} and not find_mixed(traced, part, sent):
            return Sent(gradient, sorted(used & scalars))
    return None


def _may_be_sent(traced: TracedUpdate, number: int, is_averaged: bool) -> bool:
    aval = traced.avals[number]
    return aval.dtype == np.dtype(bool) and not aval.shape if is_averaged else math.prod(aval.shape) == 1


def _gradients(
    traced: TracedUpdate, part: Slice, operations: Sequence[Operation], at_worker: Collection[int]
) -> Iterator[int | None]:
    """Yields the gradient, then the values that may be sent in its place."""
    yield part.gradient
    if part.gradient is None:
        return
    gradient = traced.avals[part.gradient]
    for number in (n for operation in operations for n in operation.results):
        aval = traced.avals[number]
        if number in at_worker and (aval.shape, aval.dtype) == (gradient.shape, gradient.dtype):
            yield number
