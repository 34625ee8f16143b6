import collections
import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from checks import message
from replicax._src.input import pipeline
from replicax._src.input.arrays import InconsistentRowsError, UnsupportedElementError, as_array
from replicax._src.input.element_specs import INFINITE, ArraySpec
from replicax._src.input.elements import NotResumableError
from replicax._src.input.pipeline import from_arrays
from replicax._src.input.sources import open_source
from replicax._src.vocabulary.errors import InvalidArgumentError


def lists(dataset, count=None):
    return [element.tolist() for element in itertools.islice(dataset, count)]


def rows_of(dataset, count=None):
    return [row for batch in lists(dataset, count) for row in batch]


def test_batches():
    dataset = from_arrays(np.arange(5)).batch(2)
    assert lists(dataset) == [[0, 1], [2, 3], [4]]
    assert len(dataset) == dataset.cardinality == 3
    assert lists(dataset) == [[0, 1], [2, 3], [4]], "it starts again"


def test_batches_without_remainder():
    dataset = from_arrays(np.arange(5)).batch(2, drop_remainder=True)
    assert lists(dataset) == [[0, 1], [2, 3]]
    assert len(dataset) == 2


def test_batches_are_views():
    array = np.arange(12).reshape(6, 2)
    assert all(np.shares_memory(batch, array) for batch in from_arrays(array).batch(4))


def test_rows():
    dataset = from_arrays((np.arange(4).reshape(2, 2), np.array([5, 6])))
    assert len(dataset) == 2
    assert [(x.tolist(), int(y)) for x, y in dataset] == [([0, 1], 5), ([2, 3], 6)]


def test_pytrees_keep_their_structure():
    Pair = collections.namedtuple("Pair", "x y")
    arrays = {"pair": Pair(np.arange(3), jnp.arange(3.0)), "list": [np.zeros((3, 2))], "nothing": None}
    (first, second) = from_arrays(arrays).batch(2)
    assert isinstance(first["pair"], Pair)
    assert first["list"][0].shape == (2, 2)
    assert first["nothing"] is None
    assert second["pair"].y.tolist() == [2.0]


def test_jax_arrays_are_read_on_the_host():
    (batch,) = from_arrays(jnp.arange(3, dtype=jnp.bfloat16)).batch(3)
    assert isinstance(batch, np.ndarray)
    assert batch.dtype == jnp.bfloat16


def test_methods_return_new_datasets():
    dataset = from_arrays(np.arange(4))
    for other in (dataset.batch(2), dataset.shuffle(seed=1), dataset.repeat(2), dataset.take(1)):
        assert other is not dataset
    assert lists(dataset) == [0, 1, 2, 3]


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 3), st.booleans())
def test_batches_hold_every_row_once_per_repetition(num_rows, batch_size, count, is_repeated_first):
    rows = from_arrays(np.arange(num_rows)).shuffle(seed=3)
    repeated_first = rows.repeat(count).batch(batch_size)
    dataset = repeated_first if is_repeated_first else rows.batch(batch_size).repeat(count)
    batches = lists(dataset)
    assert len(batches) == len(dataset)
    assert sorted(itertools.chain(*batches)) == sorted(list(range(num_rows)) * count)


def test_repeat_before_and_after_batch():
    rows = from_arrays(np.arange(3))
    assert lists(rows.repeat(2).batch(2)) == [[0, 1], [2, 0], [1, 2]]
    assert lists(rows.batch(2).repeat(2)) == [[0, 1], [2], [0, 1], [2]]


@pytest.mark.parametrize("count", [None, -1])
def test_repeat_forever(count):
    dataset = from_arrays(np.arange(3)).repeat(count).batch(2)
    assert dataset.cardinality == INFINITE
    assert lists(dataset, 4) == [[0, 1], [2, 0], [1, 2], [0, 1]]
    assert dataset
    with pytest.raises(TypeError, match="is infinite"):
        len(dataset)


def test_empty_dataset_repeated_forever_ends():
    dataset = from_arrays(np.zeros((0, 2))).repeat().batch(2)
    assert list(dataset) == []
    assert len(dataset) == 0


def test_take():
    rows = from_arrays(np.arange(5))
    assert lists(rows.take(3)) == [0, 1, 2]
    assert lists(rows.take(3).batch(2)) == [[0, 1], [2]]
    assert lists(rows.batch(2).take(2)) == [[0, 1], [2, 3]]
    assert lists(rows.repeat().take(7).batch(4)) == [[0, 1, 2, 3], [4, 0, 1]]
    assert lists(rows.take(0)) == []
    assert lists(rows.take(9)) == lists(rows.take(-1)) == [0, 1, 2, 3, 4]
    assert len(rows.take(3).batch(2)) == 2


def test_shuffle_takes_a_new_order_for_each_pass_and_repetition():
    dataset = from_arrays(np.arange(50)).shuffle(seed=1).repeat(2).batch(50)
    orders = lists(dataset) + lists(dataset)
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_shuffle_without_reshuffling():
    dataset = from_arrays(np.arange(50)).shuffle(seed=1, reshuffle_each_iteration=False).repeat(2).batch(50)
    orders = lists(dataset) + lists(dataset)
    assert len({tuple(order) for order in orders}) == 1
    assert orders[0] != list(range(50))


def test_shuffle_follows_its_seed():
    def two_passes(seed):
        dataset = from_arrays(np.arange(50)).shuffle(seed=seed).batch(7)
        return rows_of(dataset), rows_of(dataset)

    assert two_passes(1) == two_passes(1)
    assert two_passes(1) != two_passes(2)
    assert two_passes(None) != two_passes(None)


def test_shuffled_batches_keep_their_rows():
    dataset = from_arrays(np.arange(20)).batch(2).shuffle(seed=1)
    batches = lists(dataset)
    assert sorted(batches) == [[2 * i, 2 * i + 1] for i in range(10)]
    assert batches != sorted(batches)
    assert batches != lists(dataset)


def test_shuffle_keeps_arrays_together():
    dataset = from_arrays((np.arange(20), np.arange(20) * 3)).shuffle(seed=2).batch(6)
    assert all((y == 3 * x).all() for x, y in dataset)


def test_element_spec():
    rows = from_arrays({"x": np.zeros((5, 3), np.float32), "y": np.arange(5)})
    assert rows.element_spec == {"x": ArraySpec((3,), np.float32), "y": ArraySpec((), np.int64)}
    assert rows.batch(2).element_spec["x"] == ArraySpec((None, 3), np.float32)
    assert rows.batch(2, drop_remainder=True).repeat().element_spec["x"] == ArraySpec((2, 3), np.float32)
    assert repr(rows.batch(2)).endswith(".batch(batch_size=2, drop_remainder=False)")


@pytest.mark.parametrize(
    "call",
    [
        lambda rows: rows.batch(0),
        lambda rows: rows.batch(2).batch(2),
        lambda rows: rows.repeat(-2),
        lambda rows: rows.take(-2),
        lambda rows: rows.shuffle(seed=-1),
        lambda rows: rows.repeat().shuffle(seed=1),
    ],
)
def test_impossible_calls(call):
    with pytest.raises(InvalidArgumentError):
        call(from_arrays(np.arange(4)))


def test_a_buffer_size_changes_nothing():
    rows = from_arrays(np.arange(40))
    with_size = [x.tolist() for x in rows.shuffle(2, seed=1).batch(40)]
    assert with_size == [x.tolist() for x in rows.shuffle(seed=1).batch(40)]
    assert with_size == [x.tolist() for x in rows.shuffle(buffer_size=100, seed=1).batch(40)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda rows: rows.batch(2.5), "batch_size must be a whole number of at least 1, got 2.5"),
        (lambda rows: rows.batch("3"), "got '3'"),
        (lambda rows: rows.batch(True), "got True"),
        (
            lambda rows: rows.shuffle(0),
            r"buffer_size must be a whole number of at least 1 .*Call shuffle\(\), .*, got 0",
        ),
        (lambda rows: rows.shuffle(seed="a"), "seed must be"),
        (lambda rows: rows.repeat(-2), r"-1 or None is for ever\), got -2"),
        (lambda rows: rows.take(None), "-1 is all"),
        (lambda rows: rows.shard(2, "1"), "index must be at least 0"),
    ],
)
def test_invalid_numbers(make, text):
    with pytest.raises(InvalidArgumentError, match=text):
        make(from_arrays(np.arange(4)))


def test_arrays_with_different_numbers_of_rows():
    with pytest.raises(InconsistentRowsError, match=r"\['x'\]: \(4, 2\), \['y'\]: \(5,\)"):
        from_arrays({"x": np.zeros((4, 2)), "y": np.zeros(5)})


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (np.array([[1], [1, 2]], dtype=object), "pad them"),
        (np.array(["a", "b"]), "no device holds text"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "convert it to numbers"),
        (np.zeros(2, dtype=[("a", int)]), "convert it to numbers"),
        (scipy.sparse.csr_matrix(np.eye(2)), "scipy sparse matrix"),
        (object(), "which is not an array"),
        ([1, 2], "A Python list is a pytree"),
        ((), "contains no arrays"),
        (None, "contains no arrays"),
    ],
)
def test_values_that_are_not_arrays(arrays, text):
    with pytest.raises(UnsupportedElementError, match=text):
        from_arrays(arrays)


@pytest.mark.parametrize("dtype", [">i2", ">i4", ">u4", ">f4", ">f8", ">c8", "<i4", "<f2", "?"])
def test_any_byte_order_is_read_correctly(dtype):
    values = np.array([0, 1, 200, 3]).astype(dtype)
    (batch,) = from_arrays(values).batch(4)
    assert batch.dtype.isnative
    assert batch.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (np.ma.masked_array([1.0, 2.0], [True, False]), r"\.filled\(value\)"),
        (np.zeros(2, np.longdouble), "float64"),
        (jax.random.split(jax.random.key(0), 2), "jax.random.key_data"),
    ],
)
def test_arrays_that_no_device_can_hold(leaf, text):
    with pytest.raises(UnsupportedElementError, match=text):
        as_array(leaf)


@pytest.mark.parametrize(
    "make", [np.asfortranarray, lambda x: x[:, ::2], lambda x: x[::-1], np.ascontiguousarray]
)
def test_shuffled_batches_of_any_layout(make):
    arrays = make(np.arange(4000 * 64).reshape(4000, 64))
    first, second = from_arrays(arrays).shuffle(seed=1).batch(2000)
    rows = np.concatenate([first, second])
    np.testing.assert_array_equal(rows[np.argsort(rows[:, 0])], arrays[np.argsort(arrays[:, 0])])


# --- map and prefetch ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_replicas():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def squared(x, y):
    return {"x": x, "square": y * y}


def test_map_is_called_with_rows_before_batch_and_with_batches_after():
    arrays = (np.arange(5), np.arange(5) + 1)
    rows = from_arrays(arrays).map(squared)
    assert [row["square"] for row in rows] == [1, 4, 9, 16, 25]
    shapes = []
    batches = rows.batch(2).map(lambda batch: shapes.append(batch["x"].shape) or batch["square"] + 1)
    assert [batch.tolist() for batch in batches] == [[2, 5], [10, 17], [26]]
    assert shapes == [(2,), (2,), (1,)]


CHANGED_ROWS = {
    "more": lambda batch: np.concatenate([batch, -2 * batch]),
    "fewer": lambda batch: batch[::2],
    "chosen": lambda batch: batch[batch % 3 != 0],  # sometimes fewer than replicas
    "none": lambda batch: batch[batch > 8],
}


@pytest.mark.parametrize("change", CHANGED_ROWS)
def test_a_function_of_batches_may_change_the_number_of_rows(change):
    """Replicas share the rows that it returns."""
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    dataset = from_arrays(np.arange(22, dtype=np.float32)).batch(8).map(CHANGED_ROWS[change])
    batches = list(dataset)
    sums = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        both = strategy.run(lambda x: (jnp.sum(x), jnp.float32(x.shape[0])), args=(batch,))
        sums.append([float(strategy.reduce("SUM", each, axis=None)) for each in both])
    assert sums == [[batch.sum(), len(batch)] for batch in batches]
    if change == "none":
        return  # of a batch without rows Keras's own mean is not a number
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(loss="mse")
    rows = dataset.map(lambda batch: (batch[:, None], 0 * batch[:, None]))
    loss = model.evaluate(rows, verbose=0)
    np.testing.assert_allclose(loss, np.mean(np.concatenate(batches) ** 2), rtol=1e-5)


def test_arrays_of_other_numbers_of_rows_after_a_function_of_batches_raise():
    dataset = from_arrays(np.arange(22)).batch(8).map(lambda batch: (batch, batch[::2]))
    iterator = iter(rx.MirroredStrategy(["cpu:0", "cpu:1"]).experimental_distribute_dataset(dataset))
    message(InconsistentRowsError, lambda: next(iterator), "(8,)", "(4,)")


def test_map_is_called_only_for_yielded_elements():
    rows, batches = [], []
    dataset = from_arrays(np.arange(100)).map(lambda x: rows.append(int(x)) or x).shuffle(seed=1).take(6)
    dataset = dataset.batch(2).map(lambda batch: batches.append(len(batch)) or batch).shuffle(seed=2).take(2)
    taken = [row for batch in lists(dataset) for row in batch]
    assert rows == taken
    assert batches == [2, 2]


def test_filter_keeps_rows_or_batches():
    rows = from_arrays((np.arange(10), np.arange(10) % 3))
    kept = rows.filter(lambda x, remainder: remainder == 1)
    assert [x.tolist() for x, _ in kept.batch(2)] == [[1, 4], [7]]
    assert kept.cardinality is None
    with pytest.raises(TypeError, match="length"):
        len(kept)
    assert [x.tolist() for x, _ in rows.batch(4).filter(lambda x, remainder: x[0] > 0)] == [
        [4, 5, 6, 7],
        [8, 9],
    ]
    calls = []
    mapped = (
        rows.map(lambda x, remainder: calls.append(int(x)) or x * 10).filter(lambda x: x > 50).shuffle(seed=1)
    )
    assert sorted(int(x) for x in mapped) == [60, 70, 80, 90]
    assert calls == list(range(10)), "each row is mapped once"
    assert rows.repeat().filter(lambda x, remainder: x < 2).cardinality == INFINITE


def test_map_keeps_the_order_of_other_methods():
    def mapped(rows):
        return rows.map(lambda x: x + 100)

    plain = from_arrays(np.arange(12)).shuffle(seed=3).shard(2, 1).repeat(2).take(9).batch(4).shuffle(seed=1)
    before = (
        mapped(from_arrays(np.arange(12)))
        .shuffle(seed=3)
        .shard(2, 1)
        .repeat(2)
        .take(9)
        .batch(4)
        .shuffle(seed=1)
    )
    after = mapped(
        from_arrays(np.arange(12)).shuffle(seed=3).shard(2, 1).repeat(2).take(9).batch(4).shuffle(seed=1)
    )
    expected = [(batch + 100).tolist() for batch in plain]
    assert [batch.tolist() for batch in before] == [batch.tolist() for batch in after] == expected
    assert len(before) == len(after) == 3


def test_rows_of_a_map_that_cannot_be_joined_are_named():
    ragged = from_arrays(np.arange(3)).map(lambda n: {"x": np.zeros(n)}).batch(3)
    message(InconsistentRowsError, lambda: list(ragged), "['x']", "map function")


def test_a_mapped_dataset_is_distributed_and_resumed(two_replicas):
    def make():
        rows = from_arrays((np.arange(7.0), np.arange(7))).shuffle(seed=2)
        return two_replicas.experimental_distribute_dataset(
            rows.map(lambda x, y: x * y).batch(3).map(lambda z: -z)
        )

    def rows_of(element):
        return np.concatenate(two_replicas.experimental_local_results(element)).tolist()

    whole = [rows_of(element) for element in make()]
    assert sorted(row for rows in whole for row in rows) == [-36, -25, -16, -9, -4, -1, 0]
    first = iter(make())
    next(first)
    second = iter(make())
    second.set_state(first.get_state())
    assert [rows_of(element) for element in second] == whole[1:]


def test_error_in_a_map_replaces_its_batch_and_the_next_one_follows(two_replicas):
    def refuse_three(x):
        if x == 3:
            raise KeyError("three")
        return x

    iterator = iter(
        two_replicas.experimental_distribute_dataset(from_arrays(np.arange(6)).map(refuse_three).batch(2))
    )
    next(iterator)
    with pytest.raises(KeyError, match="three"):
        next(iterator)
    assert np.concatenate(two_replicas.experimental_local_results(next(iterator))).tolist() == [4, 5]
    with pytest.raises(StopIteration):
        next(iterator)


def test_map_may_reuse_one_array():
    memory = np.zeros(2, np.float32)

    def write(batch):
        memory[...] = batch
        return memory

    steps = list(open_source(from_arrays(np.arange(6)).batch(2).map(write)).iterate())
    assert [step.arrays[0].tolist() for step in steps] == [[0, 1], [2, 3], [4, 5]]


def test_prefetch_and_parallel_calls_change_nothing():
    dataset = (
        from_arrays(np.arange(3)).prefetch(2).map(lambda x: x + 1, num_parallel_calls=-1).batch(2).prefetch()
    )
    assert [batch.tolist() for batch in dataset] == [[1, 2], [3]]


def test_tensor_slices_take_a_list_as_one_array():
    dataset = rx.data.Dataset.from_tensor_slices(({"x": [[1, 2], [3, 4]]}, [5, 6])).batch(2)
    ((features, labels),) = dataset
    assert features["x"].tolist() == [[1, 2], [3, 4]]
    assert labels.tolist() == [5, 6]


@pytest.mark.parametrize(
    "other",
    [
        from_arrays(np.arange(10)).shuffle(seed=2).batch(4),
        from_arrays(np.arange(100)).batch(4),
        from_arrays(np.arange(100)).shuffle(seed=2).shuffle(seed=3).batch(4),
    ],
    ids=["fewer rows", "no shuffle", "one shuffle more"],
)
def test_position_of_another_dataset_raises_and_changes_nothing(other):
    iterator = iter(from_arrays(np.arange(100)).shuffle(seed=1).batch(4))
    for _ in range(20):
        next(iterator)
    steps, pulled = other.steps, iter(other)
    first = next(pulled)
    with pytest.raises(NotResumableError):
        pulled.set_state(iterator.get_state())
    assert other.steps == steps
    found = np.concatenate([first, *pulled])
    assert sorted(found) == list(range(len(found)))  # it has gone on where it was


def test_positions_that_were_saved_when_take_and_shard_had_one_number_each_are_resumed():
    def make():
        return iter(from_arrays(np.arange(30)).shard(2, 1).take(6).batch(2))

    iterator = make()
    next(iterator)
    state = iterator.get_state()
    del state["cursor"]["skip"], state["cursor"]["of"]["left"]
    again = make()
    again.set_state(state)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in iterator] == [[5, 7], [9, 11]]


def test_arrays_of_a_loop_are_noted_and_those_of_a_distributed_dataset_are_not():
    columns = {name: np.arange(6.0) for name in "abc"}
    dataset = from_arrays(columns).batch(2)
    batches = list(dataset)
    assert all(pipeline.is_of_dataset(array) for batch in batches for array in batch.values())
    assert not pipeline.is_of_dataset(columns["a"])
    noted = set(pipeline._yielded.references)
    steps = list(open_source(dataset, num_replicas=2).iterate())
    assert len(steps) == 3
    assert set(pipeline._yielded.references) == noted


def test_the_notes_of_arrays_do_not_grow_with_the_batches():
    kept, columns = [], {str(number): np.arange(200) for number in range(200)}
    others = []  # so that new arrays do not take the places of old ones
    for number, batch in enumerate(from_arrays(columns).batch(1)):
        kept += [*batch.values()] * (number < 3)
        batch.clear()
        others += [np.asarray(0) for _ in columns]
    assert len(pipeline._yielded.references) <= 20_000  # of 40,000
    assert all(map(pipeline.is_of_dataset, kept))
