"""The differences from TensorFlow that the page on migrating states."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax.errors import NarrowingError, UnsupportedError


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def test_strategies_are_not_subclassed(strategy):
    class Mine(rx.Strategy):
        def __init__(self):
            super().__init__(rx.StrategyExtended(self))

    message(UnsupportedError, Mine, "Mine: strategies cannot be subclassed", "cross_device_ops", "layout_map")
    message(
        UnsupportedError, lambda: rx.Strategy(strategy.extended), "Strategy: strategies cannot be subclassed"
    )
    message(
        UnsupportedError, lambda: type("Extended", (rx.StrategyExtended,), {}), "Extended: strategies cannot"
    )


def test_subclass_of_a_named_strategy_may_choose_its_arguments():
    """TensorFlow's way of changing what a strategy does, with a StrategyExtended, is what is refused."""

    class Mine(rx.MirroredStrategy):  # type: ignore[misc]  # it is final for type checkers
        def __init__(self):
            super().__init__(["cpu:0", "cpu:1"])

    strategy = Mine()
    assert strategy.num_replicas_in_sync == 2
    assert strategy.reduce("SUM", strategy.run(lambda: jnp.float32(1)), axis=None) == 2


def test_variables_have_one_name_and_are_not_distributed_values(strategy):
    with strategy.scope():
        variable, of_keras = rx.Variable(1.0, name="v"), keras.Variable(1.0, name="v")
    assert (variable.name, of_keras.name) == ("v", "v")
    assert not isinstance(variable, rx.DistributedValues)
    assert isinstance(variable, rx.Variable)
    assert isinstance(strategy.run(lambda: np.ones(2)), rx.DistributedValues)
    component = variable.values[1]
    assert strategy.extended.value_container(component) is component


def test_options_are_dataclasses():
    assert dataclasses.replace(rx.RunOptions(), eager=True) == rx.RunOptions(eager=True)
    changed = dataclasses.replace(rx.InputOptions(), experimental_per_replica_buffer_size=3)
    assert changed.experimental_per_replica_buffer_size == 3


def test_integers_have_32_bits(strategy):
    assert rx.Variable(np.int64(7)).dtype == np.int32
    assert strategy.run(lambda: np.arange(3)).values[0].dtype == np.int32
    message(NarrowingError, lambda: rx.Variable(np.int64(2**40)), "1099511627776", "jax_enable_x64")
    with pytest.warns(UserWarning, match="int64 requested"):
        assert rx.Variable(0, dtype="int64").dtype == np.int32


def test_source_without_files_is_logged_at_info(strategy, caplog):
    def batches():
        yield np.ones((2, 3))

    with caplog.at_level(logging.INFO, logger="replicax"):
        next(iter(strategy.experimental_distribute_dataset(batches())))
    levels = {record.levelname for record in caplog.records if "policy" in record.getMessage()}
    assert levels == {"INFO"}


def test_devices_of_a_platform_that_is_not_there():
    assert [d for d in jax.local_devices() if d.platform == "gpu"] == []
    with pytest.raises(RuntimeError, match="gpu"):
        jax.local_devices(backend="gpu")


def test_a_saved_model_needs_tensorflow(strategy, tmp_path):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ImportError, match="tensorflow"):
        model.export(tmp_path / "exported", verbose=False)
    assert rx.Checkpoint(model=model).write(tmp_path / "checkpoint")
