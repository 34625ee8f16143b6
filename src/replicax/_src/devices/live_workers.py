"""The live workers of a training that goes on when workers die, as the layers below ``fault_tolerance`` see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from replicax._src.vocabulary.errors import UnsupportedError


class LiveWorkers(Protocol):
    """The live workers. Together they compute all R replicas: they adopt those of the dead ones."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """The numbers of the replicas that this process computes now."""
        ...

    def run(self, step: Any, what: str) -> Any:
        """Runs one step until all its sums are here; see ``fault_tolerance/survivors.py``."""
        ...

    def broadcast(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the arrays of the chief, bit for bit. All live workers call it, with arrays of the same shapes and
        dtypes.
        """
        ...


def not_for_survivors(what: str) -> UnsupportedError:
    """Returns the error for a use of a strategy that survivors cannot repeat after a death.

    Args:
      what: The use, as the subject of a sentence.
    """
    return UnsupportedError(
        f"{what} does not work with MultiWorkerMirroredStrategy(fault_tolerance=True), whose workers go on after a death "
        "by repeating the interrupted step. Leave fault_tolerance out, and give rx.CheckpointManager (or rx.keras.callbacks.CheckpointCallback) save_on_failure=True: a death then loses at most the interrupted step, and "
        "replicax launch --max-restarts restarts the job there."
    )
