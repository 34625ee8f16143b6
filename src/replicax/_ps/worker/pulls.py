"""A worker's copies of variables, which it pulls when needed, or together with the previous closure's push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import numpy as np

from replicax._ps.client.row_requests import RowsWanted
from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.server_requests import Answered, Ask, Version, row_asks, rows_of
from replicax._ps.programs.programs import Shard

_CLOSURES_PER_SWEEP: Final = 1000
"""A copy that this many closures did not use is dropped: the variable may be deleted."""


@dataclass
class _Copy:
    """A worker's copy of one shard.

    Attributes:
      version: The version of the value.
      value: The value, in the memory of its message unless ``is_kept``; None once that memory has been released.
      is_kept: True if the value is a separate copy. One is made when a shard arrives twice in the same version. So a
        variable that is seldom written is not sent again, and one that is written in each step is never copied.
      is_fresh: True if it is new enough for the next closure.
      last_use: The number of the last closure that used it.
    """

    version: Version
    value: Any
    is_kept: bool = False
    is_fresh: bool = True
    last_use: int = 0


@final
class Pulls:
    """A worker's copies of shards. One thread uses it, with clients of its own.

    Attributes:
      moment: A counter that grows whenever the copies stop being fresh.
      num_pulls: The number of pulls before a closure, with no push that could have brought the values.
    """

    def __init__(self, servers: ServerClients):
        self._servers = servers
        self._copies: dict[tuple[int, str], _Copy] = {}
        self._epoch: Any = None
        self._num_closures = 0
        self.moment = self.num_pulls = 0

    def begin(self, epoch: Any) -> None:
        """Begins a closure of an epoch. Values that were pulled in another epoch are not fresh."""
        self._num_closures += 1
        if self._num_closures % _CLOSURES_PER_SWEEP == 0:
            oldest = self._num_closures - _CLOSURES_PER_SWEEP
            self._copies = {where: copy for where, copy in self._copies.items() if copy.last_use > oldest}
        if epoch != self._epoch:
            self._epoch = epoch
            self.forget()

    def forget(self) -> None:
        """Marks all copies as not fresh, and drops those that are not kept.

        Their memory is then free for the next messages, and a server in this process can write in place.
        """
        self.moment += 1
        for copy in self._copies.values():
            copy.is_fresh = False
            if not copy.is_kept:
                copy.value = None

    def used(self, shards: Sequence[Shard]) -> dict[int, list[tuple[str, Version]]]:
        """Returns the versions of the copies of ``shards``, by server."""
        versions: dict[int, list[tuple[str, Version]]] = {}
        for shard in shards:
            versions.setdefault(shard.ps, []).append((shard.key, self._copies[shard.ps, shard.key].version))
        return versions

    def bring(self, shards: Sequence[Shard], tables: Sequence[RowsWanted]) -> list[np.ndarray]:
        """Makes the values of ``shards`` fresh, and pulls rows of tables, in at most one round trip.

        Returns:
          The rows of the unique ids of each of ``tables``, [num_ids, ...].
        """
        asks = row_asks(tables)
        stale = {shard.ps for shard in shards if not self._is_fresh(shard)} | asks.keys()
        for ps in stale:
            asks[ps] = Ask(rows=asks[ps].rows if ps in asks else (), pull=self._pull(ps, shards))
        if not asks:
            return []
        self.num_pulls += 1
        answers = self._servers.step(None, 0, asks)
        self.take(answers)
        return rows_of(tables, answers)

    def asks_for(self, shards: Sequence[Shard], servers: Sequence[int]) -> dict[int, list]:
        """Returns what to pull of ``shards`` with a push, by server. Each of ``servers`` has at least an empty list."""
        return {ps: self._pull(ps, shards) for ps in {*servers, *(shard.ps for shard in shards)}}

    def take(self, answers: Mapping[int, Answered]) -> None:
        """Stores the values of answers."""
        for ps, answer in answers.items():
            for key, (version, value) in answer.values.items():
                self._take_one((ps, key), version, value)

    def value(self, shards: Sequence[Shard]) -> Any:
        """Returns the full value of a variable, as an array of NumPy or JAX. Release it before the next message."""
        copies = [self._copies[shard.ps, shard.key] for shard in shards]
        for copy in copies:
            copy.last_use = self._num_closures
        if len(copies) > 1:
            return np.concatenate([copy.value for copy in copies])
        (copy,) = copies
        if copy.is_kept and not isinstance(copy.value, jax.Array):
            copy.value = jax.device_put(copy.value)
        return copy.value

    def _take_one(self, where: tuple[int, str], version: Version, value: np.ndarray | None) -> None:
        copy = self._copies.get(where)
        if copy is None:
            self._copies[where] = _Copy(version, value, last_use=self._num_closures)
        elif value is None:
            copy.is_fresh = True  # the kept copy is still valid
        elif copy.version == version:
            copy.value, copy.is_kept, copy.is_fresh = np.array(value), True, True
        else:
            copy.version, copy.value, copy.is_kept, copy.is_fresh = version, value, False, True

    def _is_fresh(self, shard: Shard) -> bool:
        copy = self._copies.get((shard.ps, shard.key))
        return copy is not None and copy.is_fresh

    def _pull(self, ps: int, shards: Sequence[Shard]) -> list[tuple[str, Version | None]]:
        keys = dict.fromkeys(shard.key for shard in shards if shard.ps == ps)
        return [(key, self._known(ps, key)) for key in keys]

    def _known(self, ps: int, key: str) -> Version | None:
        copy = self._copies.get((ps, key))
        return copy.version if copy is not None and copy.is_kept else None
