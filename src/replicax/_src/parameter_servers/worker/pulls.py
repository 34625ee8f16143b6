"""A worker's copies of the variables: pulled when they are needed, or with the push of the closure before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import numpy as np

from replicax._src.parameter_servers.client.lookups import RowsWanted
from replicax._src.parameter_servers.client.server_clients import ServerClients
from replicax._src.parameter_servers.client.steps import Answered, Ask, Version, row_asks, rows_of
from replicax._src.parameter_servers.programs.programs import Piece

_CLOSURES_PER_SWEEP: Final = 1000
"""What none of as many closures took is dropped: the variable may be gone."""


@dataclass
class _Copy:
    """A worker's copy of one piece.

    Attributes:
      value: Its value, in the memory of its message unless ``is_kept``; None once that has been given back.
      is_kept: The value is a copy of its own. One is made when a piece came a second time in the same version: a
        variable that is seldom written does not travel again, and one that is written each step is never copied.
      is_fresh: It is as new as it needs to be for the closure that comes.
      last_use: Number of the closure that took it last.
    """

    version: Version
    value: Any
    is_kept: bool = False
    is_fresh: bool = True
    last_use: int = 0


@final
class Pulls:
    """The copies that one worker has of the pieces of variables. Used by one thread, which has its own clients.

    Attributes:
      moment: Grows whenever what is here is not fresh any more.
      num_pulls: Times that the servers were asked before a closure could run: without a push to ask with.
    """

    def __init__(self, servers: ServerClients):
        self._servers = servers
        self._copies: dict[tuple[int, str], _Copy] = {}
        self._epoch: Any = None
        self._num_closures = 0
        self.moment = self.num_pulls = 0

    def begin(self, epoch: Any) -> None:
        """A closure of that epoch begins: what was pulled in another one is not fresh."""
        self._num_closures += 1
        if self._num_closures % _CLOSURES_PER_SWEEP == 0:
            oldest = self._num_closures - _CLOSURES_PER_SWEEP
            self._copies = {where: copy for where, copy in self._copies.items() if copy.last_use > oldest}
        if epoch != self._epoch:
            self._epoch = epoch
            self.forget()

    def forget(self) -> None:
        """Nothing is fresh any more. What is not kept is dropped: its memory is for the next messages, and a server in
        this process cannot write in place while somebody looks.
        """
        self.moment += 1
        for copy in self._copies.values():
            copy.is_fresh = False
            if not copy.is_kept:
                copy.value = None

    def used(self, pieces: Sequence[Piece]) -> dict[int, list[tuple[str, Version]]]:
        """Returns by server the versions of ``pieces`` that are here."""
        versions: dict[int, list[tuple[str, Version]]] = {}
        for piece in pieces:
            versions.setdefault(piece.ps, []).append((piece.key, self._copies[piece.ps, piece.key].version))
        return versions

    def bring(self, pieces: Sequence[Piece], tables: Sequence[RowsWanted]) -> list[np.ndarray]:
        """Makes the values of ``pieces`` fresh, and pulls the rows of tables, in one round trip, or none.

        Returns:
          For each of ``tables`` the rows of its unique ids, [num_ids, ...].
        """
        asks = row_asks(tables)
        stale = {piece.ps for piece in pieces if not self._is_fresh(piece)} | asks.keys()
        for ps in stale:
            asks[ps] = Ask(rows=asks[ps].rows if ps in asks else (), pull=self._pull(ps, pieces))
        if not asks:
            return []
        self.num_pulls += 1
        answers = self._servers.step(None, 0, asks)
        self.take(answers)
        return rows_of(tables, answers)

    def asks_for(self, pieces: Sequence[Piece], servers: Sequence[int]) -> dict[int, list]:
        """Returns by server what to pull of ``pieces`` together with a push; for each of ``servers`` at least an empty
        list.
        """
        return {ps: self._pull(ps, pieces) for ps in {*servers, *(piece.ps for piece in pieces)}}

    def take(self, answers: Mapping[int, Answered]) -> None:
        """Remembers what came."""
        for ps, answer in answers.items():
            for key, (version, value) in answer.values.items():
                self._take_one((ps, key), version, value)

    def value(self, pieces: Sequence[Piece]) -> Any:
        """The whole value of a variable, as NumPy's or JAX's array; to be let go before the next message."""
        copies = [self._copies[piece.ps, piece.key] for piece in pieces]
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
            copy.is_fresh = True  # it is kept, and holds
        elif copy.version == version:
            copy.value, copy.is_kept, copy.is_fresh = np.array(value), True, True
        else:
            copy.version, copy.value, copy.is_kept, copy.is_fresh = version, value, False, True

    def _is_fresh(self, piece: Piece) -> bool:
        copy = self._copies.get((piece.ps, piece.key))
        return copy is not None and copy.is_fresh

    def _pull(self, ps: int, pieces: Sequence[Piece]) -> list[tuple[str, Version | None]]:
        keys = dict.fromkeys(piece.key for piece in pieces if piece.ps == ps)
        return [(key, self._known(ps, key)) for key in keys]

    def _known(self, ps: int, key: str) -> Version | None:
        copy = self._copies.get((ps, key))
        return copy.version if copy is not None and copy.is_kept else None
