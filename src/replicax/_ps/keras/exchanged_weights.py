"""The weights of a Keras model: how groups that train alone treat each. ``attached_arrays.py`` loads it for Keras."""

from __future__ import annotations

from collections.abc import Iterator

import keras

from replicax._src.program_kit.keras_variables import frozen_variables


def weights_with_kinds(model: keras.Layer) -> Iterator[tuple[keras.Variable, bool, bool]]:
    """Yields each weight; True if no gradient changes it; and True if it is frozen, so that nothing changes it."""
    frozen = {id(each) for each in frozen_variables(model)}
    for each in model.trainable_weights:
        yield each, False, False
    for each in model.non_trainable_weights:
        yield each, True, id(each) in frozen
