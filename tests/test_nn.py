"""``rx.nn``: losses whose shares add up to the mean over the global batch. Numbers of TensorFlow: tests/parity."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.functions import nn as nn_module


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_the_default_denominator_is_the_true_global_batch(rows, num_replicas):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    losses = np.arange(1.0, rows + 1, dtype=np.float32)
    (batch,) = list(strategy.experimental_distribute_dataset(rx.data.from_arrays(losses).batch(rows)))
    shares = strategy.run(rx.nn.compute_average_loss, (batch,))
    assert float(strategy.reduce("SUM", shares, axis=None)) == pytest.approx(losses.mean())


def test_sample_weights_and_a_given_batch_size(strategy):
    losses = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    share = strategy.run(
        lambda: rx.nn.compute_average_loss(
            jnp.asarray(losses), sample_weight=np.array([2.0, 0.0], "f"), global_batch_size=10
        )
    )
    assert float(share.values[0]) == pytest.approx((1 + 2) * 2 / 10)


def test_no_rows_give_no_loss():
    assert float(rx.nn.compute_average_loss(np.zeros(0, "f"), global_batch_size=0)) == 0.0


def test_regularisation_is_shared(strategy):
    share = strategy.run(lambda: rx.nn.scale_regularization_loss([jnp.float32(2.0), jnp.float32(4.0)]))
    assert float(strategy.reduce("SUM", share, axis=None)) == 6.0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"per_example_loss": np.float32(1.0)}, rx.errors.InvalidArgumentError, "one loss per example"),
        ({"per_example_loss": np.ones(2), "global_batch_size": -1}, rx.errors.InvalidArgumentError, "-1"),
        ({"per_example_loss": np.ones(2), "global_batch_size": 1.5}, rx.errors.InvalidArgumentError, "int"),
        (
            {"per_example_loss": np.ones(2), "global_batch_size": [2]},
            rx.errors.InvalidArgumentError,
            "scalar",
        ),
    ],
)
def test_bad_arguments_say_what_to_do(arguments, error, words):
    with pytest.raises(error, match=words):
        rx.nn.compute_average_loss(**arguments)


def test_batch_size_is_needed_outside_replica_context(strategy):
    with strategy.scope():
        assert float(rx.nn.compute_average_loss(np.ones(4, "f"), global_batch_size=8)) == 0.5
        with pytest.raises(rx.errors.ReplicaContextError, match="global_batch_size"):
            rx.nn.compute_average_loss(np.ones(4, "f"))
        with pytest.raises(rx.errors.ReplicaContextError, match=r"strategy\.run"):
            rx.nn.scale_regularization_loss(1.0)


def test_gradients_are_summed():
    assert rx.get_loss_reduction() is rx.ReduceOp.SUM


def test_a_global_batch_size_below_the_number_of_losses_is_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(nn_module, "_warned", set())
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def batches(rows, batch_size):
        return strategy.experimental_distribute_dataset(
            rx.data.from_arrays(np.ones(rows, np.float32)).batch(batch_size)
        )

    def loss_of(x, size):
        return rx.nn.compute_average_loss(x, global_batch_size=size)

    with caplog.at_level(logging.WARNING, logger="replicax"):
        for batch in batches(39, 16):  # the last one is partial
            strategy.run(loss_of, args=(batch, 16))
        for batch in batches(16, 8):  # two steps make one update
            strategy.run(loss_of, args=(batch, 16))
        assert not caplog.records
        for batch in batches(32, 16):
            strategy.run(loss_of, args=(batch, 8))
    (record,) = caplog.records
    said = record.getMessage()
    assert "in loss_of: global_batch_size is 8, but there are 16 losses on 2 replicas" in said
    assert "2 times the mean" in said
