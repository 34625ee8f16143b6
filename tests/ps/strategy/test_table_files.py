"""Tables on parameter servers that are saved, loaded and looked up in blocks of rows."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._ps.placement import table_files
from replicax.errors import InvalidArgumentError
from replicax.experimental import load_table, save_table
from replicax.experimental.partitioners import FixedShardsPartitioner
from servers import servers

SHAPE = (101, 8)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(table_files, "_BLOCK_BYTES", 10 * 8 * 4)


@pytest.fixture
def strategy(monkeypatch):
    """A strategy in which no table can be read or assigned in full."""
    strategy = servers(3, FixedShardsPartitioner(2))

    def whole(*args):
        raise AssertionError("a table travelled whole")

    monkeypatch.setattr(strategy.session, "read", whole)
    monkeypatch.setattr(strategy.session, "assign", whole)
    return strategy


def variable(strategy, value):
    return rx.Variable(value)


def of_keras(strategy, value):
    table = keras.layers.Embedding(*value.shape, embeddings_initializer=lambda shape, dtype: value)
    table.build()
    return table.embeddings


@pytest.mark.parametrize("make", [variable, of_keras])
def test_saved_table_is_loaded_into_other_shards(strategy, make, tmp_path, caplog):
    values = np.random.RandomState(0).randn(*SHAPE).astype(np.float32)
    with strategy.scope():
        table = make(strategy, values)
    path = tmp_path / "table.npy"
    save_table(table, path)
    np.testing.assert_array_equal(np.load(path), values)
    assert [file.name for file in tmp_path.iterdir()] == ["table.npy"]

    other = servers(2, FixedShardsPartitioner(5))
    with other.scope():
        loaded = make(other, np.zeros_like(values))
    load_table(loaded, path)
    ids = np.array([[100, 0], [7, 50]])
    np.testing.assert_array_equal(rx.nn.embedding_lookup(loaded, ids), values[ids])
    np.testing.assert_array_equal(np.asarray(loaded.value), values)
    assert not caplog.records


def test_bfloat16_is_loaded_only_as_bfloat16(strategy, tmp_path):
    values = jnp.arange(101 * 8, dtype=jnp.bfloat16).reshape(SHAPE)
    with strategy.scope():
        table, loaded, half = (rx.Variable(v) for v in (values, 0 * values, values.astype(jnp.float16)))
    path = tmp_path / "table.npy"
    save_table(table, path)
    load_table(loaded, path)
    np.testing.assert_array_equal(rx.nn.embedding_lookup(loaded, range(101)), values)
    message(InvalidArgumentError, lambda: load_table(half, path), "float16")


def test_rows_are_looked_up_outside_functions(strategy):
    values = np.arange(101 * 8, dtype=np.float32).reshape(SHAPE)
    with strategy.scope():
        tables = variable(strategy, values), of_keras(strategy, values)
    for table in tables:
        np.testing.assert_array_equal(rx.nn.embedding_lookup(table, [5, 100, 5]), values[[5, 100, 5]])
        assert rx.nn.embedding_lookup(table, []).shape == (0, 8)
        message(InvalidArgumentError, lambda table=table: rx.nn.embedding_lookup(table, [101]), "[0, 101)")


def test_unsupported_values(strategy, tmp_path):
    path = tmp_path / "table.npy"
    for value in (np.zeros(SHAPE), rx.Variable(np.zeros(SHAPE)), 3):
        message(
            InvalidArgumentError, lambda value=value: save_table(value, path), "Tables on parameter servers"
        )
    np.save(path, np.zeros((101, 7), np.float32))
    with strategy.scope():
        table = rx.Variable(np.zeros(SHAPE, np.float32), name="w")
    message(InvalidArgumentError, lambda: load_table(table, path), "(101, 7)", "'w' is (101, 8)")
