"""Layouts for a model need few exchanges."""

import keras
import numpy as np
import pytest

import replicax as rx
from decoders import LENGTH, decoder, for_model


@pytest.mark.rest
def test_the_devices_of_a_replica_exchange_only_sums():
    """Layouts that do not fit together would need gathers or all-to-alls of activations."""
    layout_map = for_model(decoder)
    strategy = rx.MirroredStrategy(devices_per_replica=2, layout_map=layout_map, shard_state="all")
    with strategy.scope():
        model = decoder()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.zeros((16, LENGTH), np.int32)
    plan = strategy.plan(model.fit, args=(ids, ids), kwargs={"batch_size": 16})
    within = [one.kind for one in plan.compiled if "logical" in one.axes]
    assert set(within) == {"all-reduce"}
    assert not any(len(one.axes) > 1 for one in plan.compiled)
