"""A model with variables and values that are split over the logical devices of a replica, and data for it."""

import keras
import numpy as np

import replicax as rx

ROWS = np.random.default_rng(0).normal(size=(22, 8)).astype(np.float32)


LABELS = np.random.default_rng(1).integers(0, 4, 22)


@keras.saving.register_keras_serializable("split_models")
class Sharded(keras.layers.Dense):
    """A dense layer whose output is split over the logical devices, under a strategy that has such."""

    def call(self, inputs):
        strategy = rx.get_strategy()
        outputs = super().call(inputs)
        return strategy.experimental_split_to_logical_devices(outputs, [1, strategy.num_logical_devices])


def model_of(strategy, with_statistics=True):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.Input((8,)), Sharded(16, activation="tanh"), keras.layers.Dense(4)]
        if with_statistics:
            layers.insert(2, keras.layers.BatchNormalization())
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
    if strategy.num_logical_devices > 1:
        for v in [*model.variables, *model.optimizer.variables]:
            if v.shape == (8, 16):
                strategy.experimental_split_to_logical_devices(v, [1, strategy.num_logical_devices])
    return model
