"""``rx.keras.compiled_loss``: the loss of ``compile`` in a step that a model writes itself, counted as in Keras 2."""

from __future__ import annotations

from typing import Any

from replicax._src.keras.losses import rows_of_replica_step


def compiled_loss(model: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Returns ``model.compute_loss(y=y_true, y_pred=y_pred)``, and counts it in the model's metric "loss".

    Call it in a ``train_step`` or ``test_step`` of a model. In Keras 3, ``compute_loss`` alone does not count the loss,
    so that ``fit`` reports 0 for a step of the model's own that returns the results of ``model.metrics``.

    Args:
      model: The model, after ``compile``.
      y_true: [rows of the replica, ...] the labels.
      y_pred: The outputs of the model for the same rows.
      sample_weight: The weights of the rows; None for 1.

    Returns:
      The loss as ``compute_loss`` returns it, with the losses of the layers.

    Source: ``self.compiled_loss`` of Keras 2.
    """
    loss = model.compute_loss(y=y_true, y_pred=y_pred, sample_weight=sample_weight)
    count_loss(model, loss)
    return loss


def count_loss(model: Any, loss: Any) -> None:
    """Updates the model's metric "loss", if it lists one."""
    for tracker in model.metrics[:1]:
        if tracker.name == "loss":
            tracker.update_state(loss, sample_weight=rows_of_replica_step())
