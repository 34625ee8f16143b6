"""The comparison with one device remarks on wrong labels."""

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.testing import check_against_one_device

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def batch_of(labels):
    labels = np.asarray(labels, np.int32)
    return np.random.default_rng(0).normal(size=(len(labels), 3)).astype(np.float32), labels


def make_step(strategy, loss_of=LOSS):
    with strategy.scope():
        weights = rx.Variable(np.eye(3, 2, dtype=np.float32), name="weights")

    def by_tape(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(loss_of(y, x @ weights))
        weights.assign_sub(rx.get_replica_context().all_reduce("sum", tape.gradient(loss, weights)))
        return loss

    return weights, by_tape


RIGHT = [0, 1, 1, 0, 1, 0]


def test_comparison_with_one_device_remarks_on_the_labels(strategy):
    _, step = make_step(strategy)
    report = check_against_one_device(step, batch_of([*RIGHT, 2, 3]), strategy)
    assert report.ok, "one device computes the same"
    (told,) = report.remarks
    assert told.startswith(f"2 label(s) at {__file__}:")
    assert f"Note: {told}" in str(report)
    assert not check_against_one_device(step, batch_of(RIGHT), strategy).remarks
