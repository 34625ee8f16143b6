"""``fit`` with ``replicas_to_aggregate``: n batches per update equal one device with batches n times as large."""

import keras
import numpy as np
import pytest

from in_memory_servers import in_memory_strategy
from replicax._src.variables.partitioners import FixedShardsPartitioner
from replicax.coordinator import ClusterCoordinator

pytestmark = [
    pytest.mark.rest,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

ROWS = 48
random = np.random.RandomState(0)
X = random.randn(ROWS, 4).astype("float32")
WORDS = random.randint(0, 20, (ROWS, 3)).astype("int32")
Y = np.argmax(X[:, :3], 1)
O = keras.optimizers  # noqa: E741


def dense(optimizer):
    keras.utils.set_random_seed(0)
    return compiled([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)], optimizer)


def embedding(optimizer):
    keras.utils.set_random_seed(0)
    words = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(20, 4), keras.layers.Flatten()]
    return compiled([*words, keras.layers.Dense(3)], optimizer)


def compiled(layers, optimizer):
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"])
    return model


def same_state(one, other):
    for expected, found in zip(one.trainable_weights, other.trainable_weights, strict=True):
        np.testing.assert_allclose(found.value, expected.value, rtol=0, atol=1e-6, err_msg=expected.path)


@pytest.mark.parametrize(
    ("make", "x", "optimizer", "num_averaged", "partitioner"),
    [
        (dense, X, lambda: O.SGD(0.1, momentum=0.9), 2, None),
        (dense, X, lambda: O.Adam(O.schedules.ExponentialDecay(0.1, 2, 0.5)), 4, FixedShardsPartitioner(3)),
        pytest.param(
            embedding,
            WORDS,
            lambda: O.Adagrad(0.1),
            2,
            FixedShardsPartitioner(2),
            marks=pytest.mark.long,
        ),
    ],
    ids=["momentum", "adam in shards", "embedding"],
)
def test_equal_batches_are_one_large_batch(make, x, optimizer, num_averaged, partitioner):
    one = make(optimizer)
    options = {"epochs": 2, "verbose": 0, "shuffle": False}
    expected = one.fit(x, Y, batch_size=6 * num_averaged, **options).history
    with (
        in_memory_strategy(2, 2, partitioner) as strategy,
        ClusterCoordinator(strategy, replicas_to_aggregate=num_averaged),
    ):
        with strategy.scope():
            model = make(optimizer)
        found = model.fit(x, Y, batch_size=6, **options).history
        same_state(one, model)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-6, err_msg=name)


def test_a_smaller_batch_is_averaged_with_the_next_one():
    options = {"verbose": 0, "shuffle": False}
    one = embedding(lambda: O.Adagrad(0.1))
    with in_memory_strategy(2, 2, FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            model = embedding(lambda: O.Adagrad(0.1))
        with ClusterCoordinator(strategy, replicas_to_aggregate=2) as coordinator:
            # Each epoch has one batch of 6 rows and one of 2: as weights, each row of the smaller batch counts three
            # times.
            weights = np.float32([1] * 6 + [3] * 2) * 8 / 12
            for rows in (slice(0, 8), slice(8, 16)):
                one.fit(WORDS[rows], Y[rows], batch_size=8, sample_weight=weights, **options)
                model.fit(WORDS[rows], Y[rows], batch_size=6, **options)
                same_state(one, model)
            assert coordinator.statistics()["closures"]["rounds"] == 2


def test_round_continues_in_the_next_epoch(caplog):
    with in_memory_strategy(2, 1) as strategy, ClusterCoordinator(strategy, replicas_to_aggregate=2):
        with strategy.scope():
            model = dense(lambda: O.SGD(0.1))
        model.fit(X[:18], Y[:18], batch_size=6, epochs=1, verbose=0)
        assert int(model.optimizer.iterations.value) == 1
        assert "replicas_to_aggregate is 2" in caplog.text
        model.fit(X[:18], Y[:18], batch_size=6, epochs=1, verbose=0)
        assert int(model.optimizer.iterations.value) == 3
