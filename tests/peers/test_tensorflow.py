import itertools
import logging

import numpy as np
import pytest
import tensorflow as tf

from replicax._src.devices.autoshard import AutoShardPolicy, NotEnoughFilesError, WorkerShare
from replicax._src.input.arrays import UnsupportedElementError
from replicax._src.input.element_specs import INFINITE, ArraySpec
from replicax._src.input.elements import NotResumableError, element_spec
from replicax._src.input.opening import describe, open_elements
from replicax._src.input.sources import UnbatchedDatasetError, open_source

Dataset = tf.data.Dataset
HINT = tf.data.experimental.SHARD_HINT


def lists(elements):
    return [element.tolist() for element in elements]


def numbers(dataset):
    return dataset.map(lambda line: tf.strings.to_number(line, tf.int64))


@pytest.fixture
def paths(tmp_path):
    """Three files of four numbers: 0..3, 10..13, 20..23."""
    return write_files(tmp_path, 3)


def write_files(folder, num_files):
    paths = [str(folder / f"{index}.txt") for index in range(num_files)]
    for index, path in enumerate(paths):
        with open(path, "w") as file:
            file.writelines(f"{10 * index + row}\n" for row in range(4))
    return paths


def rows_of_workers(make, num_workers, policy=None):
    """The rows of each worker, each with its own dataset."""
    rows = []
    for index in range(num_workers):
        share = WorkerShare(num_workers=num_workers, worker_index=index, num_replicas=num_workers)
        steps = open_source(make(), share=share, policy=policy).iterate()
        rows.append([row for step in steps for row in np.asarray(step.tree.unflatten(step.arrays)).tolist()])
    return rows


def policy_of(dataset, num_workers=2):
    """The chosen policy, from the text for people."""
    share = WorkerShare(num_workers=num_workers, worker_index=0, num_replicas=num_workers)
    return open_source(dataset, share=share).describe()["policy"]


# --- elements -----------------------------------------------------------------------------------------


def test_values_order_and_partial_batches():
    elements = open_elements(Dataset.range(5).batch(2))
    assert lists(elements.iterate()) == lists(elements.iterate()) == [[0, 1], [2, 3], [4]]
    assert elements.description == "a tf.data.Dataset"


def test_pytrees():
    dataset = Dataset.from_tensor_slices({"x": np.zeros((4, 3), np.float32), "y": (np.arange(4), np.ones(4))})
    elements = open_elements(dataset.batch(2))
    element = next(elements.iterate())
    assert (element["x"].shape, element["x"].dtype) == ((2, 3), np.float32)
    assert isinstance(element["y"], tuple)
    assert element["y"][0].tolist() == [0, 1]
    assert element_spec(elements) == {
        "x": ArraySpec((None, 3), np.float32),
        "y": (ArraySpec((None,), np.int64), ArraySpec((None,), np.float64)),
    }


def test_none_and_bfloat16():
    dataset = Dataset.range(2).batch(2).map(lambda x: (tf.cast(x, tf.bfloat16), None))
    elements = open_elements(dataset)
    element = next(elements.iterate())
    assert element[0].dtype.name == element_spec(elements)[0].dtype.name == "bfloat16"
    assert element[0].tolist() == [0.0, 1.0]
    assert element[1] is None


def test_specs():
    static = open_elements(Dataset.range(4).batch(2, drop_remainder=True))
    assert element_spec(static) == ArraySpec((2,), np.int64)
    rankless = Dataset.range(4).batch(2).map(lambda x: tf.numpy_function(lambda x: x, [x], tf.int64))
    assert element_spec(open_elements(rankless)) == ArraySpec((None,), np.int64)


def test_cardinalities():
    assert open_elements(Dataset.range(5).batch(2)).cardinality == 3
    assert open_elements(Dataset.range(5).batch(2).repeat()).cardinality == INFINITE
    assert open_elements(Dataset.range(5).filter(lambda x: x > 1).batch(2)).cardinality is None


def test_reshuffling_continues():
    elements = open_elements(Dataset.range(50).shuffle(50, seed=1).batch(50))
    first, second = lists(elements.iterate()), lists(elements.iterate())
    assert first != second
    assert sorted(first[0]) == sorted(second[0]) == list(range(50))


def test_elements_are_kept_and_never_written_to(strategy):
    dataset = Dataset.range(64).repeat(20).batch(16)
    held = list(open_elements(dataset).iterate())
    assert not any(element.flags.writeable for element in held)
    on_devices = list(strategy.experimental_distribute_dataset(dataset))
    for index, (element, step) in enumerate(zip(held, on_devices, strict=True)):
        expected = list(range(16 * (index % 4), 16 * (index % 4) + 16))
        assert element.tolist() == expected
        assert np.concatenate([np.asarray(part) for part in step.values]).tolist() == expected


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Dataset.range(3).map(tf.strings.as_string).batch(2), "The element .* is text .*to_number"),
        (
            lambda: Dataset.range(3).map(lambda x: {"t": tf.strings.as_string(x), "x": x}).batch(2),
            r"The component \['t'\] .* is text",
        ),
        (lambda: Dataset.range(4).map(tf.range).ragged_batch(2), "ragged .*padded_batch"),
        (
            lambda: Dataset.range(4).map(lambda x: {"x": tf.sparse.from_dense([x])}).batch(2),
            r"\['x'\] .* is sparse .*tf.sparse.to_dense",
        ),
        (lambda: Dataset.range(4).window(2), "is no tensor"),
    ],
)
def test_dtypes_unsupported_by_devices(make, text):
    with pytest.raises(UnsupportedElementError, match=text):
        open_elements(make())


def test_rows_raise():
    with pytest.raises(UnbatchedDatasetError):
        open_source(Dataset.range(3)).element_spec()
    with pytest.raises(UnbatchedDatasetError):
        next(open_source(Dataset.range(3)).iterate())


def test_positions_raise_and_say_what_to_do():
    batches = open_elements(Dataset.range(5).batch(2)).iterate()
    with pytest.raises(NotResumableError, match=r"dataset.skip\(num_steps\)"):
        batches.get_state()
    with pytest.raises(NotResumableError, match="from_tfrecords"):
        batches.set_state({"position": 1})


# --- workers ------------------------------------------------------------------------------------------

READERS = {
    "text": lambda paths: numbers(tf.data.TextLineDataset(paths)),
    "interleave": lambda paths: numbers(
        Dataset.from_tensor_slices(paths).interleave(tf.data.TextLineDataset, num_parallel_calls=2)
    ),
    "list_files": lambda paths: numbers(
        Dataset.list_files(paths, seed=3).interleave(tf.data.TextLineDataset).shuffle(4)
    ),
    "counted": lambda paths: numbers(tf.data.TextLineDataset(paths)).apply(
        tf.data.experimental.assert_cardinality(12)
    ),
    "indexed": lambda paths: numbers(
        Dataset.range(3).interleave(lambda index: tf.data.TextLineDataset(tf.gather(paths, index)))
    ),
}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("reader", READERS)
def test_files_are_distributed(reader, num_workers, paths):
    rows = rows_of_workers(lambda: READERS[reader](paths).batch(3), num_workers)
    assert sorted(itertools.chain(*rows)) == [10 * file + row for file in range(3) for row in range(4)]
    for index, of_worker in enumerate(rows):
        files = {row // 10 for row in of_worker}
        assert files == set(range(index, 3, num_workers)) or reader == "list_files"
        assert len(files) == len(range(index, 3, num_workers))


def test_tfrecords_are_distributed(tmp_path):
    paths = [str(tmp_path / f"{index}.tfrecord") for index in range(3)]
    for index, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for row in range(5):
                writer.write(tf.io.serialize_tensor(tf.constant(10 * index + row)).numpy())

    def make():
        def parse(record):
            return tf.ensure_shape(tf.io.parse_tensor(record, tf.int32), ())

        return tf.data.TFRecordDataset(paths).map(parse).batch(4)

    rows = rows_of_workers(make, 2)
    assert sorted(rows[0]) == [*range(5), *range(20, 25)]
    assert sorted(rows[1]) == list(range(10, 15))


def test_how_many_files_there_are(paths):
    for reader in READERS.values():
        assert describe(reader(paths).batch(2)).count_files() == 3
    repeated = numbers(Dataset.list_files(paths).repeat().interleave(tf.data.TextLineDataset)).batch(2)
    assert describe(repeated.take(3)).count_files() == 3
    joined = tf.data.TextLineDataset(paths[:1]).concatenate(tf.data.TextLineDataset(paths[1:]))
    assert describe(numbers(joined).batch(2)).count_files() == 1
    for dataset in (Dataset.range(8), Dataset.range(8).repeat(), Dataset.range(8).filter(lambda x: x > 1)):
        assert describe(dataset.batch(2)).count_files() is None


def test_too_few_files_are_read_by_all(paths):
    assert policy_of(numbers(tf.data.TextLineDataset(paths)).batch(2), 2).startswith(
        "FILE: AUTO: the 3 files"
    )
    assert policy_of(numbers(tf.data.TextLineDataset(paths)).batch(2), 4).startswith(
        "DATA: AUTO: 3 files are not"
    )
    rows = rows_of_workers(lambda: numbers(tf.data.TextLineDataset(paths)).batch(4), 4)
    assert sorted(itertools.chain(*rows)) == [10 * file + row for file in range(3) for row in range(4)]


def with_policy(dataset, name):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[name]
    return dataset.with_options(options)


@pytest.mark.parametrize("name", ["AUTO", "FILE", "DATA", "HINT", "OFF"])
def test_the_policy_of_the_dataset(name, paths):
    dataset = with_policy(numbers(tf.data.TextLineDataset(paths)).batch(2), name)
    assert describe(dataset).policy is AutoShardPolicy[name]
    assert policy_of(dataset).split(":")[0] == ("FILE" if name == "AUTO" else name)


def test_given_policy_wins(paths):
    def make():
        return with_policy(numbers(tf.data.TextLineDataset(paths)).batch(2), "DATA")

    rows = rows_of_workers(make, 3, AutoShardPolicy.FILE)
    assert rows == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]

    def hinted():
        return with_policy(Dataset.range(4).shard(HINT, HINT).batch(2), "OFF")

    assert rows_of_workers(hinted, 2, AutoShardPolicy.HINT) == [[0, 2], [1, 3]]


def test_datasets_without_files():
    def make():
        return Dataset.range(8).batch(4)

    assert rows_of_workers(make, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(NotEnoughFilesError, match=r"needs a source that reads files, got a tf.data.Dataset"):
        rows_of_workers(lambda: with_policy(make(), "FILE"), 2)
    assert rows_of_workers(lambda: with_policy(make(), "OFF"), 2) == [list(range(8))] * 2


def test_hints():
    def make():
        return Dataset.range(8).shard(HINT, HINT).batch(2)

    assert rows_of_workers(lambda: with_policy(make(), "HINT"), 1) == [list(range(8))]
    assert rows_of_workers(lambda: with_policy(make(), "HINT"), 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert rows_of_workers(make, 2, AutoShardPolicy.HINT) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert "no SHARD_HINT" in policy_of(with_policy(Dataset.range(8).batch(2), "HINT"))
    for num_workers in (1, 2):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"SHARD_HINT.*AutoShardPolicy.HINT"):
            rows_of_workers(make, num_workers)


def test_opening_consumes_no_shuffle(paths):
    def make():
        return numbers(tf.data.TextLineDataset(paths)).shuffle(12, seed=1).batch(12)

    dataset = make()
    expected = [[batch.tolist() for batch in dataset.as_numpy_iterator()] for _ in range(2)]
    elements = open_source(make())
    elements.element_spec()
    assert [
        [np.asarray(step.tree.unflatten(step.arrays)).tolist() for step in elements.iterate()]
        for _ in range(2)
    ] == expected


# --- strategies ---------------------------------------------------------------------------------------


def test_through_a_strategy(strategy, caplog):
    rows = np.arange(7, dtype=np.float32)
    dataset = Dataset.from_tensor_slices((rows, 2 * rows)).batch(4)
    with caplog.at_level(logging.INFO, logger="replicax"):
        distributed = strategy.experimental_distribute_dataset(dataset)
    assert "a tf.data.Dataset" in caplog.text
    assert len(distributed) == 2
    for _ in range(2):
        total = 0.0
        for x, y in distributed:
            total += float(
                strategy.reduce("SUM", strategy.run(lambda x, y: (x * y).sum(), args=(x, y)), axis=None)
            )
        assert total == float((2 * rows**2).sum())
    assert "a tf.data.Dataset" in repr(distributed)
