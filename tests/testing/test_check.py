"""``check_against_one_device``: right programs agree, mistakes are named with their factor, and nothing is changed."""

import itertools
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import replicax as rx
from replicax import errors
from replicax.testing import check_against_one_device

pytestmark = pytest.mark.rest

RATE = 0.125


def make_strategy(num_replicas, kind="mirrored"):
    devices = [f"cpu:{i}" for i in range(num_replicas)]
    return rx.CentralStorageStrategy(devices) if kind == "central_storage" else rx.MirroredStrategy(devices)


def rows(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 3)).astype(np.float32)
    return x, (x @ np.array([[1.0], [2.0], [-1.0]]) + 0.5).astype(np.float32)


class Linear:
    """A linear model of ``rx.Variable``s, and a step that takes the loss of a function."""

    def __init__(self, strategy, loss_of, combine=rx.ReduceOp.SUM):
        self.strategy = strategy
        self.loss_of = loss_of
        self.combine = combine
        with strategy.scope():
            self.w = rx.Variable(np.array([[0.5], [0.25], [1.0]], np.float32), name="w")
            self.b = rx.Variable(np.zeros(1, np.float32), name="b")

    def step(self, batch):
        """Gradients are combined and applied by hand."""
        x, y = batch
        with rx.GradientTape() as tape:
            loss = self.loss_of(jnp.square(x @ self.w.value + self.b.value - y)[:, 0])
        gradients = tape.gradient(loss, [self.w, self.b])
        gradients = rx.get_replica_context().all_reduce(self.combine, gradients)
        for variable, gradient in zip((self.w, self.b), gradients, strict=True):
            variable.assign_sub(RATE * gradient)
        return loss

    @property
    def values(self):
        return [np.array(v.value) for v in (self.w, self.b)]


LOSSES = {"right": rx.nn.compute_average_loss, "mean": jnp.mean}


def entries(report, kind=None):
    return {entry.name: entry for entry in report.differences if kind in (None, entry.kind)}


# --- programs that are right --------------------------------------------------------------------------


# Equal numbers of rows, different numbers of rows, and fewer rows than replicas.
SHORT = {
    ("mirrored", 12, 2),
    ("mirrored", 7, 1),
    ("mirrored", 7, 3),
    ("mirrored", 1, 4),
    ("central_storage", 7, 2),
    ("central_storage", 1, 2),
}


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_replicas"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case not in SHORT))
        for case in itertools.product(("mirrored", "central_storage"), (12, 7, 1), (1, 2, 3, 4))
    ],
)
@pytest.mark.quick
def test_a_right_program_agrees(kind, num_replicas, num_rows):
    model = Linear(make_strategy(num_replicas, kind), rx.nn.compute_average_loss)
    report = check_against_one_device(model.step, rows(num_rows), model.strategy)
    assert report.ok, report
    assert report.num_compared == 3
    assert sum(report.rows) == num_rows
    assert len(report.rows) == num_replicas
    report.raise_if_different()


def test_with_one_replica_every_program_agrees():
    model = Linear(make_strategy(1), jnp.mean)
    assert check_against_one_device(model.step, rows(5), model.strategy).ok


def test_one_device_and_the_default_strategy():
    for strategy in (rx.OneDeviceStrategy("cpu:3"), rx.get_strategy()):
        model = Linear(strategy, jnp.mean)
        assert check_against_one_device(model.step, rows(5), strategy).ok


def test_num_replicas_in_sync_is_one_on_one_device():
    """Also for a strategy in the function's closure, for every form of the question."""
    strategy = make_strategy(2)
    seen = []

    def step(batch):
        x, _ = batch
        seen.append(
            (
                strategy.num_replicas_in_sync,
                rx.get_strategy().num_replicas_in_sync,
                rx.get_replica_context().num_replicas_in_sync,
                len(strategy.extended.worker_devices),
                rx.get_strategy() is strategy,
            )
        )
        return jnp.mean(x) / strategy.num_replicas_in_sync

    assert check_against_one_device(step, rows(8), strategy).ok
    assert set(seen) == {(2, 2, 2, 2, True), (1, 1, 1, 1, True)}
    assert strategy.num_replicas_in_sync == 2


def test_merge_call_and_collectives_work_on_one_device():
    strategy = make_strategy(3)

    def step(x):
        replica = rx.get_replica_context()
        total = replica.merge_call(lambda s, v: s.reduce("SUM", v, axis=None), args=(jnp.sum(x, axis=0),))
        every = replica.all_gather(x, axis=0)
        return {"total": total, "all": every, "rows": x * 2, "count": x.shape[0]}

    report = check_against_one_device(step, np.arange(14, dtype=np.float32).reshape(7, 2), strategy)
    assert report.ok, report
    assert report.num_compared == 4


def test_a_step_that_calls_run_itself():
    strategy = make_strategy(2)
    right, wrong = Linear(strategy, rx.nn.compute_average_loss), Linear(strategy, jnp.mean)

    @rx.function
    def train_step(batch):
        losses = strategy.run(right.step, args=(batch,))
        return strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)

    def bad_step(batch):
        losses = strategy.run(wrong.step, args=(batch,))
        return strategy.reduce("SUM", losses, axis=None)

    before = [*right.values, *wrong.values]
    assert check_against_one_device(train_step, rows(7), strategy).ok
    report = check_against_one_device(bad_step, rows(8), strategy)
    found = entries(report)
    assert set(found) == {"w", "b", "result"}
    assert found["result"].kind == "loss"
    assert found["result"].factor == pytest.approx(2)
    np.testing.assert_array_equal(
        np.concatenate(before, axis=None), np.concatenate([*right.values, *wrong.values], axis=None)
    )


def test_functional_state_goes_in_args():
    strategy = make_strategy(2)
    optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.adam(1e-3))
    params = {"w": jnp.ones((3, 1)), "b": jnp.zeros(1)}
    state = strategy.replicate((params, optimizer.init(params)))

    def step(batch, state, *, loss_of=rx.nn.compute_average_loss):
        x, y = batch
        params, bindings = state

        def loss_fn(params):
            return loss_of(jnp.square(x @ params["w"] + params["b"] - y)[:, 0])

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, bindings = optimizer.update(gradients, bindings, params)
        return loss, (optax.apply_updates(params, updates), bindings)

    assert check_against_one_device(step, rows(7), strategy, args=(state,)).ok
    wrong = lambda batch, state: step(batch, state, loss_of=jnp.mean)  # noqa: E731
    for given in (state, (params, optimizer.init(params))):
        report = check_against_one_device(wrong, rows(8), strategy, args=(given,))
        gradients = entries(report, "gradient")
        assert set(gradients) == {"['w']", "['b']"}
        assert all(entry.factor == pytest.approx(2, rel=1e-4) for entry in gradients.values())
        moments = {
            name: e.factor for name, e in entries(report, "output").items() if "mu" in name or "nu" in name
        }
        assert sorted(round(f, 2) for f in moments.values()) == [2, 2, 4, 4]
    np.testing.assert_array_equal(np.asarray(state[0]["w"]), np.ones((3, 1)))


@pytest.mark.quick
def test_plain_state_that_comes_back_is_compared_by_its_change():
    """A tiny learning rate hides nothing; the factor is that of the change."""
    strategy = make_strategy(2)

    def step(batch, w):
        x, y = batch
        gradient = jax.grad(lambda w: jnp.mean(jnp.square(x @ w - y)))(w)
        return w - 1e-3 * rx.get_replica_context().all_reduce("SUM", gradient)

    report = check_against_one_device(step, rows(8), strategy, args=(jnp.ones((3, 1)),))
    (entry,) = report.differences
    assert (entry.kind, entry.factor) == ("output", pytest.approx(2, rel=1e-3))


@pytest.mark.parametrize(
    ("replicate", "num_rows"),
    [
        (False, 8),
        pytest.param(False, 7, marks=pytest.mark.long),
        pytest.param(True, 8, marks=pytest.mark.long),
        (True, 7),
    ],
)
def test_typed_random_keys_go_in_args_and_come_back(num_rows, replicate):
    """Also inside functional state, and from the closure."""
    strategy = make_strategy(2)
    key, scale = jax.random.key(1), jax.random.key(2)
    state = {"w": jnp.ones((3, 1)), "key": jax.random.key(3, impl="rbg")}
    given = strategy.replicate((key, state)) if replicate else (key, state)
    closed_over = strategy.replicate(scale) if replicate else scale

    def step(batch, key, state):
        x, _ = batch
        key, drawn = jax.random.split(key)
        loss = rx.nn.compute_average_loss(x[:, 0] * jax.random.normal(drawn) * jax.random.normal(closed_over))
        kept = {"w": state["w"] + 1, "key": jax.random.fold_in(state["key"], 5)}
        return loss, key, kept, jax.random.split(key, 3)

    report = check_against_one_device(step, rows(num_rows), strategy, args=given)
    assert report.ok, report
    assert (report.num_compared, report.not_compared) == (5, ())


def test_differing_random_keys_are_reported():
    strategy = make_strategy(2)
    key = jax.random.key(1)

    def run(fn):
        return check_against_one_device(fn, rows(8), strategy, args=(key,))

    (entry,) = run(lambda b, k: jax.random.fold_in(k, strategy.num_replicas_in_sync)).differences
    assert (entry.kind, entry.name, entry.shape, entry.factor) == ("output", "result", (2,), None)
    assert "made from another key" in entry.hint
    assert run(lambda b, k: jnp.broadcast_to(k, b[0].shape[:1])).ok  # a key for each row
    (entry,) = run(lambda b, k: jax.random.split(k, b[0].shape[0])).differences
    assert entry.shape == (8, 2)
    (entry,) = run(lambda b, k: jnp.broadcast_to(k, (3, b[0].shape[0]))).differences
    assert "(3, 4, 2)" in entry.hint
    own = run(lambda b, k: {"k": jax.random.fold_in(k, rx.get_replica_context().replica_id_in_sync_group)})
    assert own.ok
    assert own.num_compared == 0
    assert own.not_compared == (
        "result['k']: each replica returns random keys of its own, and one device has those of one replica.",
    )


@pytest.mark.parametrize("num_rows", [pytest.param(8, marks=pytest.mark.long), 7])
def test_python_numbers_that_replicas_return_are_compared_like_arrays(num_rows):
    strategy = make_strategy(2)

    def step(batch, as_number=lambda number: number):
        num = batch[0].shape[0]
        found = {"rows": num, "share": num / num_rows, "same": 3, "true": num > 0, "text": "x", "none": None}
        return {k: as_number(v) if isinstance(v, (int, float)) else v for k, v in found.items()}

    def inside(batch):
        return strategy.run(step, args=(batch,))

    for fn in (step, inside, lambda batch: step(batch, jnp.asarray)):
        report = check_against_one_device(fn, rows(num_rows), strategy)
        assert report.ok, report
        assert report.num_compared == 4

    def wrong(batch):
        return strategy.num_replicas_in_sync, strategy.num_replicas_in_sync * 1.5

    for fn in (wrong, lambda batch: jax.tree.map(jnp.asarray, wrong(batch))):
        report = check_against_one_device(fn, rows(num_rows), strategy)
        assert {name: e.kind for name, e in entries(report).items()} == {
            "result[0]": "output",
            "result[1]": "loss",
        }


def test_outputs_per_example_are_compared_one_after_the_other():
    strategy = make_strategy(2)
    batch = rows(7)
    assert check_against_one_device(lambda b: b[0] @ np.ones((3, 2), np.float32), batch, strategy).ok
    report = check_against_one_device(lambda b: b[0] - jnp.mean(b[0], axis=0), batch, strategy)
    (entry,) = report.differences
    assert (entry.kind, entry.name, entry.shape, entry.factor) == ("output", "result", (7, 3), None)
    assert (
        "all_reduce"
        in check_against_one_device(lambda b: b[0] - jnp.mean(b[0], axis=0), rows(8), strategy)
        .differences[0]
        .hint
    )


def test_outputs_of_other_shapes_are_reported():
    report = check_against_one_device(lambda b: b[0].T, rows(8), make_strategy(2))
    (entry,) = report.differences
    assert entry.shape == (3, 8)
    assert "(3, 4)" in entry.hint


# --- mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mirrored", "central_storage"])
@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.quick
def test_a_mean_loss_summed(kind, num_replicas):
    model = Linear(make_strategy(num_replicas, kind), jnp.mean)
    report = check_against_one_device(model.step, rows(8), model.strategy)
    found = entries(report)
    assert set(found) == {"w", "b"}  # the mean of the losses is right
    for entry in found.values():
        assert entry.kind == "variable"
        assert entry.factor == pytest.approx(num_replicas, rel=1e-4)
        assert f"{num_replicas}.0 ×: a mean loss summed over {num_replicas} replicas?" in entry.hint
        assert "rx.nn.compute_average_loss" in entry.hint


@pytest.mark.quick
def test_a_gradient_divided_twice():
    model = Linear(make_strategy(4), rx.nn.compute_average_loss, combine=rx.ReduceOp.MEAN)
    report = check_against_one_device(model.step, rows(8), model.strategy)
    for entry in entries(report, "variable").values():
        assert entry.factor == pytest.approx(0.25, rel=1e-4)
        assert "divided by 4 twice" in entry.hint


@pytest.mark.quick
def test_local_means_on_an_uneven_batch():
    model = Linear(make_strategy(2), jnp.mean, combine=rx.ReduceOp.MEAN)
    assert check_against_one_device(model.step, rows(8), model.strategy).ok
    report = check_against_one_device(model.step, rows(5), model.strategy)
    found = entries(report)
    assert set(found) == {"w", "b", "result"}
    assert "mean over its own rows (3, 2)" in found["result"].hint
    assert "the batch is uneven (3, 2)" in found["w"].hint
    assert found["w"].factor is None


def test_local_means_given_to_an_optimizer_on_an_uneven_batch():
    strategy, optimizer = keras_sgd_step(2, loss_of=jnp.mean)
    report = check_against_one_device(optimizer, rows(5), strategy)
    for entry in entries(report, "gradient").values():
        assert "mean over its own rows (3, 2)" in entry.hint
    assert {e.hint for e in entries(report, "variable").values()} == {FOLLOWS}


def test_forgotten_sum_raises_the_librarys_error():
    strategy = make_strategy(2)
    with strategy.scope():
        w = rx.Variable(1.0, name="w")
    before = w.numpy()
    with pytest.raises(errors.DivergenceError, match="'w'"):
        check_against_one_device(lambda b: w.assign_sub(jnp.sum(b[0])), rows(8), strategy)
    assert w.numpy() == before


def test_counted_on_each_replica():
    strategy = make_strategy(2)
    with strategy.scope():
        steps = rx.Variable(3, name="steps", aggregation="SUM")
        once = rx.Variable(3, name="once", aggregation="ONLY_FIRST_REPLICA")

    def step(batch):
        steps.assign_add(1)
        once.assign_add(1)

    (entry,) = check_against_one_device(step, rows(8), strategy).differences
    assert (entry.name, entry.hint.startswith("counted", 7)) == ("steps", True)
    assert int(steps.value) == int(once.value) == 3


def test_fewer_rows_than_replicas_and_a_mean():
    model = Linear(make_strategy(4), jnp.mean)
    report = check_against_one_device(model.step, rows(2), model.strategy)
    loss = entries(report)["result"]
    assert loss.max_difference == np.inf
    assert "leave replicas [2, 3] without rows" in loss.hint


@pytest.mark.parametrize("num_rows", [pytest.param(8, marks=pytest.mark.long), 7])
def test_components_are_compared_as_one_value(num_rows):
    strategy = make_strategy(2)
    with strategy.scope():
        total = rx.Variable(1.0, name="total", synchronization="ON_READ", aggregation="SUM")
        mean = rx.Variable(1.0, name="mean", synchronization="ON_READ", aggregation="MEAN")
        own = rx.Variable(1.0, name="own", synchronization="ON_READ")

    def step(batch):
        total.assign_add(jnp.sum(batch[0]))
        mean.assign_add(jnp.sum(batch[0]))
        own.assign_add(1.0)

    before = [strategy.experimental_local_results(v) for v in (total, mean, own)]
    report = check_against_one_device(step, rows(num_rows), strategy)
    (entry,) = report.differences
    assert entry.name == "mean"
    assert entry.factor == pytest.approx(0.5, rel=1e-4)
    assert "'own'" in report.not_compared[0]
    after = [strategy.experimental_local_results(v) for v in (total, mean, own)]
    np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


# --- Keras --------------------------------------------------------------------------------------------


def keras_sgd_step(num_replicas, loss_of, optimizer=None, extra=None, kind="mirrored", training=True):
    """A strategy, and a step of a Keras model with an optimizer and a metric. ``extra`` makes layers for the middle;
    their random states follow from the seed too.
    """
    strategy = make_strategy(num_replicas, kind)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, activation="tanh"),
                *(extra() if extra is not None else ()),
                keras.layers.Dense(1),
            ]
        )
        used = optimizer() if optimizer is not None else keras.optimizers.SGD(0.1)
        metric = keras.metrics.MeanSquaredError()

    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            prediction = model(x, training=training)
            loss = loss_of(jnp.square(prediction - y)[:, 0])
        used.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        metric.update_state(y, prediction)
        return loss

    step.state = lambda: [*model.variables, *used.variables, *metric.variables]
    return strategy, step


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "clipped": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0),
}


SIMPLER = [pytest.param(name, marks=pytest.mark.long) for name in ("sgd", "momentum", "adam")]


@pytest.mark.parametrize("optimizer", [*SIMPLER, "clipped", "scaled"])
@pytest.mark.parametrize("num_rows", [pytest.param(8, marks=pytest.mark.long), 7])
def test_a_right_keras_step_agrees_also_later_in_training(optimizer, num_rows):
    strategy, step = keras_sgd_step(2, rx.nn.compute_average_loss, OPTIMIZERS[optimizer])
    report = check_against_one_device(step, rows(num_rows), strategy)
    assert report.ok, report
    assert report.num_compared > 8
    for batch in strategy.experimental_distribute_dataset([rows(6, seed) for seed in range(4)]):
        strategy.run(step, args=(batch,))
    report = check_against_one_device(step, rows(num_rows), strategy)
    assert report.ok, report


def classifier(strategy, optimizer):
    """Adds the same number ``shift`` to all logits: its gradient is 0, except for rounding."""
    with strategy.scope():
        weights = keras.Variable(np.ones((3, 4), np.float32), name="weights")
        shift = keras.Variable(np.zeros(2, np.float32), name="shift")
        optimizer.build([weights, shift])

    def step(batch):
        x, _ = batch
        with rx.GradientTape() as tape:
            logits = x @ weights.value * jnp.arange(1.0, 5.0) + jnp.sum(shift.value)
            loss = rx.nn.compute_average_loss(-jax.nn.log_softmax(logits)[:, 0])
        optimizer.apply(tape.gradient(loss, [weights, shift]), [weights, shift])

    return step, shift


def test_rounding_in_gradients_that_are_zero_is_no_difference():
    """Neither in the gradient, nor in the step of Adam, which turns it into full-sized steps."""
    strategy = make_strategy(4)
    step, shift = classifier(strategy, keras.optimizers.Adam(0.1, epsilon=1e-12))
    for seed in range(6):
        report = check_against_one_device(step, rows(61, seed), strategy)
        assert report.ok, report
    strategy.run(step, args=(strategy.replicate(rows(61)),))
    assert np.max(np.abs(np.asarray(shift.value))) > 1e-3  # there was something to overlook


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("sgd", marks=pytest.mark.long),
        pytest.param("momentum", marks=pytest.mark.long),
        "adam",
        "scaled",
    ],
)
def test_gradients_reveal_the_mistake_with_every_optimizer(optimizer):
    """An update of Adam hardly depends on the scale of the gradients."""
    strategy, step = keras_sgd_step(2, jnp.mean, OPTIMIZERS[optimizer])
    report = check_against_one_device(step, rows(8), strategy)
    gradients = entries(report, "gradient")
    assert len(gradients) == 4
    for entry in gradients.values():
        assert entry.factor == pytest.approx(2, rel=1e-4)
        assert entry.hint.startswith("2.0 ×: a mean loss summed over 2 replicas?")
    if optimizer == "adam":
        square = [e for name, e in entries(report, "variable").items() if "velocity" in name]
        assert square
        assert all(e.factor == pytest.approx(4, rel=1e-3) and "second moment" in e.hint for e in square)


FOLLOWS = "Follows from the gradients above."


def test_batch_normalisation_is_explained():
    strategy, step = keras_sgd_step(
        2, rx.nn.compute_average_loss, extra=lambda: [keras.layers.BatchNormalization()]
    )
    report = check_against_one_device(step, rows(32), strategy)
    assert entries(report, "gradient")
    for entry in report.differences:
        is_explained = "Batch normalisation" in entry.hint and "per replica by design" in entry.hint
        assert is_explained or (entry.kind == "variable" and entry.hint == FOLLOWS)
        assert is_explained or "moving" not in entry.name
        assert "besides" not in entry.hint
    assert any("moving_variance" in entry.name for entry in report.differences)


def test_mistake_beside_batch_normalisation_is_detected():
    strategy, step = keras_sgd_step(2, jnp.mean, extra=lambda: [keras.layers.BatchNormalization()])
    report = check_against_one_device(step, rows(32), strategy)
    blurred = [entry for entry in report.differences if entry.kind == "gradient" and entry.factor is None]
    assert blurred
    assert all("about 2 × as large: a mean loss summed over 2 replicas" in entry.hint for entry in blurred)


def test_layers_with_statistics_and_randomness_agree_when_they_do_not_train():
    def extra():
        return [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]

    strategy, step = keras_sgd_step(2, rx.nn.compute_average_loss, extra=extra, training=False)
    assert check_against_one_device(step, rows(7), strategy).ok


def test_dropout_is_explained():
    strategy, step = keras_sgd_step(2, rx.nn.compute_average_loss, extra=lambda: [keras.layers.Dropout(0.5)])
    report = check_against_one_device(step, rows(8), strategy)
    assert entries(report, "gradient")
    for entry in report.differences:
        is_explained = "dropout" in entry.hint and "per replica by design" in entry.hint
        assert is_explained or (entry.kind == "variable" and entry.hint == FOLLOWS)
        assert "besides" not in entry.hint


def test_keras_mean_loss_raises_the_librarys_error():
    loss = keras.losses.MeanSquaredError()
    strategy, step = keras_sgd_step(2, lambda per_example: loss(jnp.zeros_like(per_example), per_example))
    with pytest.raises(errors.KerasLossError):
        check_against_one_device(step, rows(8), strategy)


def test_half_precision_has_its_own_tolerance():
    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return keras_sgd_step(2, lambda per: rx.nn.compute_average_loss(per.astype(jnp.float32)))
        finally:
            keras.config.set_dtype_policy("float32")

    strategy, step = build()
    assert check_against_one_device(step, rows(7), strategy).ok
    assert not check_against_one_device(step, rows(7), strategy, rtol=1e-7).ok


# --- nothing is changed -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mirrored", pytest.param("central_storage", marks=pytest.mark.long)])
@pytest.mark.parametrize("loss_of", [pytest.param("right", marks=pytest.mark.long), "mean"])
def test_state_is_untouched(kind, loss_of):
    """State is bit-identical, and so are the next steps."""
    histories = []
    for is_checked in (True, False):
        strategy, step = keras_sgd_step(
            2, LOSSES[loss_of], OPTIMIZERS["adam"], extra=lambda: [keras.layers.Dropout(0.5)], kind=kind
        )
        losses = []
        for seed in range(3):
            (batch,) = strategy.experimental_distribute_dataset([rows(7, seed)])
            losses.append(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None))
            if is_checked:
                before = [np.array(v.value) for v in step.state()]
                check_against_one_device(step, rows(7, seed + 10), strategy)
                for old, variable in zip(before, step.state(), strict=True):
                    np.testing.assert_array_equal(old, np.asarray(variable.value))
        histories.append([*map(float, losses), *(np.asarray(v.value).tolist() for v in step.state())])
    assert histories[0] == histories[1]


def test_errors_in_the_function_change_nothing():
    strategy = make_strategy(2)
    model = Linear(strategy, rx.nn.compute_average_loss)
    before = model.values

    def fails(batch):
        model.step(batch)
        raise ZeroDivisionError("mine")

    def fails_on_one_device(batch):
        model.step(batch)
        if strategy.num_replicas_in_sync == 1:
            raise ZeroDivisionError("mine")

    for fn in (fails, fails_on_one_device):
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            check_against_one_device(fn, rows(8), strategy)
    assert "on one device" in caught.value.__notes__[-1]
    for old, new in zip(before, model.values, strict=True):
        np.testing.assert_array_equal(old, new)
    assert strategy.num_replicas_in_sync == 2
    assert not rx.has_strategy()
    assert check_against_one_device(model.step, rows(8), strategy).ok


def test_arrays_that_the_function_closes_over():
    strategy = make_strategy(2)
    scale = strategy.replicate(jnp.float32(3.0))
    offset = jnp.ones(3)
    assert check_against_one_device(lambda b: jnp.sum(b[0] * scale + offset), rows(7), strategy).ok


def test_gradients_in_a_condition_are_not_compared():
    strategy = make_strategy(2)
    with strategy.scope():
        w = rx.Variable(np.ones((3, 1), np.float32), name="w")
    transformation = rx.optax.aggregate_gradients()

    def step(batch):
        x, y = batch

        def update(w):
            gradient = jax.grad(
                lambda w: rx.nn.compute_average_loss(jnp.square(x @ w - y)[:, 0], global_batch_size=8)
            )(w)
            return w - 0.1 * transformation.update(gradient, None)[0]

        w.assign(jax.lax.cond(jnp.sum(w.value) > 0, update, lambda w: w, w.value))

    report = check_against_one_device(step, rows(8), strategy)
    assert report.ok, report
    assert "a scan, loop or condition" in report.not_compared[0]


# --- arguments, and what people read ------------------------------------------------------------------


@pytest.mark.quick
def test_the_text_is_read_by_a_person():
    model = Linear(make_strategy(2), jnp.mean)
    report = check_against_one_device(model.step, rows(8), model.strategy)
    with pytest.raises(errors.OneDeviceDifferenceError) as caught:
        report.raise_if_different()
    assert isinstance(caught.value, AssertionError)
    advice = "Divide by the global batch size: rx.nn.compute_average_loss(per_example_loss)."
    assert str(caught.value).splitlines() == [
        "MirroredStrategy, 8 row(s) over 2 replica(s) (4 + 4), against one device:",
        "2 of 3 values differ.",
        "",
        "kind      name  shape   difference  factor",
        "variable  w     (3, 1)  1.0e+00     2.0 ×   [1]",
        "variable  b     (1,)    1.0e+00     2.0 ×   [1]",
        "",
        f"[1] 2.0 ×: a mean loss summed over 2 replicas? {advice}",
    ]
    right = Linear(model.strategy, rx.nn.compute_average_loss)
    text = str(check_against_one_device(right.step, rows(8), model.strategy))
    assert text.endswith("all 3 losses, outputs, gradients and variables agree.")


def test_tolerances_are_arguments():
    strategy = make_strategy(2)

    def almost(batch):
        return jnp.mean(batch[0]) * (1 + 1e-3 * (strategy.num_replicas_in_sync - 1))

    assert not check_against_one_device(almost, rows(8), strategy).ok
    assert check_against_one_device(almost, rows(8), strategy, rtol=1e-2).ok
    assert check_against_one_device(almost, rows(8), strategy, atol=1.0).ok


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (np.float32(3), "at least 1"),
        ((np.ones((4, 2)), np.ones(3)), r"\[\(4, 2\), \(3,\)\]"),
        (np.ones((0, 2)), "at least 1"),
        ([1.0, 2.0, 3.0], r"\[\(\), \(\), \(\)\].* a Python list is a pytree of numbers.* np.asarray"),
        (3, r"A number has no rows, .*np\.asarray\(\[…\]\)"),
        ((), "at least 1"),
    ],
)
@pytest.mark.quick
def test_batches_without_rows_raise(batch, says):
    with pytest.raises(errors.InvalidArgumentError, match=says):
        check_against_one_device(lambda b: None, batch, make_strategy(2))


def test_lists_are_mentioned_only_for_numbers():
    with pytest.raises(errors.InvalidArgumentError) as caught:
        check_against_one_device(lambda b: None, (np.ones((4, 2)), np.ones(3)), make_strategy(2))
    assert "list" not in str(caught.value)


@pytest.mark.parametrize(
    "dtype", [">f4", *(pytest.param(d, marks=pytest.mark.long) for d in (">f8", "<f4", ">i4")), ">c8"]
)
def test_batches_of_any_byte_order_are_numbers(dtype):
    batch = np.arange(14).astype(dtype).reshape(7, 2)
    seen = []

    def step(x):
        seen.append(x.dtype)
        return jnp.sum(x), x

    for num_replicas in (1, 2):
        report = check_against_one_device(step, batch, make_strategy(num_replicas))
        assert report.ok, report
    native = np.dtype(dtype).newbyteorder("=")
    assert set(seen) == {np.dtype(jax.dtypes.canonicalize_dtype(native))}
    total = check_against_one_device(lambda x: jnp.abs(jnp.sum(x) - 91) < 1e-3, batch, make_strategy(1))
    assert total.ok


@pytest.mark.parametrize(
    "batch",
    [
        np.array(["a", "b"]),
        np.array([{}, {}]),
        np.ma.masked_array(np.ones(4), [0, 1, 0, 0]),
        np.ones(4, np.longdouble),
        jax.random.split(jax.random.key(0), 4),
    ],
    ids=["text", "objects", "masked", "longdouble", "keys"],
)
def test_batches_that_datasets_reject_raise(batch):
    strategy = make_strategy(2)
    with pytest.raises(errors.UnsupportedElementError) as expected:
        next(iter(strategy.experimental_distribute_dataset([batch])))
    with pytest.raises(errors.UnsupportedElementError) as caught:
        check_against_one_device(lambda b: None, batch, strategy)
    assert str(caught.value) == str(expected.value)


@pytest.mark.quick
def test_other_arguments_raise():
    strategy = make_strategy(2)
    (distributed,) = strategy.experimental_distribute_dataset([np.ones((4, 2))])
    with pytest.raises(errors.InvalidArgumentError, match="before it is distributed"):
        check_against_one_device(lambda b: b, distributed, strategy)
    with pytest.raises(errors.InvalidArgumentError, match="per-replica value"):
        check_against_one_device(lambda b, c: b, np.ones((4, 2)), strategy, args=(distributed,))
    with pytest.raises(errors.InvalidArgumentError, match="args=\\(value,\\)"):
        check_against_one_device(lambda b: b, np.ones((4, 2)), strategy, args=3)
    with pytest.raises(errors.InvalidArgumentError, match="needs a strategy"):
        check_against_one_device(lambda b: b, np.ones((4, 2)), "mirrored")
    with pytest.raises(errors.InvalidArgumentError, match="replica function"):
        check_against_one_device(3, np.ones((4, 2)), strategy)
    with pytest.raises(errors.MixedStrategiesError):
        with make_strategy(1).scope():
            check_against_one_device(lambda b: b, np.ones((4, 2)), strategy)
    other = make_strategy(1)
    with pytest.raises(errors.MixedStrategiesError, match="Give the strategy"):
        check_against_one_device(lambda b: other.run(lambda: 1), np.ones((4, 2)), strategy)
    with pytest.raises(errors.CrossReplicaContextError, match="plain Python"):
        strategy.run(lambda: check_against_one_device(lambda b: b, np.ones((4, 2)), strategy))


def test_a_replica_function_with_a_misplaced_call_gets_the_error_of_that_call():
    strategy = make_strategy(2)
    with pytest.raises(errors.CrossReplicaContextError, match="cross-replica context"):
        check_against_one_device(
            lambda b: strategy.reduce("SUM", b, axis=None) + b.sum(), np.ones((4, 2)), strategy
        )


def test_step_that_reads_an_iterator_raises_and_should_take_an_argument():
    strategy = make_strategy(2)
    iterator = iter(strategy.experimental_distribute_dataset([np.ones((4, 2))] * 3))
    with pytest.raises(errors.InvalidArgumentError, match="takes one batch"):
        check_against_one_device(
            lambda b: strategy.run(jnp.sum, args=(next(iterator),)), np.ones((4, 2)), strategy
        )
    assert len(list(iterator)) == 3


def test_datasets_are_guarded_only_while_a_check_runs():
    strategy = make_strategy(2)
    dataset = strategy.experimental_distribute_dataset([np.ones((4, 2))] * 3)

    def fails(batch):
        raise ZeroDivisionError

    for fn, error in (
        (fails, ZeroDivisionError),
        (lambda b: next(iter(dataset)), errors.InvalidArgumentError),
    ):
        with pytest.raises(error):
            check_against_one_device(fn, np.ones((4, 2)), strategy)
        assert len(list(dataset)) == 3
    assert check_against_one_device(jnp.sum, np.ones((4, 2)), strategy).ok
    assert len(list(dataset)) == 3
    with pytest.raises(errors.IterationContextError):
        strategy.run(lambda: next(iter(dataset)))


def test_while_one_thread_checks_another_may_iterate_and_checks_may_end_in_any_order():
    strategy = make_strategy(2)
    dataset = strategy.experimental_distribute_dataset([np.ones((4, 2))] * 3)
    inside, may_end = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]
    reports = []

    def check(number):
        def step(x):
            inside[number].set()
            assert may_end[number].wait(60)
            return jnp.sum(x)

        reports.append(check_against_one_device(step, np.ones((4, 2)), make_strategy(2)))

    threads = [threading.Thread(target=check, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        assert inside[number].wait(60)
    assert len(list(dataset)) == 3
    for number, thread in enumerate(threads):  # the first to begin ends first
        may_end[number].set()
        thread.join(60)
        assert len(list(dataset)) == 3
    assert [report.ok for report in reports] == [True, True]


def test_step_without_comparable_values_raises():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    report = rx.testing.check_against_one_device(lambda x: None, np.ones(4, np.float32), strategy)
    assert report.num_compared == 0
    assert "nothing was compared" in str(report)
