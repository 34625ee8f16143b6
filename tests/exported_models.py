"""Models that tests save and export. A fresh process makes them again."""

import keras


def make_model():
    """A compiled model with nested layers, shared state, and one variable of over 1 MB, which an export leaves
    without a value.
    """
    inputs = keras.Input((16,), name="numbers")
    tokens = keras.Input((4,), dtype="int32", name="tokens")
    x = keras.layers.BatchNormalization()(keras.layers.Dense(300, "tanh")(inputs))
    x = keras.Sequential([keras.layers.Dense(900), keras.layers.Dropout(0.5)], name="inner")(x)
    embedded = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 8, dtype="bfloat16")(tokens))
    x = keras.layers.Concatenate()([x, embedded])
    model = keras.Model([inputs, tokens], keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def make_smaller():
    """The same with a narrower layer."""
    inputs = keras.Input((16,))
    return keras.Model(inputs, keras.layers.Dense(299)(inputs))


def make_nothing():
    """Not a model."""
    return 3


def make_wide(width, count):
    """Some large variables."""
    layers = [keras.layers.Dense(width, use_bias=False, kernel_initializer="ones") for _ in range(count)]
    return keras.Sequential([keras.Input((width,)), *layers])
