"""Datasets over files with several workers, on replicas, and resumed from saved positions."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from numbered_files import KINDS, make_numbers, rows_in, write_lines
from replicax._src.devices.autoshard import AutoShardPolicy, WorkerShare
from replicax._src.input.description import DatasetPart, Description
from replicax._src.input.elements import END, Elements
from replicax._src.input.opening import describe, open_elements
from replicax._src.input.sources import open_source

FILE, DATA, AUTO, HINT, OFF = (AutoShardPolicy(name) for name in ("FILE", "DATA", "AUTO", "HINT", "OFF"))
WORKERS = range(1, 5)


def steps_of(dataset, num_workers, worker, num_replicas, policy=None):
    share = WorkerShare(num_workers=num_workers, worker_index=worker, num_replicas=num_replicas)
    return list(open_source(dataset, share=share, policy=policy).iterate())


# --- workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_policy_file_distributes_files(tmp_path, kind, num_workers):
    dataset, numbers = make_numbers(tmp_path, kind, [5, 0, 7, 1, 0, 12])
    for policy in (FILE, AUTO):
        for worker in range(num_workers):
            steps = steps_of(dataset.batch(4), num_workers, worker, 2 * num_workers, policy)
            assert rows_in(steps) == list(itertools.chain(*numbers[worker::num_workers]))
            for step in steps:
                assert len(step.tree.unflatten(step.arrays)["n"]) == sum(step.sizes)
                assert len(step.sizes) == 2


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_policy_data_shares_every_batch(tmp_path, kind, num_workers):
    dataset, numbers = make_numbers(tmp_path, kind, [5, 0, 7])
    steps = [steps_of(dataset.batch(5), num_workers, w, 2 * num_workers, DATA) for w in range(num_workers)]
    assert [len(of_worker) for of_worker in steps] == [3] * num_workers
    together = [row for step in zip(*steps, strict=True) for row in rows_in(step)]
    assert together == list(itertools.chain(*numbers))


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_files_than_workers(tmp_path, kind):
    dataset, _ = make_numbers(tmp_path, kind, [4, 4])
    steps = [rows_in(steps_of(dataset.batch(3), 3, worker, 3, AUTO)) for worker in range(3)]
    assert steps == [[0, 3, 6], [1, 4, 7], [2, 5]], "AUTO: rows are dealt out instead"
    with pytest.raises(rx.errors.NotEnoughFilesError, match=r"3 workers, got 2 \(2 .* files\)"):
        steps_of(dataset.batch(3), 3, 0, 3, FILE)


def test_later_operations_are_applied_on_each_worker(tmp_path):
    dataset, numbers = make_numbers(tmp_path, "parquet", [6, 6, 6, 6])
    shuffled = dataset.shuffle(12, seed=3).batch(4).repeat(2)
    for worker in range(2):
        mine = sorted(itertools.chain(*numbers[worker::2]))
        rows = rows_in(steps_of(shuffled, 2, worker, 2, FILE))
        assert sorted(rows[:12]) == sorted(rows[12:]) == mine
        assert rows[:12] != rows[12:]
    assert rows_in(steps_of(dataset.take(5).batch(5), 2, 1, 2, FILE)) == [6, 7, 8, 9, 10], "five rows each"


def test_policies_hint_and_off(tmp_path):
    dataset, _ = make_numbers(tmp_path, "lines", [4, 4])
    hinted = dataset.shard(rx.data.SHARD_HINT, rx.data.SHARD_HINT).batch(2)
    assert rows_in(steps_of(hinted, 2, 0, 2, HINT)) == [0, 2, 4, 6]
    assert rows_in(steps_of(hinted, 2, 1, 2, HINT)) == [1, 3, 5, 7]
    assert rows_in(steps_of(hinted, 2, 1, 2, OFF)) == list(range(8))
    assert rows_in(steps_of(hinted, 2, 1, 2, FILE)) == [4, 5, 6, 7]
    assert not describe(dataset.batch(2)).has_hint


@pytest.mark.parametrize("policy", [AUTO, FILE, DATA, HINT, OFF])
def test_a_dataset_is_described_once_and_opened_once(tmp_path, policy, monkeypatch):
    dataset, _ = make_numbers(tmp_path, "lines", [4, 4])
    hinted = dataset.shard(rx.data.SHARD_HINT, rx.data.SHARD_HINT).batch(2)
    made = []
    for kind in (Description, Elements):
        monkeypatch.setattr(kind, "__init__", _noting(made, kind, kind.__init__))
    assert steps_of(hinted, 2, 0, 2, policy)
    assert made == [Description, Elements]


def _noting(made, kind, init):
    def noted(self, *args, **kwargs):
        made.append(kind)
        init(self, *args, **kwargs)

    return noted


def test_workers_with_csv_files_agree_about_types(tmp_path):
    (tmp_path / "a").write_text("x\n0.5\n")
    (tmp_path / "b").write_text("x\n5\n")
    dataset = rx.data.from_csv(str(tmp_path / "?")).batch(2)
    for worker in range(2):
        (step,) = steps_of(dataset, 2, worker, 2, FILE)
        assert step.tree.unflatten(step.arrays)["x"].dtype == np.float64


def test_file_of_a_worker_with_other_columns_than_the_first(tmp_path):
    pq.write_table(pa.table({"x": np.zeros(3, np.float32)}), tmp_path / "a")
    pq.write_table(pa.table({"x": np.zeros(3, np.float64)}), tmp_path / "b")
    dataset = rx.data.from_parquet(str(tmp_path / "?")).batch(2)
    assert len(steps_of(dataset, 2, 0, 2, FILE)) == 3
    with pytest.raises(rx.errors.ColumnError, match="'x' is float64"):
        steps_of(dataset, 2, 1, 2, FILE)


def test_lengths_on_workers(tmp_path):
    dataset, _ = make_numbers(tmp_path, "parquet", [6, 0, 3])
    description = describe(dataset.batch(2))
    assert description.open_all().cardinality == 5
    assert description.count_files() == 3
    assert [description.open_part(DatasetPart(FILE, 2, worker)).cardinality for worker in range(2)] == [5, 0]
    repeated = describe(dataset.batch(2).repeat())
    assert repeated.open_part(DatasetPart(FILE, 2, 0)).cardinality == float("inf")


# --- replicas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_every_row_reaches_one_replica(tmp_path, kind, num_replicas):
    dataset, _ = make_numbers(tmp_path, kind, [5, 0, 6])
    strategy = rx.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    distributed = strategy.experimental_distribute_dataset(dataset.batch(4))
    for _ in range(2):
        seen = []
        for batch in distributed:
            parts = strategy.experimental_local_results(batch["n"])
            assert len(parts) == num_replicas
            seen.extend(np.concatenate(parts).tolist())
        assert seen == list(range(11))


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_files(tmp_path, kind):
    dataset, _ = make_numbers(tmp_path, kind, [5, 0, 6])
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    total = 0.0
    for batch in strategy.experimental_distribute_dataset(dataset.shuffle(5, seed=0).batch(4)):
        sums = strategy.run(lambda batch: batch["n"].sum(), args=(batch,))
        total += float(strategy.reduce("SUM", sums, axis=None))
    assert total == sum(range(11))


def test_reused_arrays_of_a_function_are_copied(tmp_path):
    dataset, _ = make_numbers(tmp_path, "parquet", [6])
    memory = np.zeros(2, np.int64)

    def write_again(batch):
        memory[:] = batch["n"]
        return {"n": memory}

    assert not open_elements(dataset.batch(2).map(write_again)).is_immutable
    assert open_elements(dataset.batch(2)).is_immutable
    assert open_elements(dataset.map(lambda row: row).batch(2)).is_immutable
    assert not open_elements(dataset.map(lambda row: row)).is_immutable
    steps = steps_of(dataset.batch(2).map(write_again), 1, 0, 2)
    assert rows_in(steps) == list(range(6))


def test_rows_without_batch_raise(tmp_path):
    dataset, _ = make_numbers(tmp_path, "parquet", [6])
    with pytest.raises(rx.errors.UnbatchedDatasetError):
        steps_of(dataset, 1, 0, 2)


def test_functions_that_make_no_arrays(tmp_path):
    write_lines(tmp_path / "a", [1, 2])
    text = rx.data.from_text_lines(tmp_path / "a").map(lambda line: {"x": line})
    with pytest.raises(rx.errors.UnsupportedElementError):
        steps_of(text.batch(2), 1, 0, 2)


def test_empty_files_have_no_first_element(tmp_path):
    dataset, _ = make_numbers(tmp_path, "lines", [0])
    with pytest.raises(rx.errors.EmptyDatasetError):
        open_elements(dataset.batch(2)).first()
    some, _ = make_numbers(tmp_path, "lines", [3])
    elements = open_elements(some.batch(2))
    assert elements.first()["n"].tolist() == [0, 1]
    assert [batch["n"].tolist() for batch in elements.iterate()] == [[0, 1], [2]]


# --- columns of any size ------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    row_group_size=st.integers(1, 12),
    batch_size=st.integers(1, 20),
    start=st.integers(0, 6),
)
def test_columns_are_the_rows_of_all_files(tmp_path_factory, sizes, row_group_size, batch_size, start):
    folder = tmp_path_factory.mktemp("files")
    tables = []
    for index, size in enumerate(sizes):
        random = np.random.default_rng(index)
        flat = pa.array(random.normal(size=size * 3))
        tables.append(
            pa.table(
                {
                    "x": random.integers(0, 9, size),
                    "bool": random.integers(0, 2, size) == 1,
                    "list": pa.FixedSizeListArray.from_arrays(flat, 3),
                }
            )
        )
        pq.write_table(tables[-1], folder / f"{index}", row_group_size=row_group_size)
    dataset = rx.data.from_parquet(str(folder / "*")).batch(batch_size)
    rows = pa.concat_tables(tables).combine_chunks()
    batches = list(dataset)
    assert [len(batch["x"]) for batch in batches[:-1]] == [batch_size] * max(len(batches) - 1, 0)
    assert sum(len(batch["x"]) for batch in batches) == len(rows) == sum(sizes)
    for name in ("x", "bool", "list") if batches else ():
        joined = np.concatenate([batch[name] for batch in batches])
        assert joined.tolist() == rows[name].to_pylist()
    assert_continues(dataset, min(start, len(batches)))


# --- positions ----------------------------------------------------------------------------------------


def lists(elements):
    return [{name: array.tolist() for name, array in element.items()} for element in elements]


def assert_continues(dataset, position, most=30):
    """Checks that the elements after a position also come after the state is restored in another dataset."""
    one = open_elements(dataset).iterate()
    for _ in range(position):
        next(one)
    state = json.loads(json.dumps(one.get_state()))
    other = open_elements(dataset).iterate()
    next(other, None)  # wherever it is
    other.set_state(state)
    assert other.get_state() == state
    assert lists(itertools.islice(other, most)) == lists(itertools.islice(one, most))


PIPELINES = {
    "batch": lambda rows: rows.batch(4),
    "rows": lambda rows: rows,
    "drop_remainder": lambda rows: rows.batch(4, drop_remainder=True).repeat(2),
    "shuffle": lambda rows: rows.shuffle(5, seed=3).batch(4),
    "shuffle repeat": lambda rows: rows.shuffle(6, seed=3).repeat().batch(4),
    "repeat shuffle": lambda rows: rows.repeat(3).shuffle(7, seed=3).batch(2),
    "shuffle without reshuffling": lambda rows: (
        rows.shuffle(5, 3, reshuffle_each_iteration=False).repeat(2).batch(3)
    ),
    "batch shuffle": lambda rows: rows.batch(2).shuffle(3, seed=1).repeat(2),
    "filter": lambda rows: rows.filter(lambda row: row["n"] % 3).batch(2).repeat(2),
    "take": lambda rows: rows.take(9).batch(2).take(4).repeat(2),
    "shard": lambda rows: rows.shard(3, 1).repeat(2).batch(2).shard(2, 0),
    "map": lambda rows: rows.map(lambda row: {"n": row["n"] * 2}).batch(3).map(lambda batch: batch),
}


# What comes after the reading is the same for all kinds of files.
SHORT_OF_ALL_KINDS = {"batch", "shuffle repeat"}


@pytest.mark.parametrize(
    ("kind", "pipeline"),
    [
        pytest.param(
            kind,
            pipeline,
            marks=pytest.mark.rest if kind == "csv" or pipeline in SHORT_OF_ALL_KINDS else pytest.mark.long,
        )
        for kind in KINDS
        for pipeline in PIPELINES
    ],
)
def test_resuming_from_every_position(tmp_path, kind, pipeline):
    rows, _ = make_numbers(tmp_path, kind, [5, 0, 7, 1])
    dataset = PIPELINES[pipeline](rows)
    for position in range(min(len(lists(itertools.islice(dataset, 12))), 12) + 1):
        assert_continues(dataset, position)


def test_positions_on_workers_with_separate_files(tmp_path):
    rows, _ = make_numbers(tmp_path, "parquet", [5, 3, 7, 2])
    share = WorkerShare(num_workers=2, worker_index=1, num_replicas=4)
    whole = rows_in(open_source(rows.batch(4), share=share).iterate())
    for position in range(4):
        one = open_source(rows.batch(4), share=share).iterate()
        before = list(itertools.islice(one, position))
        other = open_source(rows.batch(4), share=share).iterate()
        other.set_state(json.loads(json.dumps(one.get_state())))
        assert rows_in(before) + rows_in(other) == whole


def test_resuming_does_not_read_earlier_rows(tmp_path):
    path = tmp_path / "a"
    table = pa.table({"n": np.random.default_rng(0).integers(0, 1 << 60, 20_000)})
    pq.write_table(table, path, row_group_size=10_000, write_page_checksum=True)
    dataset = rx.data.from_parquet(path).batch(10_000)
    one = open_elements(dataset).iterate()
    next(one)
    state, expected = one.get_state(), lists(one)
    data = bytearray(path.read_bytes())
    data[50:5_000] = bytes(4_950)
    path.write_bytes(data)
    with pytest.raises(rx.errors.UnreadableFileError):
        next(iter(dataset))
    other = open_elements(dataset).iterate()
    other.set_state(state)
    assert lists(other) == expected, "the first row group is not read again"


def test_later_passes_are_equal(tmp_path):
    rows, _ = make_numbers(tmp_path, "lines", [20])
    one = open_elements(rows.shuffle(20).batch(20))  # draws a seed
    next(one.iterate())
    second = one.iterate()
    state = second.get_state()
    other = open_elements(rows.shuffle(20).batch(20))
    restored = other.iterate()
    restored.set_state(state)
    assert lists([next(restored)]) == lists([next(second)])
    assert lists([next(other.iterate())]) == lists([next(one.iterate())]), "the next epoch"


def test_states_of_other_datasets(tmp_path):
    rows, _ = make_numbers(tmp_path, "lines", [5, 6])
    state = open_elements(rows.batch(2)).iterate().get_state()
    (tmp_path / "more").mkdir()
    others = [
        rows.batch(3),
        rows.batch(2).repeat(2),
        make_numbers(tmp_path / "more", "lines", [5, 7])[0].batch(2),
        make_numbers(tmp_path / "more", "csv", [5, 6])[0].batch(2),
    ]
    for other in others:
        with pytest.raises(rx.errors.NotResumableError, match="of another dataset"):
            open_elements(other).iterate().set_state(state)
    with pytest.raises(rx.errors.NotResumableError):
        open_elements(rows.batch(2)).iterate().set_state({"position": 1})


def test_files_may_have_moved(tmp_path):
    rows, _ = make_numbers(tmp_path, "lines", [5, 6])
    one = open_elements(rows.batch(2)).iterate()
    next(one)
    moved = tmp_path / "moved"
    moved.mkdir()
    other = open_elements(make_numbers(moved, "lines", [5, 6])[0].batch(2)).iterate()
    other.set_state(one.get_state())
    assert lists(other) == lists(one)


IN_ANOTHER_PROCESS = """
import json, sys
import replicax as rx
from replicax._src.input.opening import open_elements
dataset = rx.data.from_parquet(sys.argv[1]).shuffle(6).repeat().batch(4)
one = open_elements(dataset).iterate()
one.set_state(json.loads(sys.argv[2]))
print(json.dumps([next(one)["n"].tolist() for _ in range(9)]))
"""


def test_resuming_in_another_process(tmp_path):
    rows, _ = make_numbers(tmp_path, "parquet", [5, 0, 7, 1])
    one = open_elements(rows.shuffle(6).repeat().batch(4)).iterate()  # with a seed that was drawn
    for _ in range(5):
        assert next(one, END) is not END
    command = [
        sys.executable,
        "-c",
        IN_ANOTHER_PROCESS,
        str(tmp_path / "part-*"),
        json.dumps(one.get_state()),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(run.stdout) == [next(one)["n"].tolist() for _ in range(9)]


def test_distributed_iterators_continue(tmp_path):
    rows, _ = make_numbers(tmp_path, "tfrecords", [5, 0, 7])
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def iterate():
        return iter(strategy.experimental_distribute_dataset(rows.shuffle(5, seed=2).batch(4)))

    def numbers(batch):
        return np.concatenate(strategy.experimental_local_results(batch["n"])).tolist()

    one, other = iterate(), iterate()
    next(one)
    other.set_state(json.loads(json.dumps(one.get_state())))
    assert [numbers(batch) for batch in other] == [numbers(batch) for batch in one]
