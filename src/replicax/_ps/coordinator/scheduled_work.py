"""``Work``: a scheduled function as the queue carries it, with the future of its result."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, final

from replicax._ps.coordinator.closures import Ended
from replicax._ps.coordinator.remote_value import RemoteValue
from replicax._ps.strategy.remote_closures import PreparedClosure


@final
@dataclass(slots=True)
class Work:
    """A prepared closure, and the future of its result.

    Attributes:
      prepared: The closure; None once it has ended.
      value: The future.
      kind: A key that is equal for closures of one program.
      keeps: Objects that must live as long as the closure, such as iterators.
    """

    prepared: PreparedClosure | None
    value: RemoteValue
    kind: Hashable = None
    keeps: Any = None


def settle(ended: Ended) -> None:
    """Sets the errors of closures that have ended without a result."""
    for closure, error in ended:
        closure.work.value.settle((), error)
        closure.work.prepared = None
