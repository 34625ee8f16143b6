"""Custom loops of a strategy whose workers go on after a death: the numbers of one process with as many devices, and the
same bits whoever computes which replica."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

import replicax as rx
from replicax import errors
from surviving_members import Members, strategy_of

R, ROWS = 3, 97
TOLERANCE = 3e-6
DISTURBED = [[[0], [1], [2]], [[0, 2], [1], None], [[0], [1, 2]], [[2], [0, 1], None], [[0, 1, 2]]]


def rows(num_rows=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(num_rows, 6)).astype("float32"), rng.normal(size=(num_rows, 2)).astype("float32")


def batches_on(strategy, num_rows=ROWS, batch_size=40):
    dataset = rx.data.from_arrays(rows(num_rows)).batch(batch_size)
    return strategy.experimental_distribute_dataset(dataset)


def own_variables(strategy):
    with strategy.scope():
        kernel, bias = rx.Variable(np.full((6, 2), 0.1, "float32")), rx.Variable(np.zeros(2, "float32"))

    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = jnp.sum((x @ kernel + bias - y) ** 2) / ROWS
        gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, [kernel, bias]))
        for variable, gradient in zip([kernel, bias], gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    losses = [strategy.run(step, args=(batch,)) for _ in range(2) for batch in batches_on(strategy)]
    return [strategy.reduce("SUM", loss, axis=None) for loss in losses], kernel.numpy(), bias.numpy()


def of_keras(*body):
    def train(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((6,)), *(make() for make in body), layers.Dense(2)])
            optimizer = keras.optimizers.Adam(0.01, clipnorm=1.0)
            mean, error = keras.metrics.Mean(), keras.metrics.MeanAbsoluteError()

        def step(batch):
            x, y = batch
            with rx.GradientTape() as tape:
                predictions = model(x, training=True)
                per_row = jnp.sum((predictions - y) ** 2, axis=1)
                loss = rx.nn.compute_average_loss(per_row, global_batch_size=40)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            mean.update_state(loss)
            error.update_state(y, predictions)
            return {"loss": loss, "rows": per_row}

        losses, row_losses = [], []
        for _ in range(2):
            for batch in batches_on(strategy):
                results = strategy.run(step, args=(batch,))
                losses.append(strategy.reduce("SUM", results["loss"], axis=None))
                row_losses.append(strategy.gather(results["rows"], axis=0))
                row_losses.append(strategy.reduce("MEAN", results["rows"], axis=0))
        weights = [np.asarray(variable.value) for variable in model.variables]
        return losses, row_losses, weights, float(mean.result()), float(error.result())

    return train


def of_optax(strategy):
    optimizer = optax.adam(0.05)
    weights = strategy.replicate({"kernel": np.full((6, 2), 0.1, "float32")})
    state = strategy.replicate(optimizer.init({"kernel": jnp.full((6, 2), 0.1)}))

    def step(weights, state, batch):
        x, y = batch
        loss, gradients = jax.value_and_grad(lambda w: jnp.sum((x @ w["kernel"] - y) ** 2) / 40)(weights)
        gradients = jax.lax.psum(gradients, "replica")
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    losses = []
    for batch in batches_on(strategy):
        weights, state, loss = strategy.run(step, args=(weights, state, batch))
        losses.append(strategy.reduce("SUM", loss, axis=None))
    return losses, strategy.experimental_local_results(weights)[0]


def all_kinds_of_values(strategy):
    with strategy.scope():
        largest = rx.Variable(np.float32(-1))
        mean = rx.Variable(np.float32(0), aggregation="MEAN")
        first = rx.Variable(np.float32(0), aggregation="ONLY_FIRST_REPLICA")

    def step(batch):
        replica = rx.get_replica_context()
        number = replica.replica_id_in_sync_group
        x, _ = batch
        total = jnp.sum(x)
        largest.assign(jax.lax.pmax(jnp.max(x), "replica"))
        mean.assign(total)
        first.assign(total)
        gathered = replica.all_gather(x, axis=0)
        by_id = jax.lax.fori_loop(0, 3, lambda i, value: value + number * i, 0)
        scanned, _ = jax.lax.scan(lambda value, i: (value + i * number, None), 0.0, jnp.arange(3.0))
        chosen = jax.lax.cond(number > 1, lambda: total, lambda: -total * (number + 1))
        merged = replica.merge_call(
            lambda strategy, value: strategy.reduce("MEAN", value, axis=None), (total,)
        )
        return {
            "number": number,
            "by id": (by_id, scanned, chosen),
            "negative zero": jnp.where(number == 1, -0.0, 1.0),
            "truth": number > 0,
            "half": total.astype("bfloat16"),
            "small": jnp.int8(number),
            "complex": jax.lax.complex(total, -total),
            "gathered": jnp.sum(gathered * jnp.arange(gathered.shape[0])[:, None]),
            "merged": merged,
            "equal": jax.lax.psum(total, "replica"),
            "twice": (total, total, x.shape[0], "text"),
            "after a sum": total - jax.lax.pmean(total, "replica"),
            "rows": x[::-1],
            "of variables": (largest.value, first.value),
        }

    results = [strategy.run(step, args=(batch,)) for batch in batches_on(strategy)]
    shown = [strategy.experimental_local_results(each) for each in results]
    return shown, [variable.numpy() for variable in (largest, mean, first)]


def without_sums(strategy):
    with strategy.scope():
        counter = rx.Variable(np.int32(0))

    def step():
        counter.assign_add(2)

    for _ in range(3):
        strategy.run(step)
    random = strategy.run(lambda: jax.random.key(3))
    values = strategy.experimental_distribute_values_from_function(
        lambda value: np.float32(value.replica_id_in_sync_group + 1)
    )
    squares = strategy.run(lambda value: value**2, args=(values,))
    return counter.numpy(), jax.random.key_data(random.values[0]), strategy.reduce("SUM", squares, axis=None)


def plain(results):
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, str) else np.asarray(leaf), results)


class OwnStep(keras.Model):
    """A model with a step in TensorFlow's style."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential(
            [layers.Dense(8, activation="relu"), layers.Dropout(0.3), layers.Dense(2)]
        )
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, x, training=False):
        return self.body(x, training=training)

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predictions)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.error.update_state(y, predictions)
        return {"loss": loss, "error": self.error.result()}


def fit_own_step(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = OwnStep()
        model.compile("adam", "mse")
    history = model.fit(*rows(), batch_size=40, epochs=2, verbose=0, validation_split=0.2).history
    predicted = model.predict(rows()[0], batch_size=40, verbose=0)
    return history, predicted, [np.asarray(variable.value) for variable in model.variables]


def in_functions(strategy):
    with strategy.scope():
        kernel, count = rx.Variable(np.full((6, 2), 0.1, "float32")), rx.Variable(np.int32(0))
        error = keras.metrics.MeanAbsoluteError()

    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = jnp.sum((x @ kernel - y) ** 2) / ROWS
        gradient = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, kernel))
        kernel.assign_sub(0.1 * gradient)
        error.update_state(y, x @ kernel)
        return loss, x[:, 0]

    @rx.function
    def two_steps(batch, factor):
        count.assign_add(2)
        first, _ = strategy.run(step, args=(batch,))
        loss, column = strategy.run(step, args=(batch,))
        total = strategy.reduce("SUM", first, axis=None) + factor * strategy.reduce("SUM", loss, axis=None)
        return total, loss, strategy.gather(column, axis=0), kernel + 1

    @rx.function
    def without_run():
        count.assign_add(1)
        return count * 2

    results = [two_steps(batch, 0.5) for _ in range(2) for batch in batches_on(strategy)]
    shown = [(total, strategy.experimental_local_results(loss), *others) for total, loss, *others in results]
    return shown, without_run(), kernel.numpy(), count.numpy(), float(error.result())


def several_steps(strategy):
    with strategy.scope():
        kernel = rx.Variable(np.full((6, 2), 0.1, "float32"))

    def step(total, batch):
        x, _ = batch
        replica = rx.get_replica_context()
        kernel.assign_add(replica.all_reduce("MEAN", jnp.ones((6, 2)) * jnp.mean(x)))
        here = jnp.sum(x) + replica.replica_id_in_sync_group
        new = {"sum": total["sum"] + here, "count": total["count"] + 1}
        return new, {"equal": replica.all_reduce("SUM", here), "here": here, "text": "text"}

    batches = iter(batches_on(strategy, 300))
    total = {"sum": jnp.float32(0), "count": jnp.int32(0)}
    results = []
    for _ in range(3):  # of eight batches, of which the last has 20 rows
        total, result = strategy.run_steps(step, batches, steps=3, state=total)
        results.append(result)
    rows = strategy.run_steps(lambda batch: batch[0], iter(batches_on(strategy, 80)), steps=2)
    shown = strategy.experimental_local_results([total, results, rows])
    return shown, kernel.numpy()


def on_read(strategy):
    with strategy.scope():
        total, mean, first, own = (
            rx.Variable(np.float32(start), synchronization="ON_READ", aggregation=aggregation)
            for start, aggregation in [(1, "SUM"), (2, "MEAN"), (3, "ONLY_FIRST_REPLICA"), (4, "NONE")]
        )

    def step(batch):
        for variable in (total, mean, first, own):
            variable.assign_add(jnp.sum(batch[0]))
        return total + own

    results = [strategy.run(step, args=(batch,)) for batch in batches_on(strategy)]
    before = total.numpy()
    total.assign(30.0)
    mean.assign_add(1.0)
    results += [strategy.run(step, args=(batch,)) for batch in batches_on(strategy)]
    sums = [strategy.reduce("SUM", result, axis=None) for result in results]
    shown = strategy.experimental_local_results(own)
    return sums, shown, before, total.numpy(), mean.numpy(), first.numpy(), mean.values


def dataset_of(context):
    start = 10 * context.input_pipeline_id
    features, labels = rows(60)
    here = features[start : start + 23], labels[start : start + 23]
    return rx.data.from_arrays(here).batch(5 + context.input_pipeline_id)


def datasets_from_a_function(strategy):
    options = rx.InputOptions(experimental_replication_mode=rx.InputReplicationMode.PER_REPLICA)
    is_one_process = strategy.topology.survivors is None
    made = dataset_of
    if is_one_process:  # which has one input pipeline
        numbers = iter(range(R))
        made = lambda _: dataset_of(rx.InputContext(R, next(numbers), R))  # noqa: E731
    batches = strategy.distribute_datasets_from_function(made, options if is_one_process else None)
    return [
        strategy.gather(strategy.run(lambda batch: batch[0] * 2, args=(batch,)), axis=0) for batch in batches
    ]


def accumulated_gradients(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)

    def step(batch):
        with rx.GradientTape() as tape:
            loss = jnp.sum((model(batch[0]) - batch[1]) ** 2) / 20
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = [strategy.run(step, args=(batch,)) for batch in batches_on(strategy, batch_size=20)]
    weights = [np.asarray(variable.value) for variable in model.variables]
    return [strategy.reduce("SUM", loss, axis=None) for loss in losses], weights


PROGRAMS = {
    "own variables": own_variables,
    "a Keras model": of_keras(lambda: layers.Dense(8, activation="relu")),
    "batch normalization": of_keras(lambda: layers.Dense(8), lambda: layers.BatchNormalization(momentum=0.7)),
    "dropout": of_keras(lambda: layers.Dense(16, activation="relu"), lambda: layers.Dropout(0.4)),
    "accumulated gradients": accumulated_gradients,
    "optax": of_optax,
    "all kinds of values": all_kinds_of_values,
    "without sums": without_sums,
    "ON_READ variables": on_read,
    "datasets from a function": datasets_from_a_function,
    "rx.function": in_functions,
    "run_steps": several_steps,
    "a step of a Keras model in TensorFlow's style": fit_own_step,
}


QUICK = (
    "own variables",
    "all kinds of values",
    "without sums",
    "rx.function",
    "ON_READ variables",
    "datasets from a function",
)
# Parts of "batch normalization" and of the step in TensorFlow's style.
LONG = ("a Keras model", "dropout")


def marked(name):
    marks = [] if name in QUICK else [pytest.mark.long if name in LONG else pytest.mark.rest]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in PROGRAMS])
def test_numbers_are_those_of_one_process_and_deaths_change_no_bit(name, monkeypatch):
    train = PROGRAMS[name]
    mirrored = plain(train(rx.MirroredStrategy(jax.devices()[:R])))
    undisturbed = plain(train(strategy_of(Members(R), monkeypatch)))
    members = Members(R, DISTURBED)
    disturbed = plain(train(strategy_of(members, monkeypatch)))
    jax.tree.map(np.testing.assert_array_equal, disturbed, undisturbed)
    assert members.num_cuts == 2
    for own, other in zip(jax.tree.leaves(undisturbed), jax.tree.leaves(mirrored), strict=True):
        if isinstance(own, str):
            assert own == other
            continue
        assert own.dtype == other.dtype
        own, other = (each.astype("complex128") for each in (own, other))
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=TOLERANCE)


def collective(use):
    return lambda strategy: strategy.run(lambda: use(rx.get_replica_context().replica_id_in_sync_group * 1.0))


def run_in_a_loop(strategy):
    value = strategy.replicate(jnp.float32(1))

    @rx.function
    def loop(value):
        return jax.lax.fori_loop(
            0, 3, lambda i, total: total + strategy.run(lambda x: x * i, args=(value,)).values[0], 0.0
        )

    loop(value)


def with_callback(strategy):
    seen = []
    strategy.run(lambda: jax.experimental.io_callback(seen.append, None, jnp.float32(1)))


REFUSED = {
    "a permutation": collective(lambda x: jax.lax.ppermute(x, "replica", [(0, 1), (1, 2), (2, 0)])),
    "groups of replicas": collective(lambda x: jax.lax.psum(x, "replica", axis_index_groups=[[0, 1], [2]])),
    "a sum in a loop": collective(
        lambda x: jax.lax.fori_loop(0, 3, lambda i, total: total + jax.lax.psum(x, "replica"), 0.0)
    ),
    "run in a loop of rx.function": run_in_a_loop,
    "the number of the replica in a solver": collective(
        lambda x: jax.lax.custom_linear_solve(
            lambda y: y * (1 + jax.lax.axis_index("replica")),
            x,
            lambda f, y: y / (1 + jax.lax.axis_index("replica")),
        )
    ),
    "a callback with effects": with_callback,
    "a check of all operations": lambda s: s.run(jnp.zeros, ((),), options=rx.RunOptions(check_finite=True)),
    "options of the compiler": lambda s: s.run(
        lambda: jnp.zeros(()),
        options=rx.RunOptions(experimental_xla_options={"xla_embed_ir_in_executable": True}),
    ),
    "an eager run": lambda s: s.run(lambda: 1, options=rx.RunOptions(eager=True)),
}


@pytest.mark.parametrize("use", REFUSED)
def test_function_that_cannot_be_repeated_is_refused_at_first_use(use, monkeypatch):
    strategy = strategy_of(Members(R), monkeypatch)
    with pytest.raises(errors.UnsupportedError, match="save_on_failure=True"):
        REFUSED[use](strategy)


def test_prints_of_each_replica_appear_once(monkeypatch, capfd):
    strategy = strategy_of(Members(R, [[[0], [1, 2]]]), monkeypatch)

    def step():
        number = rx.get_replica_context().replica_id_in_sync_group
        jax.debug.print("replica {}", number)

    strategy.run(step)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == ["replica 0", "replica 1", "replica 2"]


def trained_parts(strategy, num_steps):
    with strategy.scope():
        on_read = rx.Variable(np.float32(0), synchronization="ON_READ", aggregation="SUM")
        kernel, metric = rx.Variable(np.float32(1)), keras.metrics.Mean()
        metric.update_state(0.0)
        metric.reset_state()

    def step(batch):
        number = rx.get_replica_context().replica_id_in_sync_group
        on_read.assign_add(number + 1.0)
        metric.update_state(jnp.sum(batch[0]) * number)
        kernel.assign_add(rx.get_replica_context().all_reduce("SUM", jnp.sum(batch[0])))

    for _, batch in zip(range(num_steps), batches_on(strategy), strict=False):
        strategy.run(step, args=(batch,))
    return rx.Checkpoint(on_read=on_read, kernel=kernel, metric=metric), lambda: (
        [np.asarray(each) for each in on_read.values],
        kernel.numpy(),
        float(metric.result()),
    )


@pytest.mark.parametrize("saver", ["survivors", "one process"])
def test_checkpoints_of_components_are_read_in_the_other_mode(saver, monkeypatch, tmp_path):
    surviving, mirrored = strategy_of(Members(R), monkeypatch), rx.MirroredStrategy(jax.devices()[:R])
    order = [surviving, mirrored] if saver == "survivors" else [mirrored, surviving]
    checkpoint, values = trained_parts(order[0], 2)
    path = checkpoint.save(str(tmp_path / "ckpt"))
    other, values_there = trained_parts(order[1], 1)
    other.restore(path)
    jax.tree.map(np.testing.assert_array_equal, values(), values_there())


def test_error_of_the_function_leaves_the_state(monkeypatch):
    strategy = strategy_of(Members(R), monkeypatch)
    with strategy.scope():
        variable = rx.Variable(1.0)

    def step():
        variable.assign(2.0)
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        strategy.run(step)
    assert variable.numpy() == 1.0
