"""Variables on parameter servers: they are read while servers run, tables in blocks of rows, and are restored onto
other servers and shards."""

import tracemalloc
from importlib import import_module

import keras
import numpy as np
import pytest

import replicax as rx
from replicax._ps.placement.server_arrays import ServerArray
from replicax._src.checkpoint import array_chunks, array_files
from replicax._src.checkpoint import array_leaves as leaves
from replicax.errors import CorruptCheckpointError
from replicax.experimental.partitioners import FixedShardsPartitioner
from servers import servers

TABLE = np.random.RandomState(0).randn(101, 8).astype(np.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(leaves, "_BLOCK_BYTES", 10 * 8 * 4)


class Training:
    """A table, layers and their optimizer; their steps run here on the servers' variables."""

    def __init__(self, strategy):
        self.strategy = strategy
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.table = rx.Variable(np.zeros_like(TABLE), name="table")
            self.embedding = keras.layers.Embedding(*TABLE.shape)
            self.dense = keras.layers.Dense(1)
            self.optimizer = keras.optimizers.Adam(0.1)
            self.steps = rx.Variable(0, trainable=False)
        self.checkpoint = rx.Checkpoint(
            table=self.table,
            embedding=self.embedding,
            dense=self.dense,
            optimizer=self.optimizer,
            steps=self.steps,
        )

    def build(self):
        with self.strategy.scope():
            self.embedding.build()
            self.dense.build((None, TABLE.shape[1]))
            self.optimizer.build([*self.embedding.variables, *self.dense.variables])

    def fill(self):
        self.build()
        layers = [*self.embedding.variables, *self.dense.variables, *self.optimizer.variables]
        for number, variable in enumerate(layers):
            variable.assign(np.full(variable.shape, number + 1, variable.dtype))
        self.table.assign(TABLE)
        self.steps.assign(7)

    def variables(self):
        layers = [*self.embedding.variables, *self.dense.variables, *self.optimizer.variables]
        return {"table": self.table, "steps": self.steps} | {str(i): v for i, v in enumerate(layers)}

    def values(self):
        return {name: np.asarray(v) for name, v in self.variables().items()}


def is_on_servers(variable):
    held = variable.shards.held[0] if isinstance(variable, rx.experimental.ShardedVariable) else variable
    return isinstance(held._value, ServerArray)


@pytest.mark.rest
@pytest.mark.parametrize("is_built_before", [True, False])
def test_onto_other_servers_and_shards(is_built_before, tmp_path, monkeypatch):
    strategy = servers(3, FixedShardsPartitioner(2))
    first = Training(strategy)
    first.fill()
    wanted = first.values()
    with monkeypatch.context() as patch:
        refuse_whole_tables(patch, strategy)
        path = first.checkpoint.save(tmp_path / "ckpt")
    assert [entry.name for entry in (tmp_path / "ckpt-1").iterdir() if "table" in entry.name] == []

    other = servers(2, FixedShardsPartitioner(5))
    second = Training(other)
    if is_built_before:
        second.fill()
        second.steps.assign(0)
        with monkeypatch.context() as patch:
            refuse_whole_tables(patch, other)
            second.checkpoint.restore(path).assert_consumed()
    else:
        status = second.checkpoint.restore(path)
        second.build()
        status.assert_consumed()
    assert all(is_on_servers(variable) for variable in second.variables().values())
    for name, value in second.values().items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


def test_table_is_read_and_restored_in_blocks(tmp_path, monkeypatch):
    """The table is larger than the coordinator's part of it at any time."""
    monkeypatch.setattr(leaves, "_BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(array_chunks, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(array_chunks, "FILE_BYTES", 1 << 19)
    monkeypatch.setattr(array_files, "_CACHE_BYTES", 1 << 17)
    monkeypatch.setattr(array_files, "_WINDOW_BYTES", 1 << 19)
    values = np.random.RandomState(0).randn(1 << 17, 32).astype(np.float32)
    with servers(2, FixedShardsPartitioner(2)).scope():
        table = rx.Variable(values, name="table")
    import_module("scipy.linalg")  # JAX imports it with the first exported program, which is not counted
    tracemalloc.start()
    try:
        path = rx.Checkpoint(table=table).save(tmp_path / "ckpt")
        assert tracemalloc.get_traced_memory()[1] < values.nbytes / 2
    finally:
        tracemalloc.stop()
    with servers(3, FixedShardsPartitioner(3)).scope():
        other = rx.Variable(np.zeros_like(values), name="table")
    blocks, read = [], array_files.ArrayReader.read

    def measured(reader, index=(), into=None):
        blocks.append(read(reader, index, into))
        return blocks.pop() if blocks[-1].nbytes <= 1 << 17 else blocks[-1]

    monkeypatch.setattr(array_files.ArrayReader, "read", measured)
    tracemalloc.start()
    try:
        rx.Checkpoint(table=other).restore(path).assert_consumed()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not blocks, "a block is larger than the limit"
    assert peak < values.nbytes / 2
    np.testing.assert_array_equal(other.numpy(), values)

    files = sorted(f for f in (tmp_path / "ckpt-1" / "arrays" / "table").iterdir() if f.name != "zarr.json")
    for breaks in (lambda f: f.write_bytes(bytes(100) + f.read_bytes()[100:]), lambda f: f.write_bytes(b"")):
        breaks(files[3])
        with pytest.raises(CorruptCheckpointError):
            rx.Checkpoint(table=other).restore(path)
        np.testing.assert_array_equal(other.numpy(), values)


def refuse_whole_tables(patch, strategy):
    """Makes reading or assigning a full table raise an error."""
    session = strategy.session
    for name in ("read", "assign"):
        method = getattr(session, name)

        def checked(arrays, *args, method=method):
            one_or_more = arrays if isinstance(arrays, (list, tuple)) else [arrays]
            assert not any(array.is_table for array in one_or_more), "a table travelled whole"
            return method(arrays, *args)

        patch.setattr(session, name, checked)


def test_without_servers_and_back(tmp_path):
    strategy = servers(2, FixedShardsPartitioner(2))
    first = Training(strategy)
    first.fill()
    path = first.checkpoint.save(tmp_path / "ckpt")
    second = Training(rx.OneDeviceStrategy("cpu:0"))
    second.fill()
    second.table.assign(np.zeros_like(TABLE))
    second.checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(second.table, TABLE)
    third = Training(servers(1))
    third.fill()
    third.steps.assign(0)
    third.checkpoint.restore(second.checkpoint.save(tmp_path / "back")).assert_consumed()
    np.testing.assert_array_equal(third.table.numpy(), TABLE)
    assert int(third.steps) == 7
