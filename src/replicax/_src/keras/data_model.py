"""``rx.keras.DataModel``: a functional model of Keras that runs in a dataset of tf.data, on texts too."""

from __future__ import annotations

from typing import Any, final

import keras


@final
@keras.saving.register_keras_serializable("replicax")
class DataModel(keras.Model):
    """A functional model that functions of ``dataset.map`` call: TensorFlow runs it, on texts too.

    Keras on JAX makes arrays of JAX of what a functional model gets. Tensors of a dataset's graph and texts cannot
    become such. This model gives its layers TensorFlow's tensors as they are. Its layers are those that Keras runs
    in tf.data: ``StringLookup``, ``TextVectorization``, ``Normalization`` and other preprocessing. For such layers
    one after the other Keras has ``keras.layers.Pipeline``.

    Args:
      inputs, outputs: Of a functional ``keras.Model``.

    >>> import keras, replicax as rx                                           # doctest: +SKIP
    >>> words = keras.Input((3,), dtype="string")                              # doctest: +SKIP
    >>> look_up = keras.layers.StringLookup(vocabulary=["yes", "no"])          # doctest: +SKIP
    >>> stage = rx.keras.DataModel(words, look_up(words))                      # doctest: +SKIP
    >>> dataset = dataset.map(lambda words: stage(words))                      # doctest: +SKIP
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Runs the layers on a batch, [rows, ...], or on one row, [...], which a dataset has before ``batch``."""
        del training, mask
        given = keras.tree.flatten(inputs)
        graph = keras.Function(self.inputs, self.output)
        is_row = all(
            len(x.shape) + 1 == len(wanted.shape) for x, wanted in zip(given, self.inputs, strict=True)
        )
        if not is_row:
            return graph(given)
        return keras.tree.map_structure(lambda x: x[0], graph([x[None] for x in given]))
