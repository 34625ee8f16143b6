"""Random streams: one reproducible stream per replica, derived from one shared seed.

Replica r gets the seed with its first word shifted by r * 0x9E3779B9 (the golden ratio in 32 bits, whose multiples
spread evenly). Replica 0 gets the seed itself, so that a single replica draws the numbers of a single device. Only the
shared seed is stored, so a checkpoint works with any number of replicas.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from replicax._src.tracing.markers import seed_shift_p, seed_unshift_p

_STRIDE = 0x9E3779B9


def _shift(replica_id: Any, seed: Any) -> Any:
    offset = jnp.asarray(replica_id, jnp.uint32) * jnp.uint32(_STRIDE)
    return jnp.zeros_like(seed).at[0].set(offset.astype(seed.dtype))


def seed_of_replica(seed: Any, replica_id: Any) -> Any:
    """Returns the state [2] uint32 that a replica draws from, given the shared one."""
    return seed_shift_p.bind(seed + _shift(replica_id, seed))


def shared_seed(seed: Any, replica_id: Any) -> Any:
    """Returns the shared state, given a replica's."""
    return seed_unshift_p.bind(seed - _shift(replica_id, seed), seed)
