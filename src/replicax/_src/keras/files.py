"""Names of the files that Keras writes: their ending tells Keras what is in them. Does not import Keras."""

from __future__ import annotations

import os
from typing import Final

from replicax._src.options import path_of

_MODELS: Final = (".keras", ".h5", ".hdf5")
_WEIGHTS: Final = (".weights.h5", ".keras")


def model_path(path: str | os.PathLike[str]) -> str:
    """The path with the ending that Keras 3 asks of a whole model's file: ``.keras`` where it has none of Keras's.

    For a path that is known only at run time. Keras 2 took any, and ``replicax migrate`` writes this call around it.

    Raises:
      InvalidArgumentError: It is no path.

    >>> import replicax as rx
    >>> rx.keras.model_path("saved/model"), rx.keras.model_path("model.h5")
    ('saved/model.keras', 'model.h5')
    """
    checked = path_of(path, "path", "model.keras")
    return checked if checked.endswith(_MODELS) else checked.rstrip("/") + _MODELS[0]


def weights_path(path: str | os.PathLike[str]) -> str:
    """The path with the ending that Keras 3 asks of a file of weights: ``.weights.h5`` where it has none of Keras's.

    Raises:
      InvalidArgumentError: It is no path.

    >>> import replicax as rx
    >>> rx.keras.weights_path("ckpt-{epoch}"), rx.keras.weights_path("old.h5")
    ('ckpt-{epoch}.weights.h5', 'old.weights.h5')
    """
    checked = path_of(path, "path", "model.weights.h5")
    if checked.endswith(_WEIGHTS):
        return checked
    return checked.rstrip("/").removesuffix(".h5").removesuffix(".hdf5") + _WEIGHTS[0]
