"""File names with the extensions that tell Keras the kind of content. Does not import Keras."""

from __future__ import annotations

import os
from typing import Final

from replicax._src.vocabulary.options import path_of

_MODELS: Final = (".keras", ".h5", ".hdf5")
_WEIGHTS: Final = (".weights.h5", ".keras")


def model_path(path: str | os.PathLike[str]) -> str:
    """Returns the path with Keras 3's extension for a full model, ``.keras``, unless it already has a Keras extension.

    It is for paths that are known only at run time. Keras 2 accepted any path, so ``replicax migrate`` wraps paths in
    this call.

    Raises:
      InvalidArgumentError: The value is not a path.

    >>> import replicax as rx
    >>> rx.keras.model_path("saved/model"), rx.keras.model_path("model.h5")
    ('saved/model.keras', 'model.h5')
    """
    checked = path_of(path, "path", "model.keras")
    return checked if checked.endswith(_MODELS) else checked.rstrip("/") + _MODELS[0]


def weights_path(path: str | os.PathLike[str]) -> str:
    """Returns the path with Keras 3's extension for weights, ``.weights.h5``, unless it already has a Keras extension.

    Raises:
      InvalidArgumentError: The value is not a path.

    >>> import replicax as rx
    >>> rx.keras.weights_path("ckpt-{epoch}"), rx.keras.weights_path("old.h5")
    ('ckpt-{epoch}.weights.h5', 'old.weights.h5')
    """
    checked = path_of(path, "path", "model.weights.h5")
    if checked.endswith(_WEIGHTS):
        return checked
    return checked.rstrip("/").removesuffix(".h5").removesuffix(".hdf5") + _WEIGHTS[0]
