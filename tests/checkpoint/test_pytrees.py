"""Pytrees of arrays and numbers, random keys, modules of nnx, and objects with their own state."""

import collections
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from checkpoint_bits import bits
from checks import message
from replicax.checkpoint import (
    CheckpointMismatchError,
    HostRandomState,
    UnmatchedCheckpointError,
    UntrackableError,
)
from replicax.errors import DonatedError, InvalidArgumentError

Pair = collections.namedtuple("Pair", "left right")


def pytree(fill):
    of = lambda dtype, *shape: np.full(shape, fill, dtype)  # noqa: E731
    return {
        "params": Pair(jnp.asarray(of("float32", 2, 3)), [of("int64"), of("bool", 3)]),
        "small": {
            name: jnp.asarray(of(getattr(ml_dtypes, name), 3))
            for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")
        },
        "empty": jnp.zeros((0, 4)),
        "complex": of("complex64", 2),
        "half": of("float16", 1),
        "scalar": np.float64(fill),
        "numbers": (int(fill), float(fill), bool(fill), str(fill), None),
        "keys": jax.random.key(fill),
        "raw key": jax.random.PRNGKey(fill),
    }


def test_pytree_is_replaced_by_one_of_the_same_types(saved):
    path = saved(state=pytree(1))
    checkpoint = rx.Checkpoint(state=pytree(0))
    old = checkpoint.state
    checkpoint.restore(path).assert_consumed()
    new = checkpoint.state
    assert bits(old["params"].left) == bits(pytree(0)["params"].left)
    assert jax.tree.structure(new) == jax.tree.structure(pytree(1))
    for mine, wanted in zip(jax.tree.leaves(new), jax.tree.leaves(pytree(1)), strict=True):
        assert type(mine) is type(wanted)
        assert mine.dtype == wanted.dtype if hasattr(wanted, "dtype") else mine == wanted
        if isinstance(wanted, jax.Array) and jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            mine, wanted = jax.random.key_data(mine), jax.random.key_data(wanted)
        assert bits(mine) == bits(wanted)


def test_functional_training_resumes_with_arrays_on_their_devices(saved):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    optimizer = optax.adam(0.1)
    params = {"w": jnp.ones(4)}
    state = strategy.replicate((params, optimizer.init(params)))

    def step(state):
        params, bindings = state
        updates, bindings = optimizer.update(jax.tree.map(jnp.cos, params), bindings)
        return optax.apply_updates(params, updates), bindings

    def steps(state, number):
        for _ in range(number):
            state = strategy.run(step, args=(state,))
        return state

    middle = steps(state, 2)
    checkpoint = rx.Checkpoint(state=middle)
    path = saved(state=middle)
    wanted = steps(middle, 2)
    checkpoint.state = strategy.replicate((params, optimizer.init(params)))
    shardings = [x.sharding for x in jax.tree.leaves(checkpoint.state)]
    checkpoint.restore(path).assert_consumed()
    assert [x.sharding for x in jax.tree.leaves(checkpoint.state)] == shardings
    for mine, other in zip(jax.tree.leaves(steps(checkpoint.state, 2)), jax.tree.leaves(wanted), strict=True):
        assert bits(mine) == bits(other)


def test_modules_of_nnx(saved):
    class Model(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def make(seed):
        model = Model(seed)
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    model, optimizer = make(1)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    path = saved(model=model, optimizer=optimizer)
    other, its_optimizer = make(2)
    rx.Checkpoint(model=other, optimizer=its_optimizer).restore(path).assert_consumed()
    for mine, wanted in ((other, model), (its_optimizer, optimizer)):
        mine, wanted = (jax.tree.leaves(nnx.state(each)) for each in (mine, wanted))
        for a, b in zip(mine, wanted, strict=True):
            a, b = (
                jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b)
            )
            assert bits(a) == bits(b)


def test_states_and_the_hosts_random_numbers(saved):
    class Counter:
        def __init__(self, state):
            self.state = state

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    path = saved(random=HostRandomState(), counters=[Counter({"n": [1, 2]}), Counter(b"\x00\xff")])
    wanted = [random.random(), *np.random.permutation(5).tolist(), np.random.normal()]
    counters = [Counter(None), Counter(None)]
    rx.Checkpoint(random=HostRandomState(), counters=counters).restore(path).assert_consumed()
    assert [random.random(), *np.random.permutation(5).tolist(), np.random.normal()] == wanted
    assert [counter.state for counter in counters] == [{"n": [1, 2]}, b"\x00\xff"]
    message(UntrackableError, lambda: saved(c=Counter(object())), "Counter", "is not JSON")


def test_numbers_are_restored_as_they_were_saved(saved):
    """Programs begin with ``best = 0``, and save 0.25, or an array with one number."""
    path = saved(
        best=0.25, large=2**70, flag=True, rate=1, loss=jnp.float32(0.5), count=np.int64(3), name="it"
    )
    checkpoint = rx.Checkpoint(best=0, large=0, flag=0, rate=0.5, loss=float("inf"), count=0, name="")
    checkpoint.restore(path).assert_consumed()
    got = [getattr(checkpoint, name) for name in ("best", "large", "flag", "rate", "loss", "count", "name")]
    assert [(value, type(value)) for value in got] == [
        (0.25, float), (2**70, int), (True, bool), (1.0, float), (0.5, float), (3, int), ("it", str)
    ]  # fmt: skip


def test_lists_of_numbers_and_none_get_the_saved_values(saved):
    """Programs start without a history and without a best value."""
    losses = [float(i) for i in range(12)]
    variable = rx.Variable(1.0)
    path = saved(history=losses, best=0.25, last=[variable, [jnp.float32(3), jnp.float32(4)]], empty=[])
    checkpoint = rx.Checkpoint(history=[], best=None, last=[variable, []], empty=[])
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.history == losses
    assert checkpoint.best == 0.25
    assert [float(x) for x in checkpoint.last[1]] == [3, 4]
    assert checkpoint.empty == []
    begun = rx.Checkpoint(history=[7.0, 8.0], best=9.0, last=[variable, [jnp.float32(0)]], empty=[])
    begun.restore(path).assert_consumed()
    assert begun.history == losses


def test_lists_and_none_in_pytrees_get_the_saved_values(saved):
    """A saved value of another form has no place, and raises an error."""
    path = saved(
        logs={"loss": [1.0, 2.0], "best": 3, "by.name/": Pair([4], None), "odd": [[5]], "w": jnp.ones(2)}
    )
    checkpoint = rx.Checkpoint(
        logs={"loss": [], "best": None, "by.name/": Pair([], None), "odd": [], "w": None, "own": None}
    )
    status = checkpoint.restore(path)
    assert checkpoint.logs == {
        "loss": [1.0, 2.0], "best": 3, "by.name/": Pair([4], None), "odd": [], "w": None, "own": None
    }  # fmt: skip
    message(UnmatchedCheckpointError, status.assert_consumed, "logs/odd/0/0", "logs/w")


def test_numbers_set_after_restoring_stay(saved, tmp_path):
    """This also holds while another object of the checkpoint has no place yet, when attributes are checked as they are
    set."""
    path = saved(
        extra=rx.Variable(1.0),
        history=[1, 2, 3],
        best=0.25,
        arrays=[jnp.float32(7), jnp.float32(8)],
        late=[4],
    )
    checkpoint = rx.Checkpoint(history=[], best=None, arrays=[])
    checkpoint.restore(path).expect_partial()
    checkpoint.late = []
    got = checkpoint.history, checkpoint.best, [float(x) for x in checkpoint.arrays], checkpoint.late
    assert got == ([1, 2, 3], 0.25, [7, 8], [4])
    for history in ([], [9.0]):
        checkpoint.history, checkpoint.best, checkpoint.arrays = history, None, []
        assert (checkpoint.history, checkpoint.best, checkpoint.arrays) == (history, None, [])
    checkpoint.late.clear()
    again = rx.Checkpoint(history=[], best=None, arrays=[], late=[])
    again.restore(checkpoint.save(tmp_path / "again")).assert_consumed()
    assert (again.history, again.late) == ([9.0], [])


def test_failed_save_leaves_nothing(tmp_path):
    array = jnp.ones(3)
    checkpoint = rx.Checkpoint(state={"w": array})
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    message(DonatedError, lambda: checkpoint.save(tmp_path / "ckpt"), "'state/w'", "checkpoint.state = state")
    assert not [*tmp_path.iterdir()]
    assert checkpoint.save_counter == 0


def test_text_is_not_restored_into_a_number(saved):
    path = saved(a="hello", b="no", c=3)
    checkpoint = rx.Checkpoint(a=3, b=False, c="")
    text = message(
        CheckpointMismatchError, lambda: checkpoint.restore(path), "a: 'hello' was saved (str), but 3 is here"
    )
    assert "b: 'no'" in text
    assert "c: 3" in text
    assert (checkpoint.a, checkpoint.b, checkpoint.c) == (3, False, "")


def test_pytrees_with_objects_are_saved_completely(saved):
    variable = rx.Variable(1.0)
    optimizer = optax.adam(0.1)

    def state(fill):
        optimizer_state = jax.tree.map(lambda x: x + fill, optimizer.init({"w": jnp.zeros(2)}))
        return {
            "v": variable,
            "epoch": fill,
            "train": Pair([variable, optimizer_state], (jax.random.key(fill), None, str(fill))),
        }

    path = saved(state=state(3))
    checkpoint = rx.Checkpoint(state=state(0))
    mine, _ = variable.assign(9.0), checkpoint.state
    checkpoint.restore(path).assert_consumed()
    assert mine is not None
    assert float(variable.read_value()) == 1.0
    assert checkpoint.state["epoch"] == 3
    (same, bindings), (key, nothing, text) = checkpoint.state["train"]
    assert same is variable
    assert isinstance(checkpoint.state["train"], Pair)
    jax.tree.map(np.testing.assert_array_equal, bindings, state(3)["train"].left[1])
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(3))).all()
    assert (nothing, text) == (None, "3")


def test_pytree_may_be_the_root(saved):
    checkpoint = rx.Checkpoint({"w": jnp.ones(2)})
    path = saved(root={"w": jnp.full(2, 5.0)})
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.root["w"].tolist() == [5.0, 5.0]


def test_unsupported_leaves_of_pytrees_raise():
    variable = rx.Variable(1.0)
    message(
        UntrackableError, lambda: rx.Checkpoint(a={1: variable, "1": rx.Variable(2.0)}), "the keys 1 and '1'"
    )
    message(UntrackableError, lambda: rx.Checkpoint(a=[variable, print]), "a/1=")
    for array in (np.array(["x"]), np.array([1], "m8[s]"), np.ones(2, np.longdouble)):
        message(UntrackableError, lambda a=array: rx.Checkpoint(a=a), "ndarray")


def test_bytes_in_another_order_are_restored(saved):
    checkpoint = rx.Checkpoint(state=np.zeros(4, ">f4"))
    checkpoint.restore(saved(state=np.arange(4, dtype=">f4"))).assert_consumed()
    assert checkpoint.state.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_keys_that_json_would_change_are_refused(saved):
    class Counts:
        def get_state(self):
            return {"epochs": [{1: 5}]}

        def set_state(self, state):
            raise AssertionError("nothing was saved")

    message(UntrackableError, lambda: saved(counts=Counts()), "the key 1 is not a string, at 'epochs/0'")


def test_reserved_names_of_a_checkpoint_raise():
    for name in ("save", "parts", "save_counter", "_mine"):
        message(InvalidArgumentError, lambda name=name: rx.Checkpoint(**{name: 3}), name, "another name")
    checkpoint = rx.Checkpoint()
    message(InvalidArgumentError, lambda: setattr(checkpoint, "restore", 3), "'my_restore'")
    message(InvalidArgumentError, lambda: checkpoint.save(3), "file_prefix is a path", "int")
    message(InvalidArgumentError, lambda: checkpoint.restore(3), "save_path is a path", "int")


def test_number_that_does_not_fit_raises_before_anything_is_restored(saved):
    path = saved(first=1, z=np.complex64(1j), n=10**400)
    checkpoint = rx.Checkpoint(first=0, z=0.5, n=0.5)
    message(
        CheckpointMismatchError,
        lambda: checkpoint.restore(path),
        "z: an array of complex64",
        "n: 1000",
        "too large for a float",
    )
    assert (checkpoint.first, checkpoint.z, checkpoint.n) == (0, 0.5, 0.5)


def test_saved_array_is_not_restored_into_a_number(saved):
    path = saved(state={"a": np.ones(1), "b": 1})
    checkpoint = rx.Checkpoint(state={"a": 1, "b": np.ones(())})
    text = message(
        CheckpointMismatchError,
        lambda: checkpoint.restore(path),
        "state/a: an array of float64",
    )
    assert "state/b: a state was saved" in text


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_large_arrays_are_read_into_memory_of_their_own(tmp_path, dtype):
    """Each layout gets the values. A program that the arrays are donated to changes no other array."""
    mesh = jax.make_mesh((2,), ("part",), devices=jax.devices()[:2])
    layouts = [
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))
        for names in (("part",), (None, "part"), ())
    ]
    values = np.arange(2**20).reshape(1024, 1024) % 7
    state = {
        str(number): jax.device_put(jnp.asarray(values, dtype), one) for number, one in enumerate(layouts)
    }
    state["nowhere"] = jnp.asarray(values, dtype)
    path = rx.Checkpoint(state=state).save(tmp_path / "ckpt")
    twice = jax.jit(lambda arrays: {name: array + array for name, array in arrays.items()}, donate_argnums=0)
    again = rx.Checkpoint(state=jax.tree.map(lambda array: array * 0, state))
    again.restore(path).assert_consumed()
    for name, array in again.state.items():
        assert array.sharding.is_equivalent_to(state[name].sharding, 2)
        assert array.committed == state[name].committed
        assert np.array_equal(np.asarray(array).astype(int), values), name
    new = twice(again.state)
    for name, array in new.items():
        assert np.array_equal(np.asarray(array), np.asarray(state[name] + state[name])), name
