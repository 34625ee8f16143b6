"""Restoring: under another strategy, on other numbers of replicas, bit-identically on the same number, and later, when
an object is created."""

import gc

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checkpoint_bits import bits
from checks import message
from replicax._src.checkpoint.saved import SavedCheckpoint
from replicax._src.lowering import spmd
from replicax._src.tracing import bindings
from replicax._src.tracing.bindings import own_copy
from replicax.checkpoint import CheckpointMismatchError, UnmatchedCheckpointError
from replicax.errors import CrossReplicaContextError


def mirrored(n, **options):
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(n)], **options)


STRATEGIES = {
    "one device": lambda: rx.OneDeviceStrategy("cpu:0"),
    "two": lambda: mirrored(2),
    "three": lambda: mirrored(3),
    "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
    "divided": lambda: mirrored(2, shard_state="all"),
}


class Training:
    """A model, its optimizer and data, as in the guide."""

    def __init__(self, strategy, names_before=0):
        for _ in range(names_before):
            keras.layers.Dense(1)  # Keras counts
        keras.utils.set_random_seed(3)
        self.strategy = strategy
        with strategy.scope():
            self.model = keras.Sequential(
                [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
            )
            self.optimizer = keras.optimizers.Adam(0.01)
            self.step = rx.Variable(0, trainable=False, aggregation="only_first_replica")
            self.rows = rx.Variable(0, trainable=False, synchronization="on_read", aggregation="sum")
            self.mean = keras.metrics.Mean()
        x = np.random.RandomState(0).randn(60, 4).astype("float32")
        data = rx.data.from_arrays((x, x.sum(1, keepdims=True))).shuffle(60, seed=5).batch(12).repeat()
        self.iterator = iter(strategy.experimental_distribute_dataset(data))
        self.tracked = rx.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            step=self.step,
            rows=self.rows,
            mean=self.mean,
            iterator=self.iterator,
        )

        def train_step(inputs):
            x, y = inputs
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss((self.model(x, training=True) - y)[:, 0] ** 2)
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
            self.rows.assign_add(x.shape[0])
            self.step.assign_add(1)
            self.mean.update_state(loss)
            return loss

        self.train_step = rx.function(
            lambda inputs: strategy.reduce("sum", strategy.run(train_step, args=(inputs,)), axis=None)
        )

    def train(self, num_steps):
        return [float(self.train_step(next(self.iterator))) for _ in range(num_steps)]

    def state(self):
        variables = [*self.model.variables, *self.optimizer.variables, self.step, *self.mean.variables]
        return [bits(v) for v in variables] + [bits(v) for v in self.rows.values]


def test_same_strategy_resumes_bit_identically(tmp_path):
    """Nothing is built yet: layers, optimizer bindings and components of sums are restored when they are created."""
    first = Training(mirrored(2))
    first.train(2)
    path = first.tracked.save(tmp_path / "ckpt")
    wanted = first.train(2), first.state()

    second = Training(mirrored(2), names_before=3)
    status = second.tracked.restore(path)
    message(UnmatchedCheckpointError, status.assert_consumed, "optimizer/momentums/0", "are not built yet")
    status.assert_existing_objects_matched()
    assert second.train(2) == wanted[0]
    assert second.state() == wanted[1]
    status.assert_consumed()


@pytest.mark.parametrize(
    ("saves", "restores"),
    [
        ("one device", "three"),
        ("three", "two"),
        ("two", "divided"),
        pytest.param("divided", "one device", marks=pytest.mark.long),
        pytest.param("central", "two", marks=pytest.mark.long),
        pytest.param("two", "central", marks=pytest.mark.long),
    ],
)
def test_any_strategy_restores_the_checkpoint_of_another(saves, restores, tmp_path):
    first = Training(STRATEGIES[saves]())
    first.train(2)
    path = first.tracked.save(tmp_path / "ckpt")
    second = Training(STRATEGIES[restores]())
    second.train(1)
    placed = [v.value.sharding for v in second.model.variables]
    second.tracked.restore(path).assert_consumed()
    for name in ("model", "optimizer", "mean"):
        for mine, wanted in zip(getattr(second, name).variables, getattr(first, name).variables, strict=True):
            np.testing.assert_array_equal(mine, wanted)
    assert (int(second.step), int(second.rows)) == (2, 24)
    assert [v.value.sharding for v in second.model.variables] == placed
    second.train(1)
    assert (int(second.step), int(second.rows)) == (3, 36)


# --- variables with a value for each replica ----------------------------------------------------------------


def on_read(strategy, aggregation, dtype, values=None):
    with strategy.scope():
        v = rx.Variable(np.zeros((), dtype), synchronization="on_read", aggregation=aggregation)
    if values is not None:

        def assign():
            number = rx.get_replica_context().replica_id_in_sync_group
            v.assign(jnp.asarray(values, dtype)[number])

        strategy.run(assign)
    return v


def components(v):
    return [x.item() for x in map(np.asarray, v.values)]


@pytest.mark.parametrize(
    ("aggregation", "dtype", "values", "on_two", "on_three", "on_one"),
    [
        ("sum", "int32", [2, 3], [2, 3], [5, 0, 0], [5]),
        ("sum", "float32", [0.1, 0.2], [0.1, 0.2], [0.3, 0, 0], [0.3]),
        ("mean", "float32", [3, 4], [3, 4], [3.5] * 3, [3.5]),
        ("only_first_replica", "int32", [3, 4], [3, 4], [3] * 3, [3]),
        ("none", "int32", [3, 4], [3, 4], [3, 4, 3], [3]),
    ],
)
def test_per_replica_values_are_restored(aggregation, dtype, values, on_two, on_three, on_one, saved):
    path = saved(v=on_read(mirrored(2), aggregation, dtype, values))
    for strategy, wanted in (
        (mirrored(2), on_two),
        (mirrored(3), on_three),
        (rx.OneDeviceStrategy("cpu:0"), on_one),
    ):
        v = on_read(strategy, aggregation, dtype)
        rx.Checkpoint(v=v).restore(path).assert_consumed()
        np.testing.assert_allclose(components(v), np.asarray(wanted, dtype), rtol=1e-7)
        if len(wanted) == 2:
            assert bits(components(v)) == bits(np.asarray(wanted, dtype).tolist())


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_restored_values_differ_by_rounding_only_on_other_numbers_of_replicas(aggregation, saved):
    """A sum is added in another order when it is saved than when it is read; a mean of R equal values is rounded again."""
    for num_saved, num_restored in ((2, 8), (3, 1), (8, 3)):
        values = np.random.default_rng(num_saved).uniform(1, 2, size=num_saved)
        before = on_read(mirrored(num_saved), aggregation, "float32", values)
        v = on_read(mirrored(num_restored), aggregation, "float32")
        rx.Checkpoint(v=v).restore(saved(v=before)).assert_consumed()
        np.testing.assert_array_max_ulp(np.asarray(v.numpy()), np.asarray(before.numpy()), maxulp=2)


# --- shards ------------------------------------------------------------------------------------------------


def test_components_of_a_metric_are_restored_before_its_first_step(tmp_path):
    """Each replica continues with its own sum: another order would round differently."""
    values = np.float32([[0.1, 1e3], [0.7, 3e-3], [1e-4, 0.3], [0.2, 7e3], [1e-3, 0.9]])

    def means(halves):
        path = None
        for half in halves:
            strategy = mirrored(2)
            with strategy.scope():
                metric = keras.metrics.Mean()
            checkpoint = rx.Checkpoint(metric=metric)
            checkpoint.restore(path)
            gc.collect()
            for rows in half:
                each = strategy.experimental_distribute_values_from_function(
                    lambda ctx, rows=rows: rows[ctx.replica_id_in_sync_group]
                )
                strategy.run(metric.update_state, args=(each,))
            path = checkpoint.save(tmp_path / "metric")
        return bits([v.value.tolist() for v in metric.variables])

    assert means([values[:3], values[3:]]) == means([values])
    assert means([values[:1], values[1:2], values[2:]]) == means([values])


def test_restored_components_are_given_to_a_program_once(tmp_path):
    """The variable may show the restored sum again when the program is deleted, because its components are deleted
    too."""

    def update():
        each = strategy.experimental_distribute_values_from_function(lambda _: np.float32(1))
        strategy.run(metric.update_state, args=(each,))

    path = None
    for _ in range(2):
        strategy = mirrored(2)
        with strategy.scope():
            metric = keras.metrics.Sum()
        checkpoint = rx.Checkpoint(metric=metric)
        checkpoint.restore(path)
        if path is None:
            update()
            path = checkpoint.save(tmp_path / "metric")
    gc.collect()
    strategy.bindings.binding_of(metric.total).components.delete()  # as donating them does
    gc.collect()
    update()
    assert metric.result() == 4


@pytest.mark.parametrize("is_held", [False, True])
def test_restored_values_are_copied_for_the_first_step_only_if_held(is_held, tmp_path, monkeypatch):
    strategy = rx.MirroredStrategy(jax.local_devices()[:2])
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
    checkpoint = rx.Checkpoint(v=v)
    path = checkpoint.save(tmp_path / "ckpt")
    v.assign([0.0, 0.0])
    checkpoint.restore(path)
    held = v.value if is_held else None
    num_copies = []
    monkeypatch.setattr(spmd, "own_copy", lambda *arguments: num_copies.append(1) or own_copy(*arguments))
    monkeypatch.setattr(bindings, "own_copy", spmd.own_copy)
    strategy.run(lambda: v.assign_add([1.0, 1.0]))
    assert len(num_copies) == is_held
    assert v.numpy().tolist() == [2.0, 3.0]
    assert held is None or np.asarray(held).tolist() == [1.0, 2.0]


def test_shards_are_saved_as_one_and_restored_into_any_number(saved):
    whole = np.arange(14, dtype=np.float32).reshape(7, 2)
    cut = lambda *rows: rx.experimental.ShardedVariable([rx.Variable(part) for part in np.split(whole, rows)])  # noqa: E731
    path = saved(table=cut(3, 5))
    for other in (cut(2), cut(1, 2, 6), rx.Variable(np.zeros_like(whole))):
        other.assign(np.zeros_like(whole))
        rx.Checkpoint(table=other).restore(path).assert_consumed()
        np.testing.assert_array_equal(other, whole)


# --- what does not fit ---------------------------------------------------------------------------------------


def test_mismatch_names_each_variable_and_restores_nothing(saved):
    path = saved(
        a=rx.Variable([1.0, 2.0], name="alpha"), b=rx.Variable(1, trainable=False), c=rx.Variable(5.0)
    )
    a, b, c = rx.Variable([0.0] * 3, name="aleph"), rx.Variable(1.5), rx.Variable(0.0)
    message(
        CheckpointMismatchError,
        lambda: rx.Checkpoint(a=a, b=b, c=c).restore(path),
        "a (saved as 'alpha', here 'aleph'): shape (2,) in the checkpoint, (3,) here",
        "b (saved as 'Variable'): dtype int32 in the checkpoint, float32 here",
    )
    assert float(c) == 0.0


def test_names_on_one_side_only(saved, caplog, tmp_path):
    path = saved(a=rx.Variable(1.0), old=rx.Variable(2.0))
    a, new = rx.Variable(0.0), rx.Variable(0.0)
    checkpoint = rx.Checkpoint(a=a, new=new)
    status = checkpoint.restore(path)
    message(UnmatchedCheckpointError, status.assert_consumed, "  old")
    message(UnmatchedCheckpointError, status.assert_existing_objects_matched, "new (Variable)")
    status.assert_nontrivial_match()
    assert float(a) == 1.0
    assert "does not have new (Variable), so these keep their values" in caplog.text

    caplog.clear()
    checkpoint = rx.Checkpoint(a=a)
    checkpoint.restore(path)
    assert not caplog.text
    checkpoint.save(tmp_path / "other")
    assert "were not used: old" in caplog.text
    caplog.clear()
    checkpoint.restore(path).expect_partial()
    checkpoint.save(tmp_path / "other")
    assert not caplog.text


def built_layer(units=2):
    layer = keras.layers.Dense(units)
    layer.build((None, 3))
    return layer


UNMATCHED = {
    "variable": lambda: {"net": rx.Variable(1.0)},
    "built layer": lambda: {"net": built_layer()},
    "layer that is not built": lambda: {"net": keras.layers.Dense(2)},
    "pytree": lambda: {"state": {"w": jnp.ones(3)}},
    "empty list": lambda: {"history": []},
    "another Checkpoint": lambda: {"net": rx.Checkpoint(layer=built_layer())},
    "other contents": lambda: {"layer": keras.Sequential([keras.Input((3,)), built_layer()])},
}


@pytest.mark.parametrize("make", UNMATCHED.values(), ids=UNMATCHED)
@pytest.mark.parametrize("restore", ["restore", "read"])
def test_checkpoint_of_which_nothing_matches_is_refused(make, restore, saved):
    path = saved(layer=built_layer())
    checkpoint = rx.Checkpoint(**make())
    error = message(CheckpointMismatchError, lambda: getattr(checkpoint, restore)(path), "layer/kernel")
    assert "rx.Checkpoint(layer=...)" in error
    assert checkpoint.save_counter == 0


def test_restore_before_anything_can_match_is_deferred(saved):
    """As in TensorFlow, a program may restore before it has made, or tracks, its objects."""
    path = saved(part=rx.Checkpoint(layer=built_layer()), history=[1, 2])
    for make in (
        lambda: rx.Checkpoint(),
        lambda: rx.Checkpoint(part=rx.Checkpoint(), other=rx.Variable(0.0)),
        lambda: rx.Checkpoint(part=rx.Checkpoint(layer=keras.layers.Dense(2)), other=rx.Variable(0.0)),
        lambda: rx.Checkpoint(history=[], other=rx.Variable(0.0)),
    ):
        status = make().restore(path)
        message(UnmatchedCheckpointError, status.assert_consumed, "part/layer/kernel")
    empty = rx.Checkpoint().save(path)
    assert rx.Checkpoint(late=rx.Variable(1.0)).restore(empty).path == empty


def test_objects_tracked_later_are_restored_then(saved):
    path = saved(a=rx.Variable(1.0), b=[rx.Variable(2.0), rx.Variable(3.0)], number=4)
    checkpoint = rx.Checkpoint(a=rx.Variable(0.0))
    status = checkpoint.restore(path)
    checkpoint.b = [rx.Variable(0.0), rx.Variable(0.0)]
    assert [float(v) for v in checkpoint.b] == [2.0, 3.0]
    checkpoint.number = 0
    assert checkpoint.number == 4
    status.assert_consumed()


def test_layers_are_restored_as_they_are_built(saved):
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
    x = np.ones((1, 3), "float32")
    wanted = model.predict(x, verbose=0)
    path = saved(model=model)
    later = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
    status = rx.Checkpoint(model=later).restore(path)
    np.testing.assert_array_equal(later.predict(x, verbose=0), wanted)
    status.assert_consumed()

    wrong = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(2)])
    rx.Checkpoint(model=wrong).restore(path)
    message(CheckpointMismatchError, lambda: wrong(x), "shape (3, 4) in the checkpoint, (3, 5) here")


def test_normalization_layer_uses_restored_values(saved):
    """The model makes constants of its variables when it is built."""
    x = np.arange(8, dtype="float32").reshape(4, 2)
    layer = keras.layers.Normalization()
    layer.adapt(x)
    path = saved(layer=layer)
    later, built = keras.layers.Normalization(), keras.layers.Normalization()
    built.build((None, 2))
    for other in (later, built):
        status = rx.Checkpoint(layer=other).restore(path)
        np.testing.assert_array_equal(other(x), layer(x))
        status.assert_consumed()


def test_last_restore_of_two_checkpoints_wins(tmp_path):
    """The newest is restored, and then the best, before anything is built."""

    def made(value):
        layer = keras.layers.Dense(1)
        if value:
            layer.build((None, 2))
            layer.kernel.assign(jnp.full((2, 1), value))
        return layer

    paths = [rx.Checkpoint(layer=made(value)).save(tmp_path / f"of{value}") for value in (1.0, 2.0)]
    for is_one in (True, False):
        later = made(None)
        checkpoint = rx.Checkpoint(layer=later)
        for path in paths:
            (checkpoint if is_one else rx.Checkpoint(layer=later)).restore(path)
        later.build((None, 2))
        assert np.asarray(later.kernel).tolist() == [[2.0], [2.0]]


def test_deferred_restore_does_not_undo_a_later_one(tmp_path):
    """As in TensorFlow, the last restore wins, no matter when the objects are found."""

    def made(late, history):
        return rx.Checkpoint(late=rx.Variable(late), history=history, fresh=rx.Variable(late))

    first = rx.Checkpoint(inner=made(3.0, [3, 3, 3])).save(tmp_path / "first")
    second = rx.Checkpoint(late=rx.Variable(77.0), history=[7]).save(tmp_path / "second")
    outer, part = rx.Checkpoint(), made(0.0, [])
    status = outer.restore(first)
    part.restore(second)
    outer.inner = part
    assert (float(part.late), part.history, float(part.fresh)) == (77.0, [7], 3.0)
    status.assert_consumed()
    outer.restore(first).assert_consumed()
    assert (float(part.late), part.history) == (3.0, [3, 3, 3])


def test_deferred_restore_stays_pending_if_another_restore_fails(saved, tmp_path, caplog):
    good = saved(v=rx.Variable(1.0), late=rx.Variable(2.0))
    other = rx.Checkpoint(v=rx.Variable([1.0, 2.0])).save(tmp_path / "other")
    checkpoint = rx.Checkpoint(v=rx.Variable(0.0))
    checkpoint.restore(good)
    message(CheckpointMismatchError, lambda: checkpoint.restore(other), "nothing of it was restored")
    checkpoint.save(tmp_path / "ckpt")
    assert "were not used: late" in caplog.text
    checkpoint.late = rx.Variable(0.0)
    assert float(checkpoint.late) == 2.0


def test_later_mismatch_is_raised_once_and_stops_nothing_else(saved, tmp_path):
    """It stops neither saves, nor other deferred restores, nor later attributes of the right shape."""
    part = rx.Checkpoint()
    of_part = rx.Checkpoint(late=rx.Variable([1.0, 2.0]), more=rx.Variable(3.0))
    outer = rx.Checkpoint(part=part)
    outer.restore(rx.Checkpoint(part=of_part).save(tmp_path / "outer"))
    part.restore(saved(late=rx.Variable(4.0), more=rx.Variable(5.0), last=rx.Variable(6.0)))
    late = rx.Variable(0.0)
    message(
        CheckpointMismatchError, lambda: setattr(part, "late", late), "shape (2,) in the checkpoint, () here"
    )
    assert float(late) == 4.0
    assert [part.save(tmp_path / "part")[-2:] for _ in range(2)] == ["-2", "-3"]
    part.more = rx.Variable(0.0)
    assert float(part.more) == 5.0
    message(CheckpointMismatchError, lambda: setattr(part, "last", rx.Variable([0.0])), "last", "shape ()")
    part.last = rx.Variable(0.0)
    assert float(part.last) == 6.0


def test_attribute_set_in_a_nested_checkpoint_is_restored_then(saved):
    """As in TensorFlow's guide, which takes single variables from a model."""
    layer = keras.layers.Dense(3)
    layer.build((None, 2))
    path = saved(net=rx.Checkpoint(l1=layer))
    fake_layer = rx.Checkpoint(bias=rx.Variable(jnp.ones(3)))
    status = rx.Checkpoint(net=rx.Checkpoint(l1=fake_layer)).restore(path)
    assert fake_layer.bias.numpy().tolist() == [0, 0, 0]
    fake_layer.kernel = rx.Variable(jnp.zeros((2, 3)))
    np.testing.assert_array_equal(fake_layer.kernel.numpy(), layer.kernel)
    status.assert_consumed()


class Begun(keras.layers.Layer):
    """Its build creates a layer, and assigns a first value."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def build(self, shape):
        self.dense.build(shape)
        self.dense.kernel.assign(jnp.ones((shape[-1], 2)))

    def call(self, x):
        return self.dense(x)


def test_model_is_restored_after_the_assignments_of_its_build(saved, monkeypatch):
    """The checkpoint is read once, not for each layer, which took 7 s for 200 layers."""
    model = keras.Sequential([Begun(), keras.layers.Dense(4), keras.layers.Dense(2)])
    x = np.ones((1, 3), "float32")
    model.build((None, 3))
    model.layers[0].dense.kernel.assign(jnp.full((3, 2), 5.0))
    wanted, path = model(x), saved(model=model)
    later = keras.Sequential([Begun(), keras.layers.Dense(4), keras.layers.Dense(2)])
    status = rx.Checkpoint(model=later).restore(path)
    reads, array = [], SavedCheckpoint.array
    monkeypatch.setattr(SavedCheckpoint, "array", lambda saved, key: reads.append(key) or array(saved, key))
    later.build((None, 3))
    status.assert_consumed()
    np.testing.assert_array_equal(later(x), wanted)
    assert len(reads) == len(set(reads)) == len(model.variables)


def test_between_steps_only(saved):
    strategy, v = mirrored(2), rx.Variable(1.0)
    checkpoint = rx.Checkpoint(v=v)
    for call in (lambda: checkpoint.save("ckpt"), lambda: checkpoint.restore(saved(v=v))):
        message(CrossReplicaContextError, lambda call=call: strategy.run(call), "outside of run")
        for traced in (rx.function(lambda call=call: call()), jax.jit(lambda call=call: call())):
            message(CrossReplicaContextError, traced, "It would run once")
    assert checkpoint.save_counter == 0


# --- optimizers of another kind ---------------------------------------------------------------------------


class OwnAdam(keras.optimizers.Adam):
    pass


def compiled(optimizer, is_built=True):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    if is_built:
        optimizer.build(model.trainable_variables)
    return model


@pytest.fixture
def saved_of_adam(tmp_path):
    model = compiled(keras.optimizers.Adam(0.05))
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    rx.Checkpoint(model=model).save(tmp_path / "ckpt")
    return model, tmp_path


@pytest.mark.parametrize("make", [keras.optimizers.AdamW, OwnAdam])
def test_subclass_of_an_optimizer_restores_its_moments(saved_of_adam, make):
    saved, folder = saved_of_adam
    model = compiled(make(0.5))
    rx.Checkpoint(model=model).restore(folder / "ckpt-1").assert_consumed()
    for got, wanted in zip(model.optimizer.variables, saved.optimizer.variables, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("is_built", [True, False])
def test_moments_are_not_restored_into_another_optimizer(saved_of_adam, caplog, is_built):
    """Both are called momentums and have the same shapes: training would continue with numbers of another meaning."""
    saved, folder = saved_of_adam
    model = compiled(keras.optimizers.SGD(0.5, momentum=0.9), is_built)
    status = rx.Checkpoint(model=model).restore(folder / "ckpt-1")
    if not is_built:
        status.assert_existing_objects_matched()  # there is nothing of it yet
    model.optimizer.build(model.trainable_variables)
    assert float(model.optimizer.learning_rate) == 0.5
    assert int(model.optimizer.iterations) == 0
    assert not any(np.any(momentum) for momentum in model.optimizer.momentums)
    np.testing.assert_array_equal(model.layers[0].kernel, saved.layers[0].kernel)
    said = [text for text in caplog.messages if "model/optimizer: Adam in the checkpoint, SGD here" in text]
    assert len(said) == 1
    with pytest.raises(UnmatchedCheckpointError, match="model/optimizer/momentums/0"):
        status.assert_existing_objects_matched()


def test_training_does_not_resume_with_another_optimizer(saved_of_adam):
    _, folder = saved_of_adam
    model = compiled(keras.optimizers.SGD(0.5, momentum=0.9))
    before = [bits(each) for each in model.variables]
    manager = rx.CheckpointManager(rx.Checkpoint(model=model), folder)
    says = "model/optimizer: Adam in the checkpoint, SGD here", "nothing of it was restored"
    message(CheckpointMismatchError, manager.restore_or_initialize, *says)
    assert [bits(each) for each in model.variables] == before


def test_evaluation_needs_no_optimizer(saved_of_adam):
    """compile() makes an optimizer of Keras's choice, which is never built."""
    saved, folder = saved_of_adam
    model = compiled("rmsprop", is_built=False)
    checkpoint = rx.Checkpoint(model=model)
    assert rx.CheckpointManager(checkpoint, folder).restore_or_initialize() is not None
    np.testing.assert_array_equal(model.layers[0].kernel, saved.layers[0].kernel)
    checkpoint.restore(folder / "ckpt-1").assert_existing_objects_matched()
