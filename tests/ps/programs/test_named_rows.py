"""Programs of parameter servers say which rows they change, and change no others: snapshots rely on this."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._ps.store import changed_rows
from replicax._ps.store.store import Store
from replicax._ps.store.store_contents import StoreContents
from replicax.experimental.partitioners import FixedShardsPartitioner
from servers import servers

ROWS, COLUMNS = 1000, 8
IDS = np.array([[3, 999], [3, 500]], np.int32)
O = keras.optimizers  # noqa: E741


@pytest.fixture
def named(monkeypatch):
    """For each update, by shard, whether it named the rows that it changes; the test checks that it changes no others."""
    seen, apply = [], StoreContents._apply

    def checked(self, update, state, operands):
        before = {shard.key: shard.view().copy() for shard in state}
        apply(self, update, state, operands)
        told = {}
        for at, rows in zip(update.program.written, update.rows(operands), strict=True):
            shard = state[at]
            told[shard.key] = rows is not None
            if rows is not None:
                others = np.ones(len(before[shard.key]), bool)
                for numbers in rows:
                    others[numbers[(numbers >= 0) & (numbers < len(others))]] = False
                np.testing.assert_array_equal(shard.view()[others], before[shard.key][others])
        seen.append(told)

    monkeypatch.setattr(StoreContents, "_apply", checked)
    return seen


def of_tables(seen):
    """True if all updates of tables and of their bindings named their rows; and the updates."""
    told = [(key, is_named) for each in seen for key, is_named in each.items() if "embeddings" in key]
    return all(is_named for _, is_named in told), {key for key, _ in told}


OPTIMIZERS = [
    lambda: O.SGD(0.1, momentum=0.9),
    pytest.param(lambda: O.Adagrad(0.1), marks=pytest.mark.long),
    lambda: O.Adam(0.1),
    pytest.param(lambda: O.AdamW(0.1, clipvalue=0.1), marks=pytest.mark.long),
    pytest.param(lambda: O.Ftrl(0.1), marks=pytest.mark.long),
    pytest.param(lambda: O.Nadam(0.1), marks=pytest.mark.long),
]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_rows_of_tables_and_their_slots(make_optimizer, named, tmp_path, monkeypatch):
    monkeypatch.setattr(changed_rows, "MIN_TRACKED_BYTES", 0)
    stores = [Store(), Store()]
    strategy = servers(2, FixedShardsPartitioner(3), stores)
    with strategy.scope():
        table = keras.layers.Embedding(ROWS, COLUMNS)
        table.build()
        bias = rx.Variable(np.zeros(COLUMNS, np.float32))
        optimizer = make_optimizer()
        optimizer.build(table.trainable_variables)

    def step(ids):
        def replica_fn(ids):
            with rx.GradientTape() as tape:
                loss = jnp.mean((table(ids) - 1) ** 2)
            gradients = tape.gradient(loss, table.trainable_variables)
            optimizer.apply_gradients(zip(gradients, table.trainable_variables))
            bias.assign_add(jnp.ones(COLUMNS))

        strategy.run(replica_fn, args=(ids,))

    strategy.run_here(step, IDS)
    sizes = [store.snapshot(tmp_path / str(n))["bytes"] for n, store in enumerate(stores)]
    named.clear()
    strategy.run_here(step, IDS)
    all_named, keys = of_tables(named)
    assert all_named
    assert len(keys) >= 3
    for number, store in enumerate(stores):
        told = store.snapshot(tmp_path / str(number))
        assert not told["is_base"]
        assert told["bytes"] < sizes[number] / 2
        again = Store()
        again.restore(tmp_path / str(number))
        for key, shard in store._contents.shards.items():
            assert again._contents.shards[key].view().tobytes() == shard.view().tobytes()


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.rest
def test_rows_of_assignments(is_whole, named):
    strategy = servers(2, None if is_whole else FixedShardsPartitioner(3))
    with strategy.scope():
        variable = rx.Variable(np.zeros((ROWS, COLUMNS), np.float32), name="v")

    def assign(how):
        def fn(ids, x):
            value = variable.read_value()
            variable.assign(how(value, ids, x))

        named.clear()
        strategy.run_here(fn, np.array([1, 999, -1, 2000], np.int32), np.float32(2))
        return all(is_named for each in named for is_named in each.values())

    assert assign(lambda v, ids, x: v.at[ids].set(x))
    assert assign(lambda v, ids, x: v.at[ids].add(x).at[ids + 3].mul(x))
    assert assign(lambda v, ids, x: v.at[ids, 3].add(x))
    assert assign(lambda v, ids, x: v.at[ids[0]].set(x))
    assert not assign(lambda v, ids, x: v.at[ids].set(x) * 2)
    assert not assign(lambda v, ids, x: v + x)
