"""The position of a ``fit`` in a distributed dataset. Keras is a few batches ahead of the training when it is asked for."""

import itertools
import json

import numpy as np
import pytest

import replicax as rx
from replicax._src.keras.dataset_adapters import DistributedInput

NUM_BATCHES = 6


def shuffled(strategy):
    rows = rx.data.from_arrays(np.arange(24)).shuffle(seed=3).batch(4)
    return DistributedInput(
        strategy.experimental_distribute_dataset(rows), NUM_BATCHES, None, ends_by_itself=True
    )


def taken(given, count=None):
    """The next batches of a pass."""
    with given.in_use():
        return [x.tolist() for (x,) in itertools.islice(given.get_jax_iterator(), count)]


@pytest.mark.parametrize("num_ahead", [0, 2])
@pytest.mark.parametrize("num_trained", [1, 2, 4])
def test_a_pass_resumes_at_the_batch_after_those_that_were_trained_on(num_trained, num_ahead):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    expected = taken(shuffled(strategy))
    assert len(expected) == NUM_BATCHES
    first, second = shuffled(strategy), shuffled(strategy)
    assert taken(first, num_trained + num_ahead) == expected[: num_trained + num_ahead]
    position = json.loads(json.dumps(first.position(num_trained)))
    assert second.resume(position, num_trained)
    assert taken(second) == expected[num_trained:]
