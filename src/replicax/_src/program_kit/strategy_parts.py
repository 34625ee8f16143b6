"""What a strategy is made of: the class of all strategies, its parts, and the tracing of its replica functions."""

from __future__ import annotations

from replicax._src.drawing.html import page_of_table
from replicax._src.hooks import hook
from replicax._src.scope.any_strategy import StrategyParts
from replicax._src.strategies.replica_tracing import ReplicaCall
from replicax._src.strategies.strategy import Strategy
from replicax._src.vocabulary.options import RunOptions

__all__ = [
    "ReplicaCall",
    "RunOptions",
    "Strategy",
    "StrategyParts",
    "hook",
    "page_of_table",
]
