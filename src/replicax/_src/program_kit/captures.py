"""Functions while they are called and traced: their arguments, the variables that they read and assign, the cache of
their programs.
"""

from __future__ import annotations

from replicax._src.tracing.arguments import Call, CallForm
from replicax._src.tracing.bindings import Binding, BindingTable
from replicax._src.tracing.cache import ProgramCache
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.key import name_of

__all__ = [
    "Binding",
    "BindingTable",
    "Call",
    "CallForm",
    "ProgramCache",
    "current_capture",
    "name_of",
]
