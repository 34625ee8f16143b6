"""``jax.checkpoint`` and Keras's ``RematScope``, with mixed precision: the same numbers in less memory."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close, tpu_strategy
from replicax._src.tracing import gathers

CPUS = [f"cpu:{i}" for i in range(4)]
REST = pytest.mark.rest
WIDTH, DEPTH = 64, 4
RANDOM = np.random.default_rng(0)
WEIGHTS = [RANDOM.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(DEPTH)]
HALF = rx.Precision("bfloat16")


def block(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return x


def trained(strategy, rows, *, remat, how="run", number=1, half=False, is_scanned=False):
    """One step. Returns the loss, the variables, and the bytes of temporaries of the program of ``run``."""
    x = np.random.default_rng(1).normal(size=(rows, WIDTH)).astype(np.float32)
    with strategy.scope():
        initial = [np.stack(WEIGHTS)] if is_scanned else WEIGHTS
        weights = [rx.Variable(w, name=f"w{i}") for i, w in enumerate(initial)]
    layer = HALF(block) if half else block
    layer = jax.checkpoint(layer) if remat else layer

    @rx.experimental.accumulate(number)
    def gradients_of(x):
        with rx.GradientTape() as tape:
            y = x
            if is_scanned:
                y, _ = jax.lax.scan(lambda y, w: (layer(w, y), None), y, weights[0].value)
            else:
                for w in weights:
                    y = layer(w.value, y)
            loss = jnp.sum(y**2)
        return (loss, tape.gradient(loss, weights)), len(x)

    def step(x):
        loss, gradients = gradients_of(x)
        for w, g in zip(weights, rx.get_replica_context().all_reduce("SUM", gradients), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    def total(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(x).batch(rows))
    if how == "steps":
        loss = np.asarray(strategy.reduce("SUM", strategy.run_steps(step, iter(dataset), 1), axis=None))[0]
    else:
        (batch,) = dataset
        loss = (rx.function(total) if how == "function" else total)(batch)
    temporaries = None
    if how == "run":
        compiled = strategy.runner.last_launcher.lower([batch.stored]).compile()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
    return float(loss), [np.asarray(w.value) for w in weights], temporaries


SETTINGS = [
    (False, {}, 1, False, 26),
    (True, {}, 1, False, 26),
    (False, {"shard_state": "all"}, 3, False, 26),
    (True, {"shard_state": "all"}, 3, False, 26),
    (False, {"shard_state": "all"}, 2, True, 24),
    (True, {"shard_state": "all"}, 2, True, 24),
]


def marks_of(how, setting):
    """The first setting and the last one, which has all, are trained in every way, the others by ``run``."""
    if setting in (SETTINGS[0], SETTINGS[-1]):
        return [REST] * (how != "run")
    return [REST if how == "run" else pytest.mark.long]


@pytest.mark.parametrize(
    ("is_scanned", "options", "number", "half", "rows", "how"),
    [
        pytest.param(*setting, how, marks=marks_of(how, setting))
        for how in ("run", "function", "steps")
        for setting in SETTINGS
    ],
)
def test_numbers_are_those_without_remat(is_scanned, how, options, number, half, rows, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    expected = trained(
        rx.MirroredStrategy(CPUS), rows, remat=False, number=number, half=half, is_scanned=is_scanned
    )
    got = trained(
        rx.MirroredStrategy(CPUS, **options), rows, remat=True, how=how, number=number, half=half, is_scanned=is_scanned
    )  # fmt: skip
    rtol, atol = (
        (0.02, 0.02) if half else (1e-4, 1e-5)
    )  # bfloat16 has 8 bits; fused operations round less often
    assert_close(got[:2], expected[:2], rtol, atol)


@pytest.mark.parametrize(
    ("options", "number"),
    [({}, 1), pytest.param({"shard_state": "all"}, 1, marks=REST), ({"shard_state": "all"}, 2)],
)
def test_remat_needs_less_memory(options, number, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    rows = 4096
    sizes = [
        trained(rx.MirroredStrategy(CPUS[:2], **options), rows, remat=remat, number=number, is_scanned=True)[
            2
        ]
        for remat in (False, True)
    ]
    # Without it, 4 activations of each of 4 layers are kept; with it, 1 of each layer and 4 of one.
    activation = rows // 2 // number * WIDTH * 4
    assert sizes[0] - sizes[1] > 5 * activation, sizes


@pytest.mark.parametrize("number", [1, 2])
def test_on_logical_devices(number):
    layouts = {f"w{i}": (None, "logical") for i in range(DEPTH)}
    expected = trained(rx.MirroredStrategy(CPUS[:2]), 12, remat=False, number=number)
    strategy = tpu_strategy(2, 2, layout_map=rx.experimental.LayoutMap(layouts))
    got = trained(strategy, 12, remat=True, number=number)
    assert_close(got[:2], expected[:2], 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("number", "half", "rows"),
    [pytest.param(1, False, 26, marks=REST), pytest.param(3, False, 26, marks=REST), (2, True, 24)],
)
@pytest.mark.parametrize("is_scanned", [pytest.param(False, marks=REST), True], ids=["unrolled", "scanned"])
def test_sharded_over_replicas_and_in_each_replica(number, half, rows, is_scanned, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    spec = (None, None, "logical") if is_scanned else (None, "logical")
    layouts = rx.experimental.LayoutMap({f"w{i}": spec for i in range(1 if is_scanned else DEPTH)})
    options = {"number": number, "half": half, "is_scanned": is_scanned}
    expected = trained(rx.MirroredStrategy(CPUS), rows, remat=False, **options)
    strategy = rx.MirroredStrategy(
        [f"cpu:{i}" for i in range(8)], devices_per_replica=2, layout_map=layouts, shard_state="all"
    )
    got = trained(strategy, rows, remat=True, **options)
    assert_close(got[:2], expected[:2], *((0.02, 0.02) if half else (1e-4, 1e-5)))  # bfloat16 has 8 bits


TWO_DIMENSIONS = {
    "devices_per_replica": 2,
    "layout_map": {"hidden[02].*/kernel": (None, "logical"), "hidden1/kernel": ("logical",)},
    "shard_state": "all",
}


def strategy_of(options):
    """Four replicas, each of them of one device or of two."""
    return rx.MirroredStrategy(None if "devices_per_replica" in options else CPUS, **options)


def fitted(strategy, *, remat, policy="float32", accumulation=None):
    keras.utils.set_random_seed(0)
    with strategy.scope(), keras.RematScope(mode="full" if remat else None):
        layers = [keras.layers.Dense(WIDTH, "tanh", dtype=policy, name=f"hidden{i}") for i in range(3)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1, dtype="float32")])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation), "mse")
    x = np.random.default_rng(1).normal(size=(29, WIDTH)).astype(np.float32)
    model.fit(x, x[:, :1], batch_size=8, epochs=1, shuffle=False, verbose=0)
    return [np.asarray(v.value) for v in model.weights]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"shard_state": "all"}, marks=REST), TWO_DIMENSIONS],
    ids=["mirrored", "sharded", "two_dimensions"],
)
@pytest.mark.parametrize(
    ("policy", "accumulation"), [("float32", None), pytest.param("mixed_bfloat16", 2, marks=REST)]
)
def test_remat_scope_in_fit(options, policy, accumulation, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    expected = fitted(rx.OneDeviceStrategy("cpu:0"), remat=False, policy=policy, accumulation=accumulation)
    got = fitted(strategy_of(options), remat=True, policy=policy, accumulation=accumulation)
    rtol, atol = (1e-5, 1e-5) if policy == "float32" else (0.02, 0.02)  # bfloat16 has 8 bits
    assert_close(got, expected, rtol, atol)
