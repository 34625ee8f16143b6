"""Tables on parameter servers: only the rows that are looked up are sent, both ways, and optimizers update only these."""

import logging

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._ps.store.store import Store
from replicax.errors import UnsupportedError
from replicax.experimental.partitioners import FixedShardsPartitioner
from servers import servers

pytestmark = pytest.mark.rest

NUM_ROWS, DIM = 50, 8
RANDOM = np.random.RandomState(0)
IDS = RANDOM.randint(0, NUM_ROWS // 2, (8, 3)).astype(
    np.int32
)  # the later half of the rows is never looked up
Y = RANDOM.randn(8, 1).astype(np.float32)
LOOKED_UP = np.unique(IDS)
UNTOUCHED = np.setdiff1d(np.arange(NUM_ROWS), LOOKED_UP)
O = keras.optimizers  # noqa: E741


def trained(strategy, make_optimizer, run, steps=3, regularizer=None, more_loss=lambda table, ids: 0.0):
    """All variables of model and optimizer after some steps, by name; and the embeddings before."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(NUM_ROWS, DIM, name="table", embeddings_regularizer=regularizer),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)
    before = np.asarray(model.layers[0].embeddings.value)

    def step(ids, y):
        def replica_fn(ids, y):
            with rx.GradientTape() as tape:
                loss = jnp.mean((model(ids, training=True) - y) ** 2) + sum(model.losses)
                loss += more_loss(model.layers[0], ids)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        return strategy.run(replica_fn, args=(ids, y))

    for _ in range(steps):
        run(step, IDS, Y)
    return {v.path: np.asarray(v.value) for v in [*model.variables, *optimizer.variables]}, before


def on_servers(make_optimizer, **options):
    """Like ``trained``, in three shards on two servers; and the rows that these have sent in training."""
    stores = [Store(), Store()]
    strategy = servers(2, FixedShardsPartitioner(3), stores)
    values, before = trained(strategy, make_optimizer, strategy.run_here, **options)
    return values, before, sum(store.statistics()["rows_sent"] for store in stores)


def on_one_device(make_optimizer, **options):
    return trained(rx.OneDeviceStrategy("cpu:0"), make_optimizer, lambda fn, *args: fn(*args), **options)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(lambda: O.SGD(0.1), marks=pytest.mark.long),
        lambda: O.Adagrad(0.1),
        pytest.param(lambda: O.LossScaleOptimizer(O.SGD(0.1)), marks=pytest.mark.long),
        pytest.param(lambda: O.SGD(0.1, global_clipnorm=0.01), marks=pytest.mark.long),
        pytest.param(lambda: O.Adagrad(0.1, clipvalue=0.01), marks=pytest.mark.long),
    ],
    ids=["sgd", "adagrad", "loss scale", "global_clipnorm", "clipvalue"],
)
def test_optimizers_that_keep_unused_rows_equal_one_device(make_optimizer):
    found, _, sent = on_servers(make_optimizer)
    expected, _ = on_one_device(make_optimizer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert sent == 3 * len(LOOKED_UP)  # each once a step, however often it is looked up


def test_adam_updates_rows_and_slots_only_when_looked_up():
    found, before, sent = on_servers(lambda: O.Adam(0.01))
    expected, _ = on_one_device(lambda: O.Adam(0.01))
    assert sent == 3 * len(LOOKED_UP)
    for name, value in expected.items():
        rows = LOOKED_UP if value.shape == (NUM_ROWS, DIM) else ...  # looked up in every step
        np.testing.assert_allclose(found[name][rows], value[rows], rtol=0, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(found["sequential/table/embeddings"][UNTOUCHED], before[UNTOUCHED])
    for name in found:
        if "momentum" in name and found[name].shape == (NUM_ROWS, DIM):
            assert not found[name][UNTOUCHED].any()


def test_ftrl_and_weight_decay_do_not_change_rows_that_are_not_looked_up():
    """On one device they change; here they do not."""
    for make_optimizer in (lambda: O.Ftrl(0.1), lambda: O.AdamW(0.01, weight_decay=0.1)):
        found, before, _ = on_servers(make_optimizer, steps=1)
        expected, _ = on_one_device(make_optimizer, steps=1)
        name = "sequential/table/embeddings"
        np.testing.assert_array_equal(found[name][UNTOUCHED], before[UNTOUCHED])
        assert np.abs(expected[name][UNTOUCHED] - before[UNTOUCHED]).min() > 0


@pytest.mark.parametrize(
    ("make_optimizer", "says"),
    [
        (lambda: O.SGD(0.1, use_ema=True), "use_ema=True: the averages of rows that a step does not look up"),
        (lambda: O.SGD(0.1, gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
        (lambda: O.Lamb(0.1), "Lamb"),
    ],
    ids=["ema", "accumulation", "lamb"],
)
def test_options_without_meaning_for_some_rows_raise(make_optimizer, says):
    message(UnsupportedError, lambda: on_servers(make_optimizer), "sequential/table/embeddings", says)


def tied_output(table, ids):
    """The embeddings, which are also the output's weights, distinguish the ids."""
    logits = table(ids[:, 0]) @ table.embeddings.value.T
    return jnp.mean(keras.losses.sparse_categorical_crossentropy(ids[:, 0], logits, from_logits=True))


@pytest.mark.parametrize(
    "options", [{"regularizer": "l2"}, {"more_loss": tied_output}], ids=["l2", "tied output"]
)
def test_fully_needed_table_is_sent_in_full_with_one_warning(caplog, options):
    with caplog.at_level(logging.WARNING, logger="replicax"):
        found, _, sent = on_servers(lambda: O.Adam(0.01), **options)
    expected, _ = on_one_device(lambda: O.Adam(0.01), **options)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert sent == 0
    (record,) = [r for r in caplog.records if "is sent to the workers in full" in r.getMessage()]
    assert "'sequential/table/embeddings'" in record.getMessage()


def test_small_unsharded_variables_are_not_tables():
    store = Store()
    strategy = servers(1, None, [store])
    found, _ = trained(strategy, lambda: O.Adam(0.01), strategy.run_here)
    expected, _ = on_one_device(lambda: O.Adam(0.01))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert store.statistics()["rows_sent"] == 0


@pytest.mark.parametrize("shards", [1, 2], ids=["whole", "in shards"])
def test_a_batch_of_no_rows_is_a_step(shards):
    def trained(strategy, run):
        with strategy.scope():
            tables = [keras.Variable(np.ones((6, 2), np.float32)) for _ in range(2)]
            unused = keras.Variable(np.ones((6, 2), np.float32))
            optimizer = O.SGD(0.1, momentum=0.9)
            optimizer.build([*tables, unused])

        def step(ids):
            with rx.GradientTape() as tape:
                loss = sum(jnp.sum(rx.nn.embedding_lookup(table, ids) ** 2) for table in tables)
            *gradients, of_unused = tape.gradient(loss, [*tables, unused])
            optimizer.apply(gradients, tables)
            return loss, of_unused is None

        results = [run(step, np.arange(n, dtype=np.int32)) for n in (0, 3, 0)]
        assert all(is_none for _, is_none in results)
        return [loss for loss, _ in results], int(optimizer.iterations.value), np.asarray(tables[1].value)

    one_device = rx.OneDeviceStrategy("cpu:0")
    strategy = servers(2, FixedShardsPartitioner(shards))
    losses, iterations, table = trained(strategy, strategy.run_here)
    assert (losses, iterations) == ([0, 12, 0], 3)
    if shards == 1:  # momentum moves all rows of it, and of a table those only that are looked up
        table_of_one = trained(one_device, lambda fn, ids: one_device.run(fn, (ids,)))[2]
        np.testing.assert_allclose(table, table_of_one)
    else:
        np.testing.assert_allclose(table[:, 0], [0.8, 0.8, 0.8, 1, 1, 1])
