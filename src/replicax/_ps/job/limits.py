"""``Limits``: the timeouts after which a task counts as lost, or is given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Limits:
    """The timeouts after which a task counts as lost, and the times for which the coordinator tries to reconnect.

    Attributes:
      heartbeat_s: The time between two heartbeats.
      heartbeat_timeout_s: The longest time that an answer to a heartbeat may take.
      missed_heartbeats: The number of missed heartbeats in a row after which a worker is lost.
      ps_missed_heartbeats: The number of missed heartbeats in a row after which a parameter server is lost or silent.
      ps_silence_s: The longest wait for a silent parameter server, which may only be paused or cut off. The server
        itself ends this coordinator's session after that time.
      reconnect_s: The longest time to try to connect to a worker, at first or again.
      ps_retries: The number of retries of a closure that could not reach a parameter server.
      ps_restart_retries: The same if the parameter server restarts. Nothing is tried while it is away.
    """

    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 2.0
    missed_heartbeats: int = 2
    ps_missed_heartbeats: int = 3
    ps_silence_s: float = 60.0
    reconnect_s: float = 3600.0
    ps_retries: int = 3
    ps_restart_retries: int = 30
