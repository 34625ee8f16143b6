"""Keras's variables and steps. Only `_ps/keras` imports this module, because it loads Keras."""

from __future__ import annotations

from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.internals import DataAdapter, frozen_variables, initializer_of, store, stored
from replicax._src.keras.phases import Phase
from replicax._src.keras.replica_steps import ReplicaStep, ReplicaStyleFunction, state_elsewhere
from replicax._src.keras.row_counting import counting_rows
from replicax._src.keras.stateless_update import StatelessUpdate
from replicax._src.keras.step_functions import joined
from replicax._src.keras.surrounding_callback import SurroundingCallback
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.tracing.optimizer_slots import kept_for

__all__ = [
    "DataAdapter",
    "DatasetBatch",
    "FitCall",
    "Phase",
    "ReplicaStep",
    "ReplicaStyleFunction",
    "StatelessUpdate",
    "SurroundingCallback",
    "counting_rows",
    "frozen_variables",
    "initializer_of",
    "joined",
    "kept_for",
    "state_elsewhere",
    "store",
    "stored",
]
