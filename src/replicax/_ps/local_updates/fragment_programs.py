"""``FragmentPrograms``: the shards of one fragment on a parameter server, and the update programs on them.

``member_rules.py`` says when each runs. The programs decide nothing but whether they apply: a claim, push or close that
came before, or too late, changes nothing. So requests may be repeated, and need no number.

The shards are ``theta`` and ``momentum``, float32 [n]; ``slots``, float32 [members, n], with what each member has
pushed in the open round; ``positions``, uint8 [members, 1024], with the ``StoredPosition`` of each member's last
push; ``rounds``, int32 [1 + members, 5], which is a ``RoundState``; and ``history``, int32 [64, 2
+ members], whose row ``version % 64`` has the version, 1 if it was a flush, and the tokens of each member.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._ps.local_updates.int8_blocks import BLOCK, num_blocks
from replicax._ps.local_updates.outer_optimizer import OuterTransformation
from replicax._ps.local_updates.round_state import REFUSED, MemberState, RoundState
from replicax._ps.local_updates.stored_position import NUM_POSITION_BYTES, StoredPosition
from replicax._ps.programs.programs import UpdateProgram
from replicax._src.program_kit.traced_programs import export

NUM_IN_HISTORY: Final = 64
MAX_TOKENS: Final = 1 << 29
"""The most rows that count for one member in one round."""
_OWNER, _PUSHED, _LANDED, _TOKENS, _ = (MemberState._fields.index(name) for name in MemberState._fields)
_VERSION, _STOPPING, _BIRTH = range(3)
_IS_LAST, _STOPS = 1, 2


@final
class FragmentPrograms:
    """The programs of one fragment.

    Args:
      key: The name of the fragment, the first part of its shards' keys.
      size: The number of its values.
      num_members: The number of groups.
      is_nesterov: True if the outer optimizer looks ahead: ``theta -= rate * (mean + decay * momentum)`` in place of
        ``theta -= rate * momentum``, where ``momentum = decay * momentum + mean``.
      optimizer: A transformation of optax in place of this update, which has its own rates.
      is_state: True if no gradient changes the values: pushes are values, and a round takes their mean, without any
        optimizer; see ``state_values.py``.
      is_compressed: True if pushes are 8-bit integers with scales; see ``int8_blocks.py``.
      platforms: What the programs run on.

    Attributes:
      size: The number of values.
      shards: The key, shape and dtype of each shard, by its name.
      claim, push, close: The programs. ``*_operands`` returns what they take.
    """

    def __init__(
        self,
        key: str,
        size: int,
        num_members: int,
        *,
        is_nesterov: bool = True,
        is_compressed: bool = False,
        optimizer: OuterTransformation | None = None,
        is_state: bool = False,
        platforms: Sequence[str] = ("cpu",),
    ):
        self.size, self.is_state = size, is_state
        self.is_compressed, self._platforms, self._optimizer = is_compressed, platforms, optimizer
        first = [] if optimizer is None else jax.eval_shape(lambda: optimizer.first_state(size))
        self._state = ["momentum"] if optimizer is None else [f"state {at}" for at in range(len(first))]
        specs: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "theta": ((size,), np.float32),
            **dict.fromkeys(self._state, ((size,), np.float32)),
            **{name: (leaf.shape, leaf.dtype.type) for name, leaf in zip(self._state, first, strict=False)},
            "slots": ((num_members, size), np.float32),
            "positions": ((num_members, NUM_POSITION_BYTES), np.uint8),
            "rounds": ((1 + num_members, len(MemberState._fields)), np.int32),
            "history": ((NUM_IN_HISTORY, 2 + num_members), np.int32),
        }
        self.shards = {
            name: (f"{key}/{name}", shape, np.dtype(dtype)) for name, (shape, dtype) in specs.items()
        }
        pushed: list[tuple[tuple[int, ...], type[np.generic]]] = [((size,), np.float32)]
        if is_compressed:
            pushed = [((size,), np.int8), ((num_blocks(size),), np.float32)]
        position = ((NUM_POSITION_BYTES,), np.uint8)
        self.claim = self._program("claim", _claim, ("rounds",), [((4,), np.int32)])
        push = _push_values if is_state else _push
        self.push = self._program(
            "push", push, ("rounds", "slots", "positions"), [((6,), np.int32), *pushed, position]
        )
        of_sgd = _close_values if is_state else _close_nesterov if is_nesterov else _close
        self.close = self._program(
            "close",
            of_sgd if optimizer is None else _CloseWith(optimizer),
            ("theta", *self._state, "slots", "rounds", "history"),
            [((3,), np.int32), ((2,), np.float32)],
        )

    def initial(self, name: str) -> UpdateProgram:
        """Returns a program that makes a shard's first value, so that no value is sent: zeros, or an optimizer's."""
        _, shape, dtype = self.shards[name]
        optimizer = self._optimizer

        def first() -> list[Any]:
            if optimizer is None or name not in self._state:
                return [jnp.zeros(shape, dtype)]
            return [optimizer.first_state(self.size)[self._state.index(name)]]

        return UpdateProgram(export(first, [], self._platforms, "first_value_of_local_updates"), (), ())

    def first_rounds(self, birth: int) -> np.ndarray:
        """Returns the first value of the shard ``rounds``."""
        _, shape, dtype = self.shards["rounds"]
        rounds = np.zeros(shape, dtype)
        rounds[0, _BIRTH] = birth
        return rounds

    @staticmethod
    def claim_operands(member: int, expected: MemberState, owner: int) -> list[np.ndarray]:
        return [np.array([member, expected.owner, expected.pushed, owner], np.int32)]

    @staticmethod
    def push_operands(
        member: int,
        owner: int,
        number: int,
        after: int,
        tokens: int,
        values: Sequence[np.ndarray],
        *,
        is_last: bool = False,
        stops: int = 0,
        position: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Returns the operands of a push; ``values`` is a float32 [n], or what ``int8_blocks.encoded`` returns, and
        ``position`` what ``StoredPosition.encoded`` returns. ``stops`` is a ``stop_mark``, and 0 without a stop.
        """
        flags = _IS_LAST * is_last + _STOPS * stops
        header = np.array([member, owner, number, after, min(tokens, MAX_TOKENS), flags], np.int32)
        return [header, *values, StoredPosition().encoded() if position is None else position]

    @staticmethod
    def close_operands(
        version: int, quorum: int, rate: float, decay: float, *, is_flush: bool = False
    ) -> list[np.ndarray]:
        """Returns the operands of a close. A flush adds the mean as it is, and leaves the momentum."""
        rates = [1.0, 0.0] if is_flush else [rate, decay]
        return [np.array([version, quorum, int(is_flush)], np.int32), np.array(rates, np.float32)]

    def _program(
        self,
        name: str,
        update: Callable[..., Any],
        state: Sequence[str],
        operands: Sequence[tuple[tuple[int, ...], type[np.generic]]],
    ) -> UpdateProgram:
        specs = (*(self.shards[each][1:] for each in state), *operands)
        blob = _exported(update, specs, tuple(self._platforms), f"{name}_of_local_updates")
        return UpdateProgram(blob, tuple(self.shards[each][0] for each in state), tuple(range(len(state))))


@functools.lru_cache(maxsize=64)  # fragments of one size have the same programs
def _exported(
    update: Callable[..., Any],
    specs: Sequence[tuple[tuple[int, ...], type[np.generic]]],
    platforms: Sequence[str],
    name: str,
) -> bytes:
    def run(*arrays: Any) -> list[Any]:
        return list(update(*arrays))

    return export(run, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs], platforms, name)


def state_of(rounds: np.ndarray) -> RoundState:
    """Reads the shard ``rounds``."""
    return RoundState.of(rounds.tolist())


def stop_mark(instance: str) -> int:
    """Returns the number with which a server stores a stop: positive, below 2 ** 30, of this instance of the server.

    A server that comes back from a snapshot is another instance. So a run that begins from the snapshot of one that was
    stopped does not stop. Groups that know of a stop say it again, to each instance.
    """
    return 1 + zlib.crc32(instance.encode()) % (2**30 - 1)


def _claim(rounds: jax.Array, header: jax.Array) -> list[jax.Array]:
    member, expected, pushed, owner = header
    before = rounds[1 + member]
    taken = jnp.stack([owner, jnp.int32(0), jnp.int32(0), before[_TOKENS], jnp.int32(0)])
    is_free = (before[_OWNER] == expected) & (before[_PUSHED] == pushed)
    return [rounds.at[1 + member].set(jnp.where(is_free, taken, before))]


def _push(
    rounds: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    header: jax.Array,
    *operands: jax.Array,
    is_state: bool = False,
) -> list[jax.Array]:
    *pushed, position = operands
    member, owner, number, after, tokens, flags = header
    values = pushed[0]
    if len(pushed) == 2:
        integers, scales = pushed
        values = integers.astype(jnp.float32) * jnp.repeat(scales, BLOCK)[: integers.size]
    before = rounds[1 + member]
    is_next = (before[_OWNER] == owner) & (before[_PUSHED] == after)
    is_finite = jnp.isfinite(values).all()
    landed = jnp.where(is_finite, rounds[0, _VERSION], REFUSED)
    total = jnp.minimum(before[_TOKENS] + jnp.where(is_finite, tokens, 0), MAX_TOKENS)
    row = jnp.stack([owner, number, landed, total, flags & _IS_LAST])
    rounds = rounds.at[1 + member].set(jnp.where(is_next, row, before))
    stops = jnp.where(is_next & (flags >= _STOPS), flags // _STOPS, rounds[0, _STOPPING])
    rounds = rounds.at[0, _STOPPING].set(stops)
    slot = slots[member]
    pushed_here = values if is_state else slot + values
    slots = slots.at[member].set(jnp.where(is_next & is_finite, pushed_here, slot))
    positions = positions.at[member].set(jnp.where(is_next, position, positions[member]))
    return [rounds, slots, positions]


def _push_values(*arrays: jax.Array) -> list[jax.Array]:
    return _push(*arrays, is_state=True)


def _close(*arrays: jax.Array, is_nesterov: bool = False) -> Sequence[jax.Array]:
    def updated(
        theta: jax.Array, state: Sequence[jax.Array], mean: jax.Array, is_flush: jax.Array
    ) -> Sequence[jax.Array]:
        rate, decay = arrays[-1]
        (momentum,) = state
        after = decay * momentum + mean
        step = mean + decay * after if is_nesterov else after
        return theta - rate * step, jnp.where(is_flush != 0, momentum, after)

    return _closed(updated, *arrays)


@dataclass(frozen=True)
class _CloseWith:
    """The program ``close`` with a transformation of optax."""

    optimizer: OuterTransformation

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        def updated(
            theta: jax.Array, state: Sequence[jax.Array], mean: jax.Array, is_flush: jax.Array
        ) -> Sequence[jax.Array]:
            after = self.optimizer.applied(theta, state, mean)
            both = zip((theta - mean, *state), (after[0], *after[1]), strict=True)
            return [jnp.where(is_flush != 0, flushed, stepped) for flushed, stepped in both]

        return _closed(updated, *arrays)


def _closed(updated: Callable[..., Sequence[jax.Array]], *arrays: jax.Array) -> Sequence[jax.Array]:
    """Closes a round if it is open, and has a quorum. ``updated`` returns the parameters and the optimizer's state."""
    *state, (version, quorum, is_flush), _ = arrays
    rounds = state[-2]
    num_contributors = (rounds[1:, _TOKENS] > 0).sum()
    closes = (rounds[0, _VERSION] == version) & (num_contributors >= jnp.maximum(quorum, 1))

    def closed(theta: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
        *own, slots, rounds, history = others
        tokens = rounds[1:, _TOKENS]
        mean = _mean(slots, tokens.astype(jnp.float32))
        row = jnp.concatenate([jnp.stack([version + 1, is_flush]), tokens])
        return (
            *updated(theta, own, mean, is_flush),
            jnp.zeros_like(slots),
            rounds.at[0, _VERSION].add(1).at[1:, _TOKENS].set(0),
            history.at[(version + 1) % NUM_IN_HISTORY].set(row),
        )

    return jax.lax.cond(closes, closed, lambda *same: same, *state)


def _close_values(*arrays: jax.Array) -> Sequence[jax.Array]:
    return _closed(lambda theta, state, mean, is_flush: (mean, *state), *arrays)


def _close_nesterov(*arrays: jax.Array) -> Sequence[jax.Array]:
    return _close(*arrays, is_nesterov=True)


def _mean(slots: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean of all slots by their weights, added up in the order of the members, whatever the compiler prefers."""

    def add(member: int, total: jax.Array) -> jax.Array:
        return total + weights[member] * slots[member]

    return jax.lax.fori_loop(0, slots.shape[0], add, jnp.zeros(slots.shape[1], slots.dtype)) / weights.sum()
