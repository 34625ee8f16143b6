"""JAX's coordination service, of jaxlib alone: ``jax_compat.py`` for the one process that does without JAX, and so
starts sooner.

No public name starts the service alone: ``jax.distributed.initialize`` makes it a part of process 0 (jaxlib 0.10 to
0.12; no upstream issue: a service that is a process of its own).
"""

from __future__ import annotations

from typing import Any, Final

from jaxlib import _jax as _jaxlib  # type: ignore[attr-defined]

# Our own channel detects silent processes: JAX's service would abort all of them.
NEVER_S: Final = 10**7


def start_coordination_service(bind_address: str, num_processes: int) -> Any:
    """Starts the service, which is otherwise a part of process 0 and dies with it.

    Args:
      bind_address: The address to listen at.

    Returns:
      The object that keeps the service alive.
    """
    return _jaxlib.get_distributed_runtime_service(
        bind_address,
        num_processes,
        heartbeat_timeout=NEVER_S,
        recoverable=True,
    )
