"""``rx.keras.DataModel``: a functional Keras model that runs in a tf.data dataset, also on strings."""

from __future__ import annotations

from typing import Any, final

import keras


@final
@keras.saving.register_keras_serializable("replicax")
class DataModel(keras.Model):
    """A functional model for calls in ``dataset.map``. TensorFlow runs it, also on strings.

    Keras on JAX converts the inputs of a functional model to JAX arrays, which fails for strings and for tensors of a
    dataset's graph. This model passes TensorFlow's tensors to its layers unchanged. It takes the layers that Keras can
    run in tf.data: ``StringLookup``, ``TextVectorization``, ``Normalization`` and other preprocessing. For a sequence
    of such layers use ``keras.layers.Pipeline``.

    Args:
      inputs, outputs: The inputs and outputs of a functional ``keras.Model``.

    >>> import keras, replicax as rx                                           # doctest: +SKIP
    >>> words = keras.Input((3,), dtype="string")                              # doctest: +SKIP
    >>> look_up = keras.layers.StringLookup(vocabulary=["yes", "no"])          # doctest: +SKIP
    >>> stage = rx.keras.DataModel(words, look_up(words))                      # doctest: +SKIP
    >>> dataset = dataset.map(lambda words: stage(words))                      # doctest: +SKIP
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Runs the layers on a batch, [rows, ...], or on one row, [...], as a dataset yields before ``batch``."""
        del training, mask
        given = keras.tree.flatten(inputs)
        graph = keras.Function(self.inputs, self.output)
        is_row = all(
            len(x.shape) + 1 == len(wanted.shape) for x, wanted in zip(given, self.inputs, strict=True)
        )
        if not is_row:
            return graph(given)
        return keras.tree.map_structure(lambda x: x[0], graph([x[None] for x in given]))
