"""Keras's ``gradient_accumulation_steps``: n micro-batches of unequal counts equal one large batch on one device."""

import contextlib
import copy
import functools
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.keras import gradient_accumulation

CPUS = [f"cpu:{i}" for i in range(4)]
ROWS, TOKENS = 29, 6
RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(1, TOKENS + 1, size=(ROWS, 1))
IDS = np.where(np.arange(TOKENS) < LENGTHS, RANDOM.integers(1, 9, size=(ROWS, TOKENS)), 0).astype(np.int32)
Y = RANDOM.normal(size=(ROWS, TOKENS, 1)).astype(np.float32)
WEIGHTS = RANDOM.random(size=(ROWS, TOKENS)).astype(np.float32)


class OwnStep(keras.Sequential):
    """A model with a step in TensorFlow's style."""

    def train_step(self, data):
        x, y, *weight = data
        with rx.GradientTape() as tape:
            loss = self.compute_loss(
                x=x, y=y, y_pred=self(x, training=True), sample_weight=(*weight, None)[0]
            )
            target = self.optimizer.scale_loss(loss)
        self.optimizer.apply_gradients(
            zip(tape.gradient(target, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


def adam(**options):
    return keras.optimizers.Adam(0.05, **options)


def scaled(**options):
    return keras.optimizers.LossScaleOptimizer(adam(**options))


def fixed_scale(**options):
    return adam(loss_scale_factor=8.0, **options)


def fitted(strategy, batch_size, number, *, make=adam, cls=keras.Sequential, masked=True, weights=None, epochs=1,
           reduction="sum_over_batch_size", **options):  # fmt: skip
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [
            keras.layers.Embedding(9, 4, mask_zero=masked),
            keras.layers.Dense(1, kernel_regularizer="l2"),
        ]
        model = cls([keras.Input((TOKENS,), dtype="int32"), *layers])
        optimizer = make(gradient_accumulation_steps=number) if number else make()
        model.compile(optimizer, keras.losses.MeanSquaredError(reduction=reduction), **options)
    model.fit(IDS, Y, sample_weight=weights, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return [np.asarray(v.value) for v in model.weights]


@functools.cache
def on_one_device(masked, is_weighted, reduction):
    weights = WEIGHTS if is_weighted else None
    return fitted(
        rx.OneDeviceStrategy("cpu:0"), ROWS, None, masked=masked, weights=weights, reduction=reduction
    )


def assert_equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        # The first step of Adam divides each gradient by its own size.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("masked", "is_weighted", "reduction"),
    [
        (True, False, "sum_over_batch_size"),
        pytest.param(False, False, "sum_over_batch_size", marks=pytest.mark.rest),
        pytest.param(False, True, "sum_over_batch_size", marks=pytest.mark.rest),
        pytest.param(False, True, "mean_with_sample_weight", marks=pytest.mark.long),
        pytest.param(True, True, "mean_with_sample_weight", marks=pytest.mark.rest),
    ],
)
def test_fit_with_masks_weights_and_a_ragged_last_batch(masked, is_weighted, reduction):
    got = fitted(
        rx.MirroredStrategy(CPUS), 8, 4, masked=masked, weights=WEIGHTS if is_weighted else None, reduction=reduction
    )  # 8, 8, 8 and 5 rows  # fmt: skip
    assert_equal(got, on_one_device(masked, is_weighted, reduction))


def test_optimizer_that_is_built_outside_the_scope_weighs_small_batches_too():
    def made(number, strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((TOKENS,)), keras.layers.Dense(TOKENS)])
            model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=number), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    rows, targets = IDS.astype(np.float32), Y[..., 0]
    small, large = made(4, rx.MirroredStrategy(CPUS[:2])), made(None, rx.OneDeviceStrategy("cpu:0"))
    small.fit(rows, targets, batch_size=8, shuffle=False, verbose=0)  # 8, 8, 8 and 5 rows
    large.fit(rows, targets, batch_size=ROWS, verbose=0)
    assert_equal(*([np.asarray(v.value) for v in model.weights] for model in (small, large)))


@pytest.mark.parametrize(
    ("num_replicas", "strategy_options", "options"),
    [
        (1, {}, {}),
        (2, {"shard_state": "all"}, {}),
        (2, {}, {"steps_per_execution": 3}),
        (2, {}, {"make": scaled}),
        pytest.param(2, {"shard_state": "optimizer"}, {"make": scaled}, marks=pytest.mark.long),
        pytest.param(1, {}, {"make": fixed_scale}, marks=pytest.mark.rest),
        pytest.param(2, {}, {"run_eagerly": True}, marks=pytest.mark.rest),
        (4, {}, {"cls": OwnStep}),
        pytest.param(2, {}, {"cls": OwnStep, "make": scaled}, marks=pytest.mark.long),
    ],
)
def test_ways_to_train(num_replicas, strategy_options, options):
    strategy = rx.MirroredStrategy(CPUS[:num_replicas], **strategy_options)
    if options.get("cls") is OwnStep and num_replicas > 1:
        options = {**options, "masked": True}
    got = fitted(strategy, 8, 4, **options)
    assert_equal(got, on_one_device(True, False, "sum_over_batch_size"))


def test_without_the_weights_the_numbers_differ(monkeypatch):
    """The case is one that Keras alone gets wrong."""

    monkeypatch.setattr(gradient_accumulation, "_factors", lambda optimizer: None)
    got = fitted(rx.MirroredStrategy(CPUS[:1]), 8, 4)
    expected = on_one_device(True, False, "sum_over_batch_size")
    assert max(np.abs(one - other).max() for one, other in zip(got, expected, strict=True)) > 1e-3


def looped(strategy, sizes, number, step_of):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((TOKENS,)), keras.layers.Dense(1)])
        optimizer = adam(gradient_accumulation_steps=number) if number else adam()
    step, start = step_of(model, optimizer), 0
    for size in sizes:
        rows = rx.data.from_arrays((IDS[start : start + size].astype("f"), Y[start : start + size, 0, 0]))
        (batch,) = strategy.experimental_distribute_dataset(rows.batch(size))
        strategy.run(step, args=(batch,))
        start += size
    return [np.asarray(v.value) for v in model.weights]


def of_average_loss(model, optimizer):
    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((model(x)[:, 0] - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return step


def of_accumulate(model, optimizer):
    @rx.experimental.accumulate(2)
    def gradients_of(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = jnp.sum((model(x)[:, 0] - y) ** 2)
        return tape.gradient(loss, model.trainable_variables), len(x)

    return lambda batch: optimizer.apply(gradients_of(batch), model.trainable_variables)


@pytest.mark.parametrize("step_of", [of_average_loss, of_accumulate])
def test_a_loop_with_uneven_micro_batches_and_two_accumulations_the_second_of_which_starts_afresh(step_of):
    expected = on_one_device_in_a_loop()
    assert_equal(looped(rx.MirroredStrategy(CPUS), [13, 5, 2, 9], 2, step_of), expected)


@functools.cache
def on_one_device_in_a_loop():
    return looped(rx.OneDeviceStrategy("cpu:0"), [18, 11], None, of_average_loss)


def test_several_losses_with_masks_have_no_single_count():
    keras.utils.set_random_seed(0)
    with rx.MirroredStrategy(CPUS[:1]).scope():
        ids = keras.Input((TOKENS,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(ids)
        model = keras.Model(ids, [keras.layers.Dense(1)(hidden), keras.layers.Dense(1)(hidden)])
        model.compile(adam(gradient_accumulation_steps=2), ["mse", "mae"])
    message(
        rx.errors.KerasLossError,
        lambda: model.fit(IDS, [Y, Y], batch_size=8, verbose=0),
        "rx.experimental.accumulate",
    )


def test_several_losses_of_all_rows_keep_their_proportions():
    def trained(strategy, batch_size, number):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            ids = keras.Input((TOKENS,), dtype="int32")
            hidden = keras.layers.Embedding(9, 4)(ids)
            outputs = [keras.layers.Dense(1)(hidden), keras.layers.Dense(1)(hidden[:, 0])]
            model = keras.Model(ids, outputs)
            model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=number), ["mse", "mae"])
        model.fit(IDS, [Y, Y[:, 0]], batch_size=batch_size, shuffle=False, verbose=0)
        return [np.asarray(v.value) for v in model.weights]

    assert_equal(
        trained(rx.MirroredStrategy(CPUS[:2]), 8, 4), trained(rx.OneDeviceStrategy("cpu:0"), ROWS, None)
    )


def test_an_incomplete_accumulation_goes_on_in_the_next_fit():
    initial = fitted(rx.MirroredStrategy(CPUS[:2]), 8, 4, epochs=0)
    assert_equal(fitted(rx.MirroredStrategy(CPUS[:2]), 8, 5), initial)  # 4 batches, and no update
    changed = fitted(rx.MirroredStrategy(CPUS[:2]), 8, 5, epochs=2)
    assert max(np.abs(one - other).max() for one, other in zip(changed, initial, strict=True)) > 0.01


def test_optimizers_made_outside_of_a_scope_are_keras_own():
    optimizer = adam(gradient_accumulation_steps=2)
    optimizer.build([keras.Variable(np.zeros(2, "f"))])
    assert not any("accumulated_count" in v.path for v in optimizer.variables)


# --- exchanges ------------------------------------------------------------------------------------------------


def gradients_summed(text):
    """The numbers of elements that the all-reduces of a compiled program sum, in each step and in a condition only."""
    always, in_condition = 0, 0
    is_entry = False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            is_entry = line.startswith("ENTRY")
        found = re.search(r" = (.+?) all-reduce(?:-start)?\(", line)
        shapes = re.findall(r"\[([\d,]*)\]", found[1]) if found else []
        size = sum(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)
        always, in_condition = (always + size, in_condition) if is_entry else (always, in_condition + size)
    return always, in_condition


def lowered(strategy, cls=keras.Sequential):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [
            keras.layers.Dense(8, kernel_regularizer="l2"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(4),
        ]
        model = cls([keras.Input((8,)), *layers])
        model.compile(adam(gradient_accumulation_steps=4), "mse")
    data = np.zeros((10, 8), np.float32), np.zeros((10, 4), np.float32)
    return strategy.lower(model.fit, data, {"batch_size": 10}).compile().as_text()


@pytest.mark.parametrize("cls", [keras.Sequential, OwnStep])
def test_gradients_are_exchanged_only_in_the_step_that_updates(cls):
    always, in_condition = gradients_summed(lowered(rx.MirroredStrategy(CPUS[:2]), cls))
    assert in_condition == 8 * 8 + 8 + 8 * 4 + 4  # each gradient once
    assert always < 8  # losses


@pytest.mark.parametrize(
    "options", [{"shard_state": "optimizer"}, {"devices_per_replica": 2}], ids=["sharded", "logical"]
)
def test_accumulators_of_sharded_state_and_of_several_devices_per_replica_have_no_parts(options):
    model = half_trained(rx.MirroredStrategy(CPUS, **options), keras.Sequential, stop=8)
    assert [a.shape for a in accumulated(model)] == [(TOKENS, 1), (1,)]


class Mixing(keras.layers.Layer):
    def call(self, x):
        return x - jnp.sort(x, axis=0)


class Printing(keras.layers.Layer):
    def call(self, x):
        jax.debug.print("largest {x}", x=jnp.max(x))
        return x


@pytest.mark.parametrize("layer", [Mixing, Printing])
def test_a_model_that_cannot_be_split_exchanges_after_each_small_batch_and_says_so(layer, caplog, capfd):
    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((TOKENS,)), keras.layers.Dense(8), layer()])
            model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), "mse")
        model.fit(IDS[:8].astype("f"), np.ones((8, 8), "f"), batch_size=4, shuffle=False, verbose=0)
        return [np.asarray(v.value) for v in model.weights]

    got = trained(rx.MirroredStrategy(CPUS[:2]))
    assert "exchange gradients after each small batch" in caplog.text
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest") == (2 if layer is Printing else 0)
    assert_equal(got, trained(rx.OneDeviceStrategy("cpu:0")))


class WithNumber(keras.layers.Layer):
    """A layer with two numbers that the loss depends on in a fixed way, and not at all."""

    def build(self, shape):
        self.fixed, self.unused = self.add_weight(shape=()), self.add_weight(shape=())

    def call(self, x):
        self.add_loss(self.fixed * 1.0)
        return x


def test_gradients_that_do_not_depend_on_the_batch_count_once():
    def trained(strategy, batch_size, number):
        with strategy.scope():
            model = keras.Sequential([keras.Input((TOKENS,)), WithNumber()])
            model.compile(keras.optimizers.SGD(1.0, gradient_accumulation_steps=number), "mse")
            start = [float(v.value) for v in model.weights]
        model.fit(IDS[:16].astype("f"), IDS[:16].astype("f"), batch_size=batch_size, verbose=0)
        return [float(v.value) - before for v, before in zip(model.weights, start, strict=True)]

    np.testing.assert_allclose(trained(rx.MirroredStrategy(CPUS), 8, 2), [-1, 0], atol=1e-6)


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def small_batches(model, ways):
    """Trains on four small batches, each in its way."""
    x, y = IDS.astype("f"), Y[:, 0]
    for (start, stop), way in zip([(0, 8), (8, 16), (16, 24), (24, 29)], ways, strict=True):
        rows = x[start:stop], y[start:stop]
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        if way == "train_on_batch":
            model.train_on_batch(*rows)
        elif way == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                model.fit(x[start:], y[start:], callbacks=[Interrupt()], **options)
        elif way == "outside":
            parts = [v.value for v in model.trainable_variables]
            loss = functools.partial(stateless_loss, model, rows)
            model.optimizer.accumulated_count.assign_add(stop - start)
            model.optimizer.apply(jax.grad(loss)(parts), model.trainable_variables)
        else:
            model.run_eagerly = way == "run_eagerly"
            model.fit(*rows, validation_data=rows, **options)
    return [np.asarray(v.value) for v in model.weights]


def stateless_loss(model, rows, values):
    outputs, _ = model.stateless_call(values, [], rows[0])
    return jnp.mean((outputs - rows[1]) ** 2)


WAYS = ["fit", "train_on_batch", "interrupted", "outside", "run_eagerly"]


@pytest.mark.parametrize("style", [keras.Sequential, OwnStep])
@pytest.mark.parametrize(
    "ways",
    [
        ["train_on_batch", "outside", "run_eagerly", "interrupted"],
        *(pytest.param(["fit", way, "fit", "fit"], marks=pytest.mark.rest) for way in WAYS),
    ],
    ids=["mixed", *WAYS],
)
def test_small_batches_of_one_accumulation_run_in_several_ways(style, ways):
    model = half_trained(rx.MirroredStrategy(CPUS[:2]), style, stop=0)
    assert_equal(small_batches(model, ways), trained_at_once())


def test_each_device_holds_one_set_of_accumulators():
    model = half_trained(rx.MirroredStrategy(CPUS), stop=8)
    for sums in (v for v in model.optimizer.variables if v.path.endswith("accumulator")):
        shards = sums._value.addressable_shards
        assert [shard.data.size for shard in shards] == [np.size(sums)] * 4
        total = sum(np.asarray(shard.data) for shard in shards)
        np.testing.assert_allclose(total[0], sums.value, rtol=1e-6)


# --- checkpoints and files ------------------------------------------------------------------------------------


def half_trained(strategy, cls=keras.Sequential, stop=16):
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = cls([keras.Input((TOKENS,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=4), "mse")
        model.optimizer.build(model.trainable_variables)
    if stop:
        model.fit(IDS[:stop].astype("f"), Y[:stop, 0], batch_size=8, shuffle=False, verbose=0)
    return model


def continued(model):
    model.fit(IDS[16:24].astype("f"), Y[16:24, 0], batch_size=8, shuffle=False, verbose=0)
    model.fit(IDS[24:].astype("f"), Y[24:, 0], batch_size=8, shuffle=False, verbose=0)
    return [np.asarray(v.value) for v in model.weights]


def accumulated(model):
    return [np.asarray(v.value) for v in model.optimizer.variables if "accumulator" in v.path]


STRATEGIES = {
    "four": lambda: rx.MirroredStrategy(CPUS),
    "two": lambda: rx.MirroredStrategy(CPUS[:2]),
    "sharded_optimizer": lambda: rx.MirroredStrategy(CPUS[:2], shard_state="optimizer"),
    "sharded": lambda: rx.MirroredStrategy(CPUS, shard_state="all"),
    "one_device": lambda: rx.OneDeviceStrategy("cpu:0"),
}


@functools.cache
def trained_at_once():
    return continued(half_trained(STRATEGIES["one_device"]()))


PAIRS = [
    *(pytest.param("four", name, marks=() if name in ("four", "sharded") else pytest.mark.rest) for name in STRATEGIES),
    *(pytest.param(name, "four", marks=() if name == "one_device" else pytest.mark.rest) for name in STRATEGIES if name != "four"),
]  # fmt: skip


# An OwnStep accumulates like Keras's own model, in the same variables.
SHORT_OF_OWN_STEP = {("four", "sharded"): (), ("two", "four"): pytest.mark.rest}


@pytest.mark.parametrize(
    ("one", "other", "style"),
    [
        *(pytest.param(*pair.values, keras.Sequential, marks=pair.marks) for pair in PAIRS),
        *(
            pytest.param(*pair.values, OwnStep, marks=SHORT_OF_OWN_STEP.get(pair.values, pytest.mark.long))
            for pair in PAIRS
        ),
    ],
)
def test_a_checkpoint_within_an_accumulation_fits_all_strategies(one, other, style, tmp_path):
    model = half_trained(STRATEGIES[one](), style)
    again = half_trained(STRATEGIES[other](), stop=0)
    rx.Checkpoint(model=again).restore(rx.Checkpoint(model=model).save(tmp_path / "a"))
    for old, new in zip(accumulated(model), accumulated(again), strict=True):
        assert old.any()
        np.testing.assert_allclose(new, old, rtol=1e-6)
    assert_equal(continued(again), trained_at_once())
    assert_equal(continued(model), trained_at_once())


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_keras_file_within_an_accumulation_fits_all_strategies(one, other, tmp_path):
    model = half_trained(STRATEGIES[one]())
    model.save(tmp_path / "m.keras")
    with STRATEGIES[other]().scope():
        again = keras.models.load_model(tmp_path / "m.keras")
    assert_equal(continued(again), trained_at_once())


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_a_file_of_keras_alone_has_the_same_sums(tmp_path):
    model = half_trained(STRATEGIES["four"]())
    model.save(tmp_path / "m.keras")
    stored = [np.asarray(a) for a in accumulated(model)]
    own = keras.optimizers.SGD(0.05, gradient_accumulation_steps=4)
    own.build([keras.Variable(np.asarray(v.value)) for v in model.trainable_variables])
    sums = [v for v in model.optimizer.variables if "accumulated_count" not in v.path]
    own.set_weights([np.asarray(v.value) for v in sums])
    for got, expected in zip(own.variables[-2:], stored, strict=True):
        np.testing.assert_array_equal(np.asarray(got), expected)


def test_a_resumed_run_is_bit_equal(tmp_path):
    model = half_trained(STRATEGIES["four"]())
    path = rx.Checkpoint(model=model).save(tmp_path / "a")
    again = half_trained(STRATEGIES["four"](), stop=0)
    rx.Checkpoint(model=again).restore(path)
    for one, other in zip(continued(model), continued(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_values_of_other_shapes_are_refused():
    model = half_trained(STRATEGIES["two"](), stop=8)
    values = [np.asarray(v.value) for v in model.optimizer.variables]
    model.optimizer.set_weights(values)
    for shape in [(2, TOKENS, 1), (TOKENS,), (3, TOKENS, 1)]:
        sums = next(v for v in model.optimizer.variables if v.shape == (TOKENS, 1))
        with pytest.raises(ValueError, match="shape"):
            sums.assign(np.zeros(shape, "f"))


def test_a_copy_of_an_accumulator_has_its_sum():
    model = half_trained(rx.MirroredStrategy(CPUS), stop=8)
    (sums,) = [v for v in model.optimizer.variables if v.path.endswith("kernel_gradient_accumulator")]
    np.testing.assert_allclose(copy.deepcopy(sums).value, sums.value, rtol=1e-6)


# --- optimizers in programs of your own -----------------------------------------------------------------------


def test_gradients_that_replace_their_variable_are_summed():
    """Keras uses these for the scales of float8, and keeps the maximum of the small batches."""

    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((TOKENS,)), keras.layers.Dense(1)])
            model.trainable_variables[1].overwrite_with_gradient = True
            optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
            optimizer.build(model.trainable_variables)

        def step(batch):
            x, y = batch
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss((model(x, training=True) - y)[:, 0] ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        data = rx.data.from_arrays((IDS[:16].astype("f"), Y[:16, 0])).batch(8)
        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(step, args=(batch,))
        return [np.asarray(v.value) for v in model.weights]

    assert_equal(trained(rx.MirroredStrategy(CPUS)), trained(rx.OneDeviceStrategy("cpu:0")))


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit], ids=["vmap", "jit"])
def test_stateless_apply_can_be_transformed(transform):
    model = half_trained(rx.MirroredStrategy(CPUS[:2]), stop=0)
    state = [np.stack([v.value, v.value]) for v in model.optimizer.variables]
    values = [np.stack([v.value, v.value]) for v in model.trainable_variables]
    if transform is jax.jit:
        state, values = [[one[0] for one in each] for each in (state, values)]
    new, _ = transform(model.optimizer.stateless_apply)(state, values, values)
    np.testing.assert_allclose(new[0], values[0])  # the first of four small batches changes nothing


def test_sums_are_stored_in_all_optimizers_of_a_model():
    """Otherwise a process of several cannot read them alone."""

    class Two(keras.Sequential):
        def compile(self, first, second):
            super().compile(first, "mse")
            self.others = [second]

    first, second = (keras.optimizers.SGD(0.05, gradient_accumulation_steps=4) for _ in range(2))
    strategy = rx.MirroredStrategy(CPUS)
    with strategy.scope():
        model = Two([keras.Input((TOKENS,)), keras.layers.Dense(1)])
        model.compile(first, second)
        for optimizer in (first, second):
            optimizer.build(model.trainable_variables)

    def step():
        for optimizer in (first, second):
            optimizer.apply_gradients([(v.value, v) for v in model.trainable_variables])

    strategy.run(step)
    sums = [v for v in [*first.variables, *second.variables] if v.path.endswith("accumulator")]
    before = [np.asarray(v.value) for v in sums]
    assert all(v._value.shape == (4, *v.shape) for v in sums)
    gradient_accumulation.add_up(model)
    assert all(v._value.shape == v.shape for v in sums)
    for value, v in zip(before, sums, strict=True):
        np.testing.assert_array_equal(value, v.value)
