"""The arguments that ``Strategy.run`` passes to the replica function, when it makes a new program, and its results."""

import collections
import dataclasses
import functools
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax import errors


@pytest.fixture
def two():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def per_replica(strategy, *rows):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.asarray(rows[context.replica_id_in_sync_group])
    )


def local(strategy, value):
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(value)]


# --- passing ------------------------------------------------------------------------------------------


def test_python_values_are_passed_as_they_are(two):
    model, seen = object(), []

    def step(*args, **kwargs):
        seen.append((args, kwargs))

    arguments = (1, 2.5, True, None, "text", b"bytes", 1j, model, rx.ReduceOp.SUM, jnp.float32, len)
    two.run(step, arguments, {"flag": False, "pytree": {"a": [1, (2, None)]}})
    assert seen == [(arguments, {"flag": False, "pytree": {"a": [1, (2, None)]}})]
    assert [type(a) for a in seen[0][0][:3]] == [int, float, bool]


def test_arrays_are_traced(two):
    seen = []

    def step(*args):
        seen.extend((type(a).__name__, a.shape, str(a.dtype)) for a in args)

    two.run(step, (np.ones(2, np.float64), np.float32(1), jnp.ones((1, 2)), np.int64(3), np.array([True])))
    assert [s[1:] for s in seen] == [
        ((2,), "float32"),
        ((), "float32"),
        ((1, 2), "float32"),
        ((), "int32"),
        ((1,), "bool"),
    ]
    assert all("Tracer" in s[0] for s in seen)


Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    rows: object
    label: object


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x],
        lambda x: (x, x),
        lambda x: {"a": {"b": x}},
        lambda x: Point(x, [x]),
        lambda x: Batch(x, {"l": x}),
        lambda x: collections.OrderedDict(a=x),
    ],
)
def test_pytrees_keep_their_types_both_ways(two, wrap):
    kinds = []

    def step(pytree):
        kinds.append(type(pytree))
        return jax.tree_util.tree_map(lambda x: x + 1, pytree)

    result = two.run(step, (wrap(per_replica(two, [1.0], [2.0])),))
    assert type(result) is kinds[0] is type(wrap(0))
    for leaf in jax.tree_util.tree_leaves(result, is_leaf=lambda x: isinstance(x, rx.PerReplica)):
        assert local(two, leaf) == [[2.0], [3.0]]


def test_keyword_arguments_and_defaults(two):
    def step(x, /, y, *rest, scale=2, **others):
        return x * scale + y + sum(rest) + others.get("z", 0)

    one = jnp.float32(1)
    assert local(two, two.run(step, (one, 2.0))) == [4.0, 4.0]
    result = two.run(step, [one, 2.0, 3.0, one], {"scale": 10, "z": per_replica(two, 1.0, 2.0)})
    assert local(two, result) == [17.0, 18.0]


def test_numpy_scalars_inside_objects_arrays_of_objects_and_strings(two):
    text = np.array(["a", "b"])
    assert two.run(lambda t: t.tolist(), (text,)) == ["a", "b"]  # no numbers: a constant


def test_prng_keys(two):
    key = jax.random.key(0)
    expected = np.asarray(jax.random.normal(key, (2,)))
    for result in (
        two.run(lambda k: jax.random.normal(k, (2,)), (key,)),
        two.run(lambda: jax.random.normal(key, (2,))),
    ):
        np.testing.assert_allclose(local(two, result), [expected, expected], rtol=1e-6)


def test_arrays_from_anywhere(two):
    far = jax.device_put(jnp.float32(3), jax.devices()[7])
    everywhere = jax.device_put(
        jnp.float32(4), jax.NamedSharding(jax.sharding.Mesh(jax.devices(), "x"), jax.P())
    )
    other = rx.OneDeviceStrategy("cpu:5").run(lambda: jnp.float32(5))
    assert local(two, two.run(lambda a, b, c: a + b + c, (far, everywhere, other))) == [12.0, 12.0]
    assert local(two, two.run(lambda: far + 1)) == [4.0, 4.0]


def of_library(name, module):
    """A value without an array, of a class with this name and module, as TensorFlow's composite tensors are."""
    return type(name, (), {"__module__": module, "shape": (2, 2), "dtype": np.dtype("float32")})()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            of_library("SparseTensor", "tensorflow.python.framework.sparse_tensor"),
            "a SparseTensor of tensorflow, not an array: it is sparse. Pass tf.sparse.to_dense(x)",
        ),
        (
            of_library("RaggedTensor", "tensorflow.python.ops.ragged.ragged_tensor"),
            "a RaggedTensor of tensorflow, not an array: its rows have different lengths. Pass x.to_tensor(), and a mask",
        ),
        (
            of_library("IndexedSlices", "tensorflow.python.framework.indexed_slices"),
            "an array: it is some rows of an array. Pass rx.IndexedSlices(",
        ),
        (of_library("csr_matrix", "scipy.sparse._csr"), "it is sparse. Pass x.toarray()"),
    ],
    ids=["sparse", "ragged", "slices", "scipy"],
)
@pytest.mark.parametrize("as_one", [lambda run: run, rx.function], ids=["run", "function"])
def test_sparse_and_ragged_arguments_raise_an_error_that_names_the_argument(two, value, says, as_one):
    call = as_one(lambda pytree: two.run(lambda x: x["ids"], args=(pytree,)))
    message(errors.InvalidArgumentError, lambda: call({"ids": value}), "args[0]['ids'] is ", says)


def test_results_of_run_are_arguments_again(two):
    values = per_replica(two, 1.0, 2.0)
    for _ in range(3):
        values = two.run(lambda x: x * 2, (values,))
    assert local(two, values) == [8.0, 16.0]
    same = two.run(lambda: jnp.float32(1))
    assert local(two, two.run(lambda x: x + 1, (same,))) == [2.0, 2.0]


def test_kinds_of_functions(two):
    class Model:
        scale = 3

        def method(self, x):
            return x * self.scale

        def __call__(self, x):
            return x * self.scale * 2

        @staticmethod
        def static(x):
            return x

        @classmethod
        def cls(cls, x):
            return x * cls.scale

    model, x = Model(), jnp.float32(1)
    functions = [
        model.method,
        model,
        Model.static,
        Model.cls,
        functools.partial(model.method, x),
        jax.jit(model),
    ]
    arguments = [(x,), (x,), (x,), (x,), (), (x,)]
    results = [local(two, two.run(fn, args))[0] for fn, args in zip(functions, arguments, strict=True)]
    assert results == [3.0, 6.0, 1.0, 3.0, 3.0, 6.0]
    assert local(two, two.run(rx.function(lambda x: x + 1), (x,))) == [2.0, 2.0]
    assert local(two, two.run(jnp.sqrt, (jnp.float32(4),))) == [2.0, 2.0]


# --- programs: what is traced again --------------------------------------------------------------------


def traced(two, calls):
    """The number of traces of a function in a sequence of calls of (args, kwargs)."""
    count = []

    def step(*args, **kwargs):
        count.append(1)
        return jnp.zeros(())

    for args in calls:
        two.run(step, args)
    return len(count)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([(jnp.ones(2),), (jnp.zeros(2),)], 1),
        ([(jnp.ones(2),), (jnp.ones(3),), (jnp.ones(2),)], 2),
        ([(np.ones(2, np.float32),), (jnp.ones(2),)], 1),
        ([(np.ones(2, np.float64),), (jnp.ones(2),)], 1),
        ([(1,), (1,), (2,)], 2),
        ([(1,), (True,), ("1",)], 3),
        ([("a",), ("a",), ("b",)], 2),
        ([(0.1,), (0.1,)], 1),
        ([(0.1,), (0.2,), (0.3,), (0.4,), (0.1,)], 2),
        ([(None,), (jnp.ones(2),)], 2),
        ([([jnp.ones(2)],), ((jnp.ones(2),),)], 2),
    ],
)
def test_traces(two, calls, expected):
    assert traced(two, calls) == expected


def test_a_learning_rate_that_changes_is_an_input_after_two_values(two):
    count = []

    def step(rate):
        count.append(1)
        return jnp.ones(()) * rate

    results = [local(two, two.run(step, (0.5 / (i + 1),)))[0] for i in range(8)]
    np.testing.assert_allclose(results, [0.5 / (i + 1) for i in range(8)], rtol=1e-6)
    assert len(count) == 2


def test_types_of_scalars_are_distinguished(two):
    dtypes = [str(two.run(jnp.asarray, (x,)).dtype) for x in (1, True, 1.0, np.float16(1), np.int8(1), 1j)]
    assert dtypes == ["int32", "bool", "float32", "float16", "int8", "complex64"]


def test_a_weakly_typed_array_does_not_widen_what_it_is_computed_with(two):
    weak, half = jnp.asarray(2.0), jnp.ones(2, jnp.bfloat16)
    assert weak.weak_type
    for run in (two.run, lambda fn, args: rx.function(fn)(*args)):
        assert str(run(lambda x, y: x * y, (weak, half)).dtype) == "bfloat16"


def test_recreated_lambdas_are_one_program(two):
    count, results = [], []

    def step(x):
        count.append(1)
        return x + 1

    for i in range(5):
        x = jnp.float32(i)
        results.append(local(two, two.run(lambda: step(x)))[0])  # noqa: B023
    assert results == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(count) == 1


def test_closure_contents_are_part_of_the_program(two):
    def make(scale, offset):
        return lambda x: x * scale + offset

    x = jnp.float32(1)
    assert [local(two, two.run(make(a, b), (x,)))[0] for a, b in ((2, 1), (3, 1), (2, 5), (2, 1))] == [
        3,
        4,
        7,
        3,
    ]


factor = 2.0


def uses_a_global(x):
    return x * factor


def test_globals_are_part_of_the_program(two, monkeypatch):
    x = jnp.float32(1)
    assert local(two, two.run(uses_a_global, (x,))) == [2.0, 2.0]
    monkeypatch.setitem(globals(), "factor", 7.0)
    assert local(two, two.run(uses_a_global, (x,))) == [7.0, 7.0]


def test_a_default_that_changes_is_part_of_the_program(two):
    def step(x, scale=2.0, *, offset=1.0):
        return x * scale + offset

    x = jnp.float32(1)
    assert local(two, two.run(step, (x,)))[0] == 3.0
    step.__defaults__ = (5.0,)
    assert local(two, two.run(step, (x,)))[0] == 6.0
    step.__kwdefaults__ = {"offset": 0.0}
    assert local(two, two.run(step, (x,)))[0] == 5.0


def test_objects_of_one_class_are_different_programs(two):
    class Model:
        def __init__(self, scale):
            self.scale = scale

    def step(model, x):
        return x * model.scale

    x = jnp.float32(1)
    results = [
        local(two, two.run(step, (Model(scale), x)))[0] for scale in (1, 2, 3)
    ]  # freed at once: ids repeat
    assert results == [1.0, 2.0, 3.0]


def test_retracing_is_reported_once_with_the_reason(two, caplog):
    def step(x, number):
        return x * number

    with caplog.at_level(logging.WARNING, logger="replicax"):
        for i in range(12):
            two.run(step, (jnp.float32(1), i))
    messages = [r.getMessage() for r in caplog.records if "traced" in r.getMessage()]
    assert len(messages) == 1
    assert "step" in messages[0]
    assert "3 became 4" in messages[0]


# --- results ------------------------------------------------------------------------------------------


def test_results_that_are_variables_objects_and_types(two):
    with two.scope():
        v = rx.Variable(1.0)
    model = object()
    returned = two.run(lambda: (v, model, jnp.float32, len, rx.ReduceOp.SUM))
    assert returned == (v, model, jnp.float32, len, rx.ReduceOp.SUM)
    assert returned[0] is v


def test_equal_arrays_come_back_as_per_replica(two):
    result = two.run(lambda: (jnp.ones(2), np.zeros(1, np.int8), np.float32(3)))
    assert all(isinstance(x, rx.PerReplica) for x in result)
    assert float(two.reduce("SUM", result[2], axis=None)) == 6.0  # R times an equal value, as in TensorFlow
    assert [str(x.dtype) for x in result] == ["float32", "int8", "float32"]


def test_sizes_that_differ_come_back_per_replica(two):
    ragged = per_replica(two, np.ones(3), np.ones(2))
    result = two.run(lambda x: (x.shape[0], x.shape[0] * 0.5, x.shape[0] > 2, len(x.shape)), (ragged,))
    assert local(two, result[0]) == [3, 2]
    assert local(two, result[1]) == [1.5, 1.0]
    assert local(two, result[2]) == [True, False]
    assert result[3] == 1


def test_nothing_is_blocked(two):
    x = jnp.ones((600, 600))

    def heavy(x):
        return jax.lax.fori_loop(0, 20, lambda _, y: y @ x / 600, x)

    def share_of_dispatch():
        start = time.perf_counter()
        result = two.run(heavy, (x,))
        dispatched = time.perf_counter() - start
        jax.block_until_ready(result.array)
        return dispatched / (time.perf_counter() - start)

    jax.block_until_ready(two.run(heavy, (x,)).array)
    # Once is enough: other threads may have the processor while this thread dispatches.
    assert any(share_of_dispatch() < 1 / 2 for _ in range(5))


def test_donated_positions(two):
    options = rx.RunOptions(donate_args=(-1,))
    first, second = per_replica(two, 1.0, 2.0), per_replica(two, 3.0, 4.0)
    assert local(two, two.run(lambda a, b: a + b, (first, second), options=options)) == [4.0, 6.0]
    assert local(two, first) == [1.0, 2.0]
    with pytest.raises(errors.DonatedError):
        second.values
    with pytest.raises(errors.InvalidArgumentError, match=r"donate_args=\(3,\).*1"):
        two.run(lambda a: a, (first,), options=rx.RunOptions(donate_args=(3,)))


def test_run_in_a_function_that_jax_traces_raises_if_the_batch_is_an_argument():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    (batch,) = strategy.experimental_distribute_dataset([np.ones(4)])
    with pytest.raises(rx.errors.TraceError, match=r"inside rx.function instead of jax.jit"):
        jax.jit(lambda batch: strategy.run(lambda x: x, args=(batch,)))(batch)


def test_a_replica_without_rows_is_named_where_a_row_is_needed():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    (batch,) = strategy.experimental_distribute_dataset([np.ones((2, 2))])
    with pytest.raises(ValueError, match="zero-size array") as caught:
        strategy.run(lambda x: jnp.max(x), args=(batch,))
    (note,) = [note for note in caught.value.__notes__ if "has no rows" in note]
    assert "the batch has 2 rows for 3 replicas" in note
