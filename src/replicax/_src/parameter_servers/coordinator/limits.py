"""``Limits``: the times after which a task counts as lost, or is given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Limits:
    """The times after which a task counts as lost, and for which a lost one is waited for.

    Attributes:
      beat_s: Between two questions whether it is alive.
      beat_timeout_s: How long an answer may take.
      missed_beats: How many in a row make a worker lost.
      ps_missed_beats: How many in a row make a parameter server lost, or silent.
      ps_silence_s: How long a parameter server that does not answer, and may only be stopped or cut off, is waited for.
        After so long it gives this coordinator up.
      reconnect_s: How long a worker is tried to be reached again, or at first.
      ps_retries: How often a closure is tried again that could not reach a parameter server.
      ps_restart_retries: The same, of a parameter server that comes back after it died: nothing is tried while it is
        away.
    """

    beat_s: float = 1.0
    beat_timeout_s: float = 2.0
    missed_beats: int = 2
    ps_missed_beats: int = 3
    ps_silence_s: float = 60.0
    reconnect_s: float = 3600.0
    ps_retries: int = 3
    ps_restart_retries: int = 30
