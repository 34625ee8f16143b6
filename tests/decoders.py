"""A small transformer, and layouts for models."""

import keras

import replicax as rx

TOKENS, LENGTH, WIDTH = 64, 6, 16


def for_model(model, devices=2):
    return rx.experimental.layouts.for_model(model, devices_per_replica=devices)


def decoder(heads=4, key_value_heads=2, num_blocks=1):
    """A transformer with the layers of keras_hub's decoders: grouped attention, a gate, an embedding that is its own
    reverse."""
    keras.utils.set_random_seed(0)
    ids = keras.Input((LENGTH,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(TOKENS, WIDTH, name="token_embedding")
    x = embedding(ids)
    for number in range(num_blocks):
        names = {name: f"block_{number}_{name}" for name in ("attention", "up", "gate", "down")}
        normed = keras.layers.LayerNormalization()(x)
        attention = keras.layers.GroupQueryAttention(8, heads, key_value_heads, name=names["attention"])
        x = x + attention(normed, normed, use_causal_mask=True)
        normed = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(32, name=names["up"])(normed)
        hidden = hidden * keras.layers.Dense(32, activation="silu", name=names["gate"])(normed)
        x = x + keras.layers.Dense(WIDTH, name=names["down"])(hidden)
    return keras.Model(ids, embedding(x, reverse=True))
