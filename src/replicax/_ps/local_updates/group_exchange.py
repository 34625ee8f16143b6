"""``GroupExchange``: what ``LocalUpdates`` asks of its exchange. ``BackgroundExchange`` has it, and a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from replicax._ps.local_updates.background_exchange import AskServer, ExchangedFragment
from replicax._ps.local_updates.replay_file import GroupCall
from replicax._ps.local_updates.stored_position import StoredPosition
from replicax._ps.local_updates.unmerged_progress import Rebase


class GroupExchange(Protocol):
    """The exchange of one process. ``BackgroundExchange`` says what the methods do."""

    @property
    def fetched(self) -> Sequence[int]: ...

    @property
    def position(self) -> StoredPosition: ...

    @property
    def version(self) -> int: ...

    @property
    def stops(self) -> bool: ...

    def begin(self, values: Sequence[Any], timeout_s: float) -> list[Any]: ...

    def note_call(self, steps: int, call: GroupCall) -> None: ...

    def note_position(self, position: StoredPosition) -> None: ...

    def boundary(self, fragment: int, values: Any, tokens: int) -> Any: ...

    def adopt(self, fragment: int, values: Any) -> Any: ...

    def rebase(self, fragment: int) -> Rebase[Any] | None: ...

    def wait(self, timeout_s: float) -> None: ...

    def outer(self) -> list[Any]: ...

    def stop(self) -> None: ...

    def finish(self, timeout_s: float) -> list[Any]: ...

    @property
    def finished(self) -> Sequence[int]: ...

    def close(self) -> None: ...

    def statistics(self) -> Mapping[str, int]: ...


PlaceOuter = Callable[[int, np.ndarray], Any]
"""Puts outer parameters of a fragment where the group has them."""
JoinReplay = Callable[
    [Callable[[], int], Callable[[Sequence[AskServer]], list[ExchangedFragment]], PlaceOuter], GroupExchange
]
"""Makes the exchange of a process in a replay. It gets what returns the steps that the process has counted, what
returns the fragments, given what asks the server of each, and a ``PlaceOuter``.
"""
