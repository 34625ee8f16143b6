"""Losses for distributed training: ``rx.nn``."""

from replicax._src.nn import compute_average_loss, scale_regularization_loss

__all__ = ["compute_average_loss", "scale_regularization_loss"]
