"""Rules for Keras optimizers of tables in which a step updates only some rows. Some settings do not work there."""

from __future__ import annotations

from typing import Any

import keras

_SETTINGS = {
    "use_ema": "the averages of rows that a step does not look up are not moved towards them",
    "gradient_accumulation_steps": "the sums of rows that are not looked up in the step that applies them are kept",
}


def why_not_for_tables(optimizer: Any) -> str | None:
    """Returns the settings with which an optimizer cannot update only some rows of a table, and why; None if there are
    none.

    Tracing the optimizer does not reveal this, because each row that is present is updated correctly.
    """
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    found = [
        f"{name}={getattr(optimizer, name)!r}: {why}"
        for name, why in _SETTINGS.items()
        if getattr(optimizer, name, None)
    ]
    return "; ".join(found) or None
