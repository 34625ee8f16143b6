"""A model whose variables are divided over replicas and over the devices of each replica."""

import keras
import numpy as np

import replicax as rx

ROWS, BATCH, WIDTH, WIDE, WORDS = 61, 24, 8, 32, 16  # batches of 24, 24 and 13 rows
MAP = {
    r"tokens/embeddings": ("logical", None),
    r"up/kernel": (None, "logical"),
    r"up/bias": ("logical",),
    r"down/kernel": ("logical",),
}
OF_MODEL = [WORDS * WIDTH, WIDTH, WIDTH, WIDTH * WIDE, WIDE, WIDE * WIDTH, WIDTH]  # numbers in each variable
DIVIDED = [True, False, False, True, True, True, False]  # over logical devices


def strategy_of(devices_per_replica=2, state="all", **options):
    return rx.MirroredStrategy(
        devices_per_replica=devices_per_replica, layout_map=MAP, shard_state=state, **options
    )


def network():
    inputs = keras.Input((3,), dtype="int32")
    h = keras.layers.Embedding(WORDS, WIDTH, name="tokens")(inputs)
    u = keras.layers.Dense(WIDE, "gelu", name="up")(keras.layers.LayerNormalization()(h))
    return keras.Model(inputs, (h + keras.layers.Dense(WIDTH, name="down")(u))[:, 0])


def made(strategy):
    """The model and its optimizer."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.AdamW(1e-2, global_clipnorm=0.5), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def rows():
    random = np.random.default_rng(0)
    return random.integers(0, WORDS, (ROWS, 3)), random.normal(size=(ROWS, WIDTH)).astype(np.float32)


def step_of(model):
    def step(batch):
        inputs, wanted = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(((model(inputs) - wanted) ** 2).mean(-1))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def bytes_of(num_logical, num_shards):
    """The bytes of one device for each variable of the model: a share of every dim that is long enough."""
    fits = [
        n % (num_logical * num_shards if divided else num_shards) == 0
        for n, divided in zip(OF_MODEL, DIVIDED)
    ]
    return [
        4 * n // (num_logical if divided else 1) // (num_shards if fit else 1)
        for n, divided, fit in zip(OF_MODEL, DIVIDED, fits)
    ]
