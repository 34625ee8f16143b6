"""Ray Train's signal that a node of the training is taken away. It does not import Ray."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

log = logging.getLogger("replicax")
_CONTEXTS = "ray.train.v2._internal.execution.context"


def watcher_in_ray() -> Callable[[], bool] | None:
    """Returns a function that is True once Ray takes away this worker's node; None outside of Ray Train's workers.

    Ray gives the signal to each worker, so that one reads its own. ``ray.train.get_preemption_info`` returns the same,
    but all workers must call it together, and no ``ray.train.report`` may run meanwhile (Ray 2.60).
    """
    module = sys.modules.get(_CONTEXTS)
    if module is None:
        return None
    try:
        context = module.get_train_context()
    except RuntimeError:  # in the process that calls ``fit``
        return None
    try:
        rank, state = context.get_world_rank(), context.preemption_context
        state.preemption_info  # noqa: B018
    except AttributeError as error:
        log.warning("This version of Ray does not tell its workers that a node is taken away: %s", error)
        return None
    return lambda: state.preemption_info is not None and rank in state.preemption_info.preempted_ranks
