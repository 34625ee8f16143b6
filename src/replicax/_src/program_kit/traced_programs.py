"""Traced functions as programs: lists of operations that a pass can cut, evaluate, number and export. No JAX equation
is seen outside of them.
"""

from __future__ import annotations

from replicax._src.devices.topology import Topology
from replicax._src.jax_internals.jax_compat import export, trace
from replicax._src.lowering.combined_replicas import Combining, combined_replicas
from replicax._src.tracing.equations import computing, first_results
from replicax._src.tracing.flat import Atom, FlatProgram, NumberedValues, Operation
from replicax._src.tracing.passes import trace_cross_replica
from replicax._src.tracing.program import Output, ReplicaProgram, Variant
from replicax._src.tracing.value_numbering import number_slice

__all__ = [
    "Atom",
    "Combining",
    "FlatProgram",
    "NumberedValues",
    "Operation",
    "Output",
    "ReplicaProgram",
    "Topology",
    "Variant",
    "combined_replicas",
    "computing",
    "export",
    "first_results",
    "number_slice",
    "trace",
    "trace_cross_replica",
]
