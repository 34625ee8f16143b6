import itertools
import json
import logging

import datasets
import numpy as np
import pytest

from replicax._src.devices.autoshard import AutoShardPolicy, NotEnoughFilesError, WorkerShare
from replicax._src.input.arrays import InconsistentRowsError, UnsupportedElementError
from replicax._src.input.elements import (
    EmptyDatasetError,
    NotResumableError,
    UnsupportedSourceError,
    element_spec,
)
from replicax._src.input.opening import open_elements
from replicax._src.input.sources import UnbatchedDatasetError, open_source


def rows_of(num_rows):
    return datasets.Dataset.from_dict(
        {"x": [[i, i + 1] for i in range(num_rows)], "y": list(range(num_rows))}
    )


def stream_of(num_rows, num_shards=3):
    return rows_of(num_rows).to_iterable_dataset(num_shards=num_shards)


def ys(elements):
    return [element["y"].tolist() for element in elements]


# --- Dataset ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [None, "numpy", "torch", "pandas", "arrow"])
def test_values_order_and_partial_batches_in_every_format(format):
    dataset = rows_of(5).batch(2).with_format(format)
    elements = open_elements(dataset)
    for _ in range(2):
        assert ys(elements.iterate()) == [[0, 1], [2, 3], [4]]
    element = next(elements.iterate())
    assert isinstance(element["x"], np.ndarray)
    assert element["x"].tolist() == [[0, 1], [1, 2]]
    assert elements.cardinality == 3
    assert elements.description == "a Hugging Face Dataset of 3 elements"
    assert element_spec(elements)["x"].shape == (None, 2)


def test_columns_of_the_format():
    dataset = rows_of(4).batch(2)
    dataset.set_format("torch", columns=["y"])
    assert list(next(open_elements(dataset).iterate())) == ["y"]


def test_transforms_are_applied():
    def double(batch):
        return {"y": 2 * np.asarray(batch["y"])}

    dataset = rows_of(4).batch(2).with_transform(double)
    assert ys(open_elements(dataset).iterate()) == [[0, 2], [4, 6]]


def test_nothing():
    elements = open_elements(rows_of(4).batch(2).select([]))
    assert elements.cardinality == 0
    assert list(elements.iterate()) == []
    with pytest.raises(EmptyDatasetError):
        elements.first()


def test_a_position_is_resumed_in_a_new_dataset():
    def make():
        return rows_of(9).shuffle(seed=4).batch(2)

    before = open_elements(make()).iterate()
    next(before), next(before)
    state = json.loads(json.dumps(before.get_state()))
    after = open_elements(make()).iterate()
    after.set_state(state)
    rest = ys(after)
    assert rest == ys(before)
    assert [len(batch) for batch in rest] == [2, 2, 1]
    with pytest.raises(NotResumableError):
        open_elements(rows_of(20).batch(2)).iterate().set_state(state)


def test_text_raises_with_its_column():
    for dataset in (
        datasets.Dataset.from_dict({"y": [1, 2], "title": ["a", "b"]}).batch(2),
        datasets.Dataset.from_dict({"y": [1, 2], "title": ["a", "b"]}).to_iterable_dataset().batch(2),
    ):
        text = r"The column 'title': .*no device holds text.*dataset.remove_columns\('title'\)"
        with pytest.raises(UnsupportedElementError, match=text):
            next(open_elements(dataset).iterate())
        assert ys(open_elements(dataset.remove_columns("title")).iterate()) == [[1, 2]]


def test_lists_of_different_lengths_in_a_batch():
    dataset = datasets.Dataset.from_dict({"ids": [[1, 2], [3]]}).batch(2)
    with pytest.raises(UnsupportedElementError, match=r"The column 'ids': .*pad them"):
        next(open_elements(dataset).iterate())


@pytest.mark.parametrize("is_stream", [False, True])
def test_rows_raise(is_stream):
    dataset = rows_of(4).to_iterable_dataset() if is_stream else rows_of(4)
    with pytest.raises(UnbatchedDatasetError, match="Call the `batch` method"):
        next(open_source(dataset).iterate())


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("lengths", [[3, 5, 4], [3, 2, 3]])
def test_rows_that_are_lists_are_not_mistaken_for_batches(lengths, is_stream):
    tokens = {name: [list(range(n)) for n in lengths] for name in ("input_ids", "attention_mask")}
    dataset = datasets.Dataset.from_dict(tokens)
    dataset = dataset.to_iterable_dataset() if is_stream else dataset
    with pytest.raises(InconsistentRowsError, match=r"seem to be rows.*call .batch\(n\)"):
        list(open_elements(dataset).iterate())


def test_rows_of_one_length_count_as_a_batch(caplog):
    caplog.set_level(logging.INFO, "replicax")
    tokens = {"input_ids": [[1, 2, 3]] * 4}
    elements = open_elements(datasets.Dataset.from_dict(tokens))
    assert len(list(elements.iterate())) == len(list(elements.iterate())) == 4
    (record,) = [record for record in caplog.records if record.name == "replicax"]
    assert "is taken as a batch of 3 rows" in record.message
    caplog.clear()
    list(open_elements(datasets.Dataset.from_dict(tokens).batch(2)).iterate())
    assert not [record for record in caplog.records if record.name == "replicax"]


def test_workers_of_a_dataset():
    share = WorkerShare(num_workers=2, worker_index=1, num_replicas=2)
    steps = open_source(rows_of(7).batch(4), share=share).iterate()
    assert [step.tree.unflatten(step.arrays)["y"].tolist() for step in steps] == [[2, 3], [6]]
    with pytest.raises(NotEnoughFilesError):
        open_source(rows_of(7).batch(4), share=share, policy=AutoShardPolicy.FILE)


def test_dicts_of_splits():
    splits = datasets.DatasetDict({"train": rows_of(4), "test": rows_of(2)})
    with pytest.raises(UnsupportedSourceError, match=r"\['train', 'test'\].*dataset\['train'\].batch\(n\)"):
        open_elements(splits)
    streams = datasets.IterableDatasetDict({"test": stream_of(4)})
    with pytest.raises(UnsupportedSourceError, match=r"dataset\['test'\]"):
        open_elements(streams)


# --- IterableDataset ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [None, "torch", "arrow"])
def test_streams(format):
    dataset = stream_of(7).batch(2)
    elements = open_elements(dataset.with_format(format) if format else dataset)
    for _ in range(2):
        assert ys(elements.iterate()) == [[0, 1], [2, 3], [4, 5], [6]]
    assert elements.cardinality is None
    assert elements.description == "a Hugging Face IterableDataset of 3 shards"
    assert element_spec(elements)["x"].shape == (None, 2)


def test_streams_from_generators():
    def batches():
        batch = np.empty(3)
        for index in range(3):
            batch[:] = index
            yield {"y": batch, "z": np.ones((3, 1), np.float32)}

    elements = open_elements(datasets.IterableDataset.from_generator(batches))
    assert next(elements.iterate())["z"].dtype == np.float32
    assert [
        step.tree.unflatten(step.arrays)["y"].tolist()
        for step in open_source(datasets.IterableDataset.from_generator(batches)).iterate()
    ] == [
        [0, 0, 0],
        [1, 1, 1],
        [2, 2, 2],
    ]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_files_are_distributed(num_workers, tmp_path):
    paths = []
    for index in range(3):
        paths.append(str(tmp_path / f"{index}.parquet"))
        rows = {"y": [10 * index + row for row in range(5)]}
        datasets.Dataset.from_dict(rows).to_parquet(paths[-1])
    rows = []
    for index in range(num_workers):
        dataset = datasets.Dataset.from_parquet(paths, streaming=True, cache_dir=str(tmp_path / "cache"))
        share = WorkerShare(num_workers=num_workers, worker_index=index, num_replicas=num_workers)
        source = open_source(dataset.batch(4), share=share)
        if num_workers > 1:
            assert source.describe()["policy"].startswith("FILE: AUTO: the 3 files")
        rows.append(
            [row for step in source.iterate() for row in step.tree.unflatten(step.arrays)["y"].tolist()]
        )
    assert sorted(itertools.chain(*rows)) == [10 * file + row for file in range(3) for row in range(5)]
    for index, of_worker in enumerate(rows):
        assert {row // 10 for row in of_worker} == set(range(index, 3, num_workers))


@pytest.mark.parametrize("num_taken", range(5))
def test_a_stream_is_resumed_in_a_new_dataset(num_taken):
    def make():
        return stream_of(7).map(lambda row: {"z": row["y"] + 1}).batch(2)

    before = open_elements(make()).iterate()
    for _ in range(num_taken):
        next(before)
    state = json.loads(json.dumps(before.get_state()))
    elements = open_elements(make())
    after = elements.iterate()
    after.set_state(state)
    assert ys(after) == ys(before) == [[0, 1], [2, 3], [4, 5], [6]][num_taken:]
    assert ys(elements.iterate()) == [[0, 1], [2, 3], [4, 5], [6]]


def test_simultaneous_passes_have_separate_positions():
    def make():
        return open_elements(stream_of(24).batch(2))

    elements = make()
    one = elements.iterate()
    next(one), next(one)
    other = elements.iterate()
    next(other)
    elements.first()
    for _ in range(5):
        next(one)
    assert next(other)["y"].tolist() == [2, 3]
    for state, expected in ((one.get_state(), [14, 15]), (other.get_state(), [4, 5])):
        after = make().iterate()
        after.set_state(state)
        assert next(after)["y"].tolist() == expected
    assert next(one)["y"].tolist() == [14, 15]


def test_the_epoch_of_a_stream():
    def make():
        return stream_of(12, 1).shuffle(seed=1, buffer_size=12).batch(12)

    dataset = make()
    elements = open_elements(dataset)
    first = ys(elements.iterate())
    assert ys(elements.iterate()) == first
    dataset.set_epoch(1)
    assert ys(elements.iterate()) != first


def test_shuffled_streams_lose_rows_so_they_are_not_resumed():
    batches = open_elements(
        stream_of(9).shuffle(seed=1, buffer_size=3).map(lambda row: row).batch(2)
    ).iterate()
    next(batches)
    with pytest.raises(NotResumableError, match="shuffle buffer would be lost"):
        batches.get_state()


def test_a_state_of_something_else():
    with pytest.raises(NotResumableError):
        open_elements(stream_of(7).batch(2)).iterate().set_state({"version": 1})


@pytest.mark.parametrize(
    ("make", "differs"),
    [
        (lambda: stream_of(7).batch(3), "steps"),
        (lambda: stream_of(7).map(lambda row: row).batch(2), "steps"),
        (lambda: stream_of(7).skip(1).batch(2), "steps"),
        (lambda: stream_of(7, 2).batch(2), "num_shards"),
        (lambda: rows_of(7).remove_columns("x").to_iterable_dataset(num_shards=3).batch(2), "columns"),
    ],
)
@pytest.mark.parametrize("num_taken", [0, 2])
def test_state_of_another_stream_raises(make, differs, num_taken):
    before = open_elements(stream_of(7).batch(2)).iterate()
    for _ in range(num_taken):
        next(before)
    with pytest.raises(NotResumableError, match=f"its ({differs}|steps|columns) is"):
        open_elements(make()).iterate().set_state(before.get_state())


@pytest.mark.parametrize(
    "wrong",
    [
        {"position": -1},
        {"iterator": None},
        {"iterator": {"epoch": 0}},
        {"iterator": {"epoch": 0, "hugging_face": {}}},
        {"iterator": {"epoch": None, "hugging_face": None}},
    ],
)
def test_malformed_states_of_a_stream(wrong):
    batches = open_elements(stream_of(7).batch(2)).iterate()
    next(batches)
    with pytest.raises(NotResumableError):
        batches.set_state({**batches.get_state(), **wrong})
    assert ys(batches) == [[2, 3], [4, 5], [6]]


# --- strategies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
def test_through_a_strategy(strategy, is_stream):
    dataset = (rows_of(7).to_iterable_dataset(num_shards=2) if is_stream else rows_of(7)).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(2):
        total = 0
        for batch in distributed:
            sums = strategy.run(lambda batch: (batch["x"].sum(axis=1) * batch["y"]).sum(), args=(batch,))
            total += int(strategy.reduce("SUM", sums, axis=None))
        assert total == sum((2 * i + 1) * i for i in range(7))
    iterator = iter(distributed)
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    again = iter(strategy.experimental_distribute_dataset(dataset))
    again.set_state(state)
    assert len(list(again)) == 1
