"""Turns conditions into selections: computes both branches and selects one result, so that a program is one list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicax._src.program_kit.traced_programs import FlatProgram, trace


def without_conditions(jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns a jaxpr, whose leading inputs are ``consts``, without conditions. Conditions in inner functions go
    too.
    """
    if not any("cond" in {each.name, *each.inner_names} for each in FlatProgram.unresolved(jaxpr).operations):
        return jaxpr, list(consts)
    program = FlatProgram(jaxpr, is_selected=lambda operation: True)
    return trace(lambda *args: program.evaluate([*consts, *args]), program.input_avals[len(consts) :])
