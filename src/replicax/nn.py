"""Losses for distributed training, and lookups in tables of embeddings: ``rx.nn``."""

from replicax._src.functions.nn import compute_average_loss, scale_regularization_loss
from replicax._src.user.public_names import publish_all
from replicax._src.variables.embedding_lookup import embedding_lookup, embedding_lookup_sparse

__all__ = [
    "compute_average_loss",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "scale_regularization_loss",
]

__dir__ = publish_all(globals())
