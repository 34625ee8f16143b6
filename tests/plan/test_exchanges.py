"""What compiled programs exchange, counted as plans count it."""

import keras
import numpy as np
import pytest

import replicax as rx
from replicax._plan.hlo import read_hlo

CPUS = [f"cpu:{i}" for i in range(8)]


@pytest.mark.parametrize("sizes", [[4] * 2, [4, 1]], ids=["even", "uneven"])
@pytest.mark.parametrize("state", ["optimizer", "all"])
def test_updates_are_computed_on_shards(state, sizes):
    strategy = rx.MirroredStrategy(CPUS[:2], shard_state=state)
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(8)])
        optimizer = keras.optimizers.Adam(global_clipnorm=1.0)
        optimizer.build(model.trainable_variables)

    def step(inputs):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((model(inputs) ** 2).mean(-1))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    rows = [np.zeros((size, 16), np.float32) for size in sizes]
    inputs = strategy.experimental_distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group]
    )
    strategy.run(step, args=(inputs,))
    compiled = strategy.runner.last_launcher.lower([inputs.stored]).compile()
    collectives = read_hlo(compiled.as_text(), 2).collectives
    of_model = 4 * (16 * 64 + 64 + 64 * 8 + 8)
    gathered = [c.bytes * c.count for c in collectives if c.kind == "all-gather"]
    assert sum(gathered) == of_model  # once, before or after the step, and nothing of the optimizer's
    of_state = of_model // (1 if state == "optimizer" else 2) + 2 * of_model // 2
    assert compiled.memory_analysis().argument_size_in_bytes == of_state + 2 * 4 + inputs.stored.nbytes // 2
