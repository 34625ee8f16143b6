"""A variable has one layout: when it is new, after a step, and after a restore."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx

CPUS = [f"cpu:{i}" for i in range(8)]
LAYOUTS = {".*kernel": (None, "logical"), "table": ("logical", None)}


def with_map(count, **options):
    layout_map = rx.experimental.LayoutMap(LAYOUTS)
    return rx.MirroredStrategy(CPUS[:count], devices_per_replica=2, layout_map=layout_map, **options)


STRATEGIES = {
    "all": lambda: rx.MirroredStrategy(CPUS[:4], shard_state="all"),
    "optimizer": lambda: rx.MirroredStrategy(CPUS[:4], shard_state="optimizer"),
    "groups": lambda: rx.MirroredStrategy(CPUS[:4], shard_state="all", shard_size=2),
    "map": lambda: with_map(4),
    "map_and_all": lambda: with_map(8, shard_state="all"),
}


class Training:
    """Variables of replicax and Keras of every kind, of which some are sharded."""

    def __init__(self, make):
        self.strategy = make()
        keras.utils.set_random_seed(1)
        with self.strategy.scope():
            self.own = {
                "table": rx.Variable(np.arange(128.0).reshape(16, 8), name="table", dtype=jnp.float32),
                "made": rx.Variable(lambda: jnp.ones((16, 8)), name="made"),
                "fixed": rx.Variable(np.ones((8, 4), np.float32), trainable=False, name="fixed"),
                "odd": rx.Variable(np.ones((3, 5), np.float32), name="odd"),
                "count": rx.Variable(
                    np.zeros(8, np.float32), trainable=True, synchronization="ON_READ", aggregation="SUM"
                ),
            }
            self.of_keras = [keras.Variable(np.ones((8, 4), np.float32), name="of_array")]
            layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
            self.model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(4)])
            self.optimizer = keras.optimizers.Adam(0.01)
            self.optimizer.build(self.model.trainable_variables)

    @property
    def variables(self):
        return [*self.own.values(), *self.of_keras, *self.model.variables, *self.optimizer.variables]

    def step(self):
        def step():
            with rx.GradientTape() as tape:
                loss = jnp.sum(self.model(jnp.ones((2, 16)), training=True) ** 2)
            trained = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(loss, trained), trained)
            for variable in (*self.own.values(), *self.of_keras):
                variable.assign(variable + 1)

        self.strategy.run(step)

    def checkpoint(self):
        return rx.Checkpoint(own=self.own, keras=self.of_keras, model=self.model, optimizer=self.optimizer)

    def layouts(self):
        """Returns the stored sharding of each variable."""
        return [self.strategy.bindings.binding_of(variable).value.sharding for variable in self.variables]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            make, marks=() if name in ("all", "groups", "map_and_all") else pytest.mark.rest, id=name
        )
        for name, make in STRATEGIES.items()
    ],
)
def test_a_variable_has_one_layout_when_new_after_a_step_and_after_a_restore(make, tmp_path):
    training = Training(make)
    new = training.layouts()
    assert sum(not layout.is_fully_replicated for layout in new) >= 4
    training.step()
    assert training.layouts() == new
    path = training.checkpoint().save(tmp_path / "ckpt")

    again = Training(make)
    assert again.layouts() == new
    again.checkpoint().restore(path).assert_consumed()
    assert again.layouts() == new
    for here, there in zip(again.variables, training.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(here.value), np.asarray(there.value))
    again.step()
    assert again.layouts() == new


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_restored_value_has_its_layout_after_a_value_was_assigned(make, tmp_path):
    training = Training(make)
    new = training.layouts()
    path = training.checkpoint().save(tmp_path / "ckpt")
    for variable in training.variables:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    training.checkpoint().restore(path).assert_consumed()
    assert training.layouts() == new


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.arange(8, dtype=np.int64), "int32"),
        (np.arange(8, dtype=np.float64), "float32"),
        (np.arange(8, dtype=jnp.bfloat16), "bfloat16"),
        (np.arange(8) % 2 == 0, "bool"),
        (np.arange(8, dtype=np.float16)[::-1], "float16"),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_value_of_numpy_has_the_dtype_of_jax_in_shards_too(value, dtype):
    for make in (STRATEGIES["all"], rx.MirroredStrategy):
        with make().scope():
            variable = rx.Variable(value, trainable=True)
        assert variable.dtype == variable.value.dtype == dtype
        np.testing.assert_array_equal(variable.numpy(), np.asarray(value, dtype))


@pytest.mark.parametrize(
    "value",
    [np.arange(8, dtype=np.longdouble), np.arange(8, dtype=">f4"), np.ma.masked_array(np.arange(8.0))],
    ids=["long double", "byte order", "masked"],
)
def test_value_of_numpy_that_no_device_holds_raises_a_variable_error(value):
    with STRATEGIES["all"]().scope(), pytest.raises(rx.errors.VariableError):
        rx.Variable(value)


def test_value_of_numpy_goes_to_the_devices_in_shards(monkeypatch):
    """A variable may be larger than the memory of one device."""
    sizes = []

    def noting(own):
        def put(value, *args, **kwargs):
            sizes.append(value.nbytes)
            return own(value, *args, **kwargs)

        return put

    strategy = STRATEGIES["all"]()
    value = np.arange(4096.0, dtype=np.float32).reshape(64, 64)
    monkeypatch.setattr(jax, "device_put", noting(jax.device_put))
    monkeypatch.setattr(jnp, "asarray", noting(jnp.asarray))
    with strategy.scope():
        variable = rx.Variable(value)
    assert sizes == [value.nbytes / 4] * 4
    value[:] = 0  # the caller may change it
    assert float(jnp.sum(variable.value)) == 4096 * 4095 / 2
