"""Variables and values where a strategy is current: who owns them, how they are sharded, per-replica values."""

from __future__ import annotations

from replicax._src.scope.context import Scope, call_replica, no_new_variables, strategy_for_new_variable
from replicax._src.values.distributed import ArrayLike, PerReplica, is_value, per_replica_stack
from replicax._src.values.framework import is_variable, use_imported
from replicax._src.values.future_value import FutureValue
from replicax._src.variables.embedding_lookup import owner_of_table
from replicax._src.variables.partitioners import partition
from replicax._src.variables.remote_array import RemoteArray
from replicax._src.variables.sharded import ShardedVariable
from replicax._src.variables.variable import Variable

__all__ = [
    "ArrayLike",
    "FutureValue",
    "PerReplica",
    "RemoteArray",
    "Scope",
    "ShardedVariable",
    "Variable",
    "call_replica",
    "is_value",
    "is_variable",
    "no_new_variables",
    "owner_of_table",
    "partition",
    "per_replica_stack",
    "strategy_for_new_variable",
    "use_imported",
]
