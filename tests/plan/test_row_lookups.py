"""A step of ``fit`` moves the rows that it looks up, not the table."""

import keras
import numpy as np
import pytest

import replicax as rx

ROWS, WIDTH = 8192, 32  # 1 MiB
LOGICAL = {"devices_per_replica": 2, "layout_map": {"embedding.*/embeddings": (None, "logical")}}


@pytest.mark.parametrize(("size", "options"), [(4, {}), (2, {}), (2, LOGICAL)], ids=["4", "2", "2 of 2"])
def test_fit_moves_rows(size, options):
    """Each replica has 4 or 5 rows of the batches of 18, and 1 or 2 of the last one of 7."""
    inputs = np.random.default_rng(0).integers(0, ROWS, (61, 3)).astype(np.int32)
    targets = np.random.default_rng(1).normal(size=(61, 1)).astype(np.float32)
    strategy = rx.MirroredStrategy(
        [f"cpu:{i}" for i in range(4)], shard_state="all", shard_size=size, **options
    )
    with strategy.scope():
        layers = [keras.layers.Embedding(ROWS, WIDTH), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse")
    plan = strategy.plan(model.fit, args=(inputs, targets), kwargs={"batch_size": 18})
    assert max(c.bytes for c in plan.compiled) < 64 * 4 * WIDTH
    assert plan.memory.temporaries < ROWS * WIDTH * 4
