"""Datasets over files, through the public functions: every format, every method, and bad files."""

import gzip
import itertools
import pathlib
import pickle
import struct

import cloudpickle
import grain
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import replicax as rx
from replicax._src.input.element_specs import ArraySpec
from replicax._src.input.files.formats import UnreadableFileError
from replicax._src.input.opening import open_elements
from tfrecord_files import masked_crc32c

# --- files --------------------------------------------------------------------------------------------


def write_tfrecords(path, records):
    """Writes the format of https://www.tensorflow.org/tutorials/load_data/tfrecord."""
    with open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + struct.pack("<I", masked_crc32c(length)))
            file.write(record + struct.pack("<I", masked_crc32c(record)))


def write_array_records(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write_lines(path, records):
    path.write_bytes(b"".join(record + b"\n" for record in records))


def write_gzip_lines(path, records):
    path.write_bytes(gzip.compress(b"".join(record + b"\r\n" for record in records)))


def write_parquet(path, numbers, row_group_size=3):
    numbers = np.asarray(numbers, np.int64)
    pairs = pa.FixedSizeListArray.from_arrays(np.repeat(numbers, 2).astype(np.float32), 2)
    pq.write_table(pa.table({"n": numbers, "pair": pairs}), path, row_group_size=row_group_size)


def write_csv(path, numbers):
    numbers = np.asarray(numbers, np.int64)
    pa.csv.write_csv(pa.table({"n": numbers, "half": numbers / 2}), path)


def write_gzip_csv(path, numbers):
    write_csv(path, numbers)
    path.write_bytes(gzip.compress(path.read_bytes()))


RECORDS = {
    "tfrecords": (rx.data.from_tfrecords, write_tfrecords),
    "array_records": (rx.data.from_array_records, write_array_records),
    "lines": (rx.data.from_text_lines, write_lines),
    "gzip lines": (rx.data.from_text_lines, write_gzip_lines),
}
COLUMNS = {
    "parquet": (rx.data.from_parquet, write_parquet),
    "csv": (rx.data.from_csv, write_csv),
    "gzip csv": (rx.data.from_csv, write_gzip_csv),
}
FORMATS = [*RECORDS, *COLUMNS]


def write_files(folder, kind, sizes):
    """Writes files whose rows are the numbers from 0 on; returns their paths."""
    write = (RECORDS | COLUMNS)[kind][1]
    paths, rows = [], itertools.count()
    for number, size in enumerate(sizes):
        numbers = list(itertools.islice(rows, size))
        paths.append(folder / f"part-{number:03d}")
        write(paths[-1], numbers if kind in COLUMNS else [b"%d" % n for n in numbers])
    return paths


def open_numbers(kind, files):
    """The dataset whose rows are numbers, in ``"n"``."""
    dataset = (RECORDS | COLUMNS)[kind][0](files)
    return dataset if kind in COLUMNS else dataset.map(lambda record: {"n": np.int64(record)})


def make_numbers(folder, kind, sizes):
    return open_numbers(kind, write_files(folder, kind, sizes))


def batches_of(dataset, count=None):
    return [batch["n"].tolist() for batch in itertools.islice(dataset, count)]


def rows_in(dataset, count=None):
    return [row for batch in batches_of(dataset, count) for row in batch]


def message(error_type, call, *says):
    with pytest.raises(error_type) as caught:
        call()
    assert type(caught.value) is error_type
    missing = [word for word in says if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    return str(caught.value)


# --- which files --------------------------------------------------------------------------------------


def test_files_of_patterns_lists_and_paths(tmp_path):
    b, a, c = (tmp_path / name for name in ("b.txt", "a.txt", "c.text"))
    for path in (b, a, c):
        path.write_text("x\n")
    (tmp_path / "folder.txt").mkdir()
    assert rx.data.from_text_lines(str(tmp_path / "*.txt")).files == (str(a), str(b)), (
        "sorted, without folders"
    )
    assert rx.data.from_text_lines([c, str(a)]).files == (str(c), str(a)), "as they are given"
    assert rx.data.from_text_lines([c, tmp_path / "?.txt"]).files == (str(c), str(a), str(b))
    assert rx.data.from_text_lines(c).files == (str(c),)
    assert rx.data.from_text_lines(tmp_path / "**" / "*.text").files == (str(c),)
    strange = tmp_path / "a[1]*.txt"
    strange.write_text("")
    assert rx.data.from_text_lines(strange).files == (str(strange),), "a file of this name is no pattern"


def test_files_that_are_missing(tmp_path):
    (tmp_path / "a").write_text("x\n")
    make = rx.data.from_text_lines
    error = rx.errors.MissingFileError
    message(error, lambda: make(tmp_path / "*.csv"), "No file matches the pattern", "*.csv")
    message(error, lambda: make([tmp_path / "a", tmp_path / "b"]), "1 of the 2 files", str(tmp_path / "b"))
    message(error, lambda: make(tmp_path / "b"), "does not exist", str(tmp_path / "b"))
    message(error, lambda: make("nowhere"), "Relative paths start at")
    message(error, lambda: make("gs://bucket/a"), "Only local paths")
    message(error, lambda: make(tmp_path), "is a folder", "*")
    message(error, lambda: make([]), "empty list")
    with pytest.raises(FileNotFoundError):
        make("nowhere")
    for files in (5, [5]):
        message(rx.errors.InvalidArgumentError, lambda files=files: make(files), "files must be a path")


@pytest.mark.parametrize("kind", FORMATS)
def test_repr_says_what_it_is(tmp_path, kind):
    dataset = make_numbers(tmp_path, kind, [2] * 5).shuffle(8, seed=1).batch(4)
    text = repr(dataset)
    assert "5 " in text
    assert "part-000" in text
    assert "2 more" in text
    assert "shuffle(buffer_size=8, reshuffle=True).batch(batch_size=4, drop_remainder=False)" in text


# --- rows ---------------------------------------------------------------------------------------------

SIZES = [[0], [5], [3, 0, 4], [0, 0, 7, 1], [10, 1, 2]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_batches_across_files(tmp_path, kind, sizes):
    dataset = make_numbers(tmp_path, kind, sizes)
    num_rows = sum(sizes)
    assert [int(row["n"]) for row in dataset] == list(range(num_rows))
    for batch_size in (1, 2, 4, 100):
        expected = [list(range(num_rows))[i : i + batch_size] for i in range(0, num_rows, batch_size)]
        batched = dataset.batch(batch_size)
        assert batches_of(batched) == expected
        assert batches_of(batched) == expected, "it starts again"
        full = [batch for batch in expected if len(batch) == batch_size]
        assert batches_of(dataset.batch(batch_size, drop_remainder=True)) == full


@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
@pytest.mark.parametrize("kind", ["arrays", *FORMATS])
def test_datasets_can_be_pickled(tmp_path, kind, pickler):
    """A dataset, or a closure over one, is sent to the workers of parameter servers."""
    if kind == "arrays":
        dataset = rx.data.from_arrays({"n": np.arange(5)})
    else:
        dataset = (RECORDS | COLUMNS)[kind][0](write_files(tmp_path, kind, (3, 2)))
    dataset = dataset.shuffle(10, seed=1)
    expected = [str(row) for row in dataset]
    copy = pickler.loads(pickler.dumps(dataset))
    assert [str(row) for row in copy] != expected, "another pass has another order"
    assert sorted(map(str, copy)) == sorted(expected)
    assert [str(row) for row in pickler.loads(pickler.dumps(dataset))] == [str(row) for row in dataset]


@pytest.mark.parametrize("kind", FORMATS)
def test_methods_apply_in_order(tmp_path, kind):
    rows = make_numbers(tmp_path, kind, [3, 0, 4])
    assert batches_of(rows.batch(3).repeat(2)) == [[0, 1, 2], [3, 4, 5], [6]] * 2
    assert batches_of(rows.repeat(2).batch(5)) == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2], [3, 4, 5, 6]]
    assert batches_of(rows.repeat().batch(5), 3) == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2], [3, 4, 5, 6, 0]]
    assert batches_of(rows.repeat(0).batch(5)) == []
    assert batches_of(rows.take(4).batch(3)) == [[0, 1, 2], [3]]
    assert batches_of(rows.batch(3).take(2)) == [[0, 1, 2], [3, 4, 5]]
    assert batches_of(rows.batch(3).take(-1)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches_of(rows.shard(3, 1).batch(2)) == [[1, 4]]
    assert batches_of(rows.shard(3, 0).batch(2)) == [[0, 3], [6]]
    assert batches_of(rows.batch(2).shard(2, 1)) == [[2, 3], [6]]
    assert batches_of(rows.filter(lambda row: row["n"] % 2).batch(2)) == [[1, 3], [5]]
    assert batches_of(rows.batch(2).filter(lambda batch: batch["n"][0] == 2)) == [[2, 3]]
    assert batches_of(rows.map(lambda row: {"n": row["n"] + 10}).batch(4)) == [[10, 11, 12, 13], [14, 15, 16]]
    assert batches_of(rows.batch(4).map(lambda batch: {"n": batch["n"][::-1]})) == [[3, 2, 1, 0], [6, 5, 4]]
    pairs = rows.map(lambda row: (row["n"], 1)).filter(lambda n, one: n != one)
    assert batches_of(pairs.map(lambda n, one: {"n": n + one}).batch(6).prefetch(1)) == [[1, 3, 4, 5, 6, 7]]
    assert batches_of(rows.batch(7)) == [list(range(7))], "the dataset itself is as it was"


@pytest.mark.parametrize("kind", FORMATS)
def test_shuffle_permutes_within_windows(tmp_path, kind):
    rows = make_numbers(tmp_path, kind, [30, 0, 20])
    windows = [list(range(0, 16)), list(range(16, 32)), list(range(32, 48)), [48, 49]]
    dataset = rows.shuffle(16, seed=4).batch(5)
    first, second = rows_in(dataset), rows_in(dataset)
    for order in (first, second):
        assert [sorted(order[i : i + 16]) for i in range(0, 50, 16)] == windows
    assert first != second
    assert first[:16] != windows[0]
    assert [n - 16 for n in first[16:32]] != first[:16], "each window has an order of its own"
    again = rows.shuffle(16, seed=4).batch(5)
    assert [rows_in(again), rows_in(again)] == [first, second], "equal seeds and epochs, equal orders"
    assert rows_in(rows.shuffle(16, seed=5).batch(5)) != first
    assert rows_in(rows.shuffle(16).batch(5)) != rows_in(rows.shuffle(16).batch(5))


@pytest.mark.parametrize("kind", FORMATS)
def test_shuffle_without_reshuffling(tmp_path, kind):
    rows = make_numbers(tmp_path, kind, [9, 8])
    fixed = rows.shuffle(17, seed=4, reshuffle_each_iteration=False)
    assert rows_in(fixed.batch(4)) == rows_in(fixed.batch(5))
    repeated = rows_in(fixed.repeat(2).batch(17))
    assert repeated[:17] == repeated[17:]
    changing = rows_in(rows.shuffle(17, seed=4).repeat(2).batch(17))
    assert sorted(changing[:17]) == sorted(changing[17:]) == list(range(17))
    assert changing[:17] != changing[17:]
    batches = batches_of(rows.batch(4).shuffle(3, seed=2))
    assert sorted(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16]]


@pytest.mark.parametrize("kind", FORMATS)
def test_repeat_forever_ends_without_rows(tmp_path, kind):
    rows = make_numbers(tmp_path, kind, [0, 0])
    assert batches_of(rows.repeat().batch(2)) == []
    assert batches_of(rows.batch(2).repeat()) == []
    some = make_numbers(tmp_path, kind, [3])
    assert batches_of(some.filter(lambda row: False).repeat().batch(2)) == []


@pytest.mark.parametrize("kind", FORMATS)
def test_arguments(tmp_path, kind):
    rows = make_numbers(tmp_path, kind, [3])
    error = rx.errors.InvalidArgumentError
    message(error, lambda: rows.batch(0), "batch_size", "got 0")
    message(error, lambda: rows.batch(2).batch(2), "call batch once")
    message(error, lambda: rows.shuffle(0), "buffer_size")
    message(error, lambda: rows.shuffle(2, seed=-1), "seed")
    message(error, lambda: rows.repeat(-2), "count")
    message(error, lambda: rows.take(-2), "count")
    message(error, lambda: rows.shard(2, 2), "index")
    message(error, lambda: rows.batch(2.5), "batch_size must be a whole number", "got 2.5")


# --- what is known beforehand -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "array_records"])
def test_known_lengths(tmp_path, kind):
    rows = make_numbers(tmp_path, kind, [3, 0, 4])
    assert rows.cardinality == len(rows) == 7
    lengths = {
        3: rows.batch(3),
        2: rows.batch(3, drop_remainder=True),
        5: rows.repeat(2).batch(3),
        6: rows.batch(3).repeat(2),
        1: rows.take(2).batch(3),
        4: rows.shard(2, 0),
    }
    for length, dataset in lengths.items():
        assert len(dataset) == length == len(list(dataset))
    assert rows.repeat().batch(2).cardinality == float("inf")
    assert rows.filter(bool).cardinality is None
    assert rows.shuffle(3).cardinality == 7


@pytest.mark.parametrize("kind", ["tfrecords", "lines", "csv"])
def test_unknown_lengths(tmp_path, kind):
    rows = make_numbers(tmp_path, kind, [3, 4])
    assert rows.batch(2).cardinality is None
    assert rows.repeat(2).cardinality is None
    assert rows.repeat().cardinality == float("inf")
    assert rows.repeat(0).cardinality == 0
    assert rows.take(0).cardinality == 0
    with pytest.raises(TypeError, match="length is unknown"):
        len(rows)
    with pytest.raises(TypeError, match="is infinite"):
        len(rows.repeat())
    assert rows
    assert open_elements(rows.batch(2)).cardinality is None


def test_specs(tmp_path):
    rows = make_numbers(tmp_path, "parquet", [3, 4])
    assert rows.element_spec == {"n": ArraySpec((), np.int64), "pair": ArraySpec((2,), np.float32)}
    assert rows.batch(2).element_spec["pair"] == ArraySpec((None, 2), np.float32)
    assert rows.batch(2, drop_remainder=True).repeat().element_spec["pair"] == ArraySpec((2, 2), np.float32)
    assert rows.batch(2).map(lambda batch: batch).element_spec is None
    assert make_numbers(tmp_path, "tfrecords", [3]).batch(2).element_spec is None
    csv = make_numbers(tmp_path, "csv", [0, 3])
    assert csv.batch(2).element_spec == {
        "n": ArraySpec((None,), np.int64),
        "half": ArraySpec((None,), np.float64),
    }
    assert make_numbers(tmp_path, "csv", [0]).batch(2).element_spec is None


# --- records ------------------------------------------------------------------------------------------


def test_records_are_bytes_and_lines_are_text(tmp_path):
    for kind, expected in (("tfrecords", b"0"), ("array_records", b"0"), ("lines", "0"), ("gzip lines", "0")):
        raw = RECORDS[kind][0](write_files(tmp_path, kind, [2]))
        first = next(iter(raw))
        assert first == expected
        assert type(first) is type(expected)


def test_ends_of_lines(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"a\r\n\n b \nlast")
    assert list(rx.data.from_text_lines(path)) == ["a", "", " b ", "last"]
    path.write_bytes("é\n".encode("latin-1"))
    assert list(rx.data.from_text_lines(path, encoding="latin-1")) == ["é"]
    says = (repr(str(path)), "utf-8", "encoding=")
    message(rx.errors.UnreadableFileError, lambda: list(rx.data.from_text_lines(path)), *says)


def test_many_records_are_parsed_at_once(tmp_path):
    write_tfrecords(tmp_path / "a", [np.full(3, n, np.float32).tobytes() for n in range(5)])

    def parse(records):
        return np.frombuffer(b"".join(records), np.float32).reshape(len(records), 3)

    batches = list(rx.data.from_tfrecords(tmp_path / "a").batch(2).map(parse))
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def test_parsed_rows_are_stacked_as_pytrees(tmp_path):
    write_lines(tmp_path / "a", [b"1 2", b"3 4", b"5 6"])

    def parse(line):
        numbers = np.array(line.split(), np.float32)
        return {"x": numbers, "more": (numbers.sum(), 7)}

    first, last = rx.data.from_text_lines(tmp_path / "a").map(parse).batch(2)
    assert first["x"].tolist() == [[1, 2], [3, 4]]
    assert first["more"][0].tolist() == [3, 7]
    assert first["more"][0].dtype == np.float32
    assert first["more"][1].tolist() == [7, 7]
    assert last["x"].shape == (1, 2)


def test_rows_with_different_structures(tmp_path):
    write_lines(tmp_path / "a", [b"1", b"1 2"])
    lines = rx.data.from_text_lines(tmp_path / "a")
    error = rx.errors.InconsistentRowsError
    ragged = lines.map(lambda line: {"x": np.array(line.split(), np.int32)}).batch(2)
    message(error, lambda: list(ragged), "int32[1] and int32[2]", "['x']", "Pad")
    mixed = lines.map(lambda line: np.float32(1) if " " in line else np.float64(1)).batch(2)
    message(error, lambda: list(mixed), "float32[] and float64[]")
    structures = lines.map(lambda line: {line: 1}).batch(2)
    message(error, lambda: list(structures), "structure")


@pytest.mark.parametrize("kind", RECORDS)
def test_unparsed_records(tmp_path, kind):
    raw = RECORDS[kind][0](write_files(tmp_path, kind, [2]))
    for dataset in (raw, raw.batch(2)):
        message(rx.errors.UnsupportedElementError, lambda d=dataset: open_elements(d), ".map(parse)")


# --- columns ------------------------------------------------------------------------------------------


def test_types_of_columns(tmp_path):
    nested = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.int8()), 2), 3
    )
    table = pa.table(
        {
            "bool": pa.array([True, False]),
            "half": pa.array(np.array([1, 2], np.float16)),
            "uint8": pa.array([1, 255], pa.uint8()),
            "nested": nested,
        }
    )
    pq.write_table(table, tmp_path / "a")
    (batch,) = rx.data.from_parquet(tmp_path / "a").batch(4)
    assert {name: (column.dtype, column.shape) for name, column in batch.items()} == {
        "bool": (np.bool_, (2,)),
        "half": (np.float16, (2,)),
        "uint8": (np.uint8, (2,)),
        "nested": (np.int8, (2, 3, 2)),
    }
    assert batch["nested"].ravel().tolist() == list(range(12))
    assert batch["bool"].tolist() == [True, False]
    (row, _) = rx.data.from_parquet(tmp_path / "a", ["nested"])
    assert row["nested"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("kind", COLUMNS)
def test_some_columns(tmp_path, kind):
    make, _ = COLUMNS[kind]
    files = write_files(tmp_path, kind, [3, 2])
    other = "pair" if kind == "parquet" else "half"
    assert [sorted(batch) for batch in make(files, columns=["n"]).batch(5)] == [["n"]]
    assert [sorted(batch) for batch in make(files, [other, "n"]).batch(5)] == [sorted(["n", other])]
    says = (repr(str(files[0])), "z")
    message(rx.errors.ColumnError, lambda: list(make(files, ["n", "z"]).batch(2)), *says)
    for columns in ("n", [], [1]):
        message(
            rx.errors.InvalidArgumentError,
            lambda c=columns: make(files, c),
            "columns must be a list of names",
        )


UNSUPPORTED = {
    "text": (pa.array(["a", "b"]), "token ids"),
    "null": (pa.array([1.0, None]), "null (missing) values: 1 of the 2"),
    "all null": (pa.array([None, None]), "null"),
    "ragged": (pa.array([[1], [1, 2]]), "different lengths"),
    "null inside": (pa.array([[1, None], [1, 2]], pa.list_(pa.int64(), 2)), "null (missing) values"),
    "date": (pa.array([1, 2], pa.timestamp("s")), "No device holds it"),
    "struct": (pa.array([{"a": 1}, {"a": 2}]), "No device holds it"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_columns_that_no_device_holds(tmp_path, kind):
    column, text = UNSUPPORTED[kind]
    pq.write_table(pa.table({"fine": [1, 2], "bad": column}), tmp_path / "a.parquet")
    dataset = rx.data.from_parquet(tmp_path / "a.parquet")
    message(
        rx.errors.ColumnError, lambda: list(dataset.batch(2)), "'bad'", "a.parquet", "columns=[...]", text
    )
    (batch,) = rx.data.from_parquet(tmp_path / "a.parquet", ["fine"]).batch(2)
    assert batch["fine"].tolist() == [1, 2], "other columns can be read"


def test_lists_that_are_null(tmp_path):
    pq.write_table(pa.table({"x": pa.array([[1, 3], None], pa.list_(pa.int64(), 2))}), tmp_path / "a")
    # The reader of pyarrow before 26 rejects them.
    either = (rx.errors.ColumnError, rx.errors.UnreadableFileError)
    with pytest.raises(either, match=str(tmp_path / "a")):
        list(rx.data.from_parquet(tmp_path / "a").batch(2))


def test_files_whose_columns_differ(tmp_path):
    for name, dtype in (("a", np.float32), ("b", np.float64)):
        pq.write_table(pa.table({"x": np.zeros(3, dtype)}), tmp_path / name)
    pq.write_table(pa.table({"y": np.zeros(3, np.float32)}), tmp_path / "c")
    error = rx.errors.ColumnError
    both = rx.data.from_parquet([tmp_path / "a", tmp_path / "b"]).batch(2)
    message(error, lambda: list(both), "'x' is float64", "float32", "a'", "b'")
    other = rx.data.from_parquet([tmp_path / "a", tmp_path / "c"]).batch(2)
    message(error, lambda: list(other), "'x' is missing", "c'")


def test_csv_options(tmp_path):
    (tmp_path / "a").write_text("1;2.5;x\n3;nan;y\n")
    read = rx.data.from_csv(
        tmp_path / "a",
        ["p", "q"],
        delimiter=";",
        column_names=["p", "q", "r"],
        column_dtypes={"p": np.float32},
    )
    (batch,) = read.batch(3)
    assert batch["p"].dtype == np.float32
    assert batch["p"].tolist() == [1, 3]
    np.testing.assert_array_equal(batch["q"], [2.5, np.nan])
    message(
        rx.errors.ColumnError, lambda: list(rx.data.from_csv(tmp_path / "a", delimiter=";")), "'x'", "text"
    )


def test_csv_files_that_are_blank(tmp_path):
    (tmp_path / "a").write_text("n\n1\n2\n")
    (tmp_path / "b").write_text("")
    (tmp_path / "c").write_bytes(gzip.compress(b""))
    (tmp_path / "d").write_text("n\n")
    (tmp_path / "e").write_text("n\n3\n")
    assert batches_of(rx.data.from_csv(str(tmp_path / "?")).batch(2)) == [[1, 2], [3]]


def test_csv_values_that_are_missing(tmp_path):
    (tmp_path / "a").write_text("n,m\n1,2\n,3\n")
    message(
        rx.errors.ColumnError,
        lambda: list(rx.data.from_csv(tmp_path / "a").batch(2)),
        "'n'",
        "null (missing)",
    )


def test_batches_of_columns_are_read_within_the_memory_limit(tmp_path):
    wide = pa.FixedSizeListArray.from_arrays(np.zeros(3_000_000, np.float64), 100_000)
    pq.write_table(pa.table({"x": wide}), tmp_path / "a")
    (first, *_) = batches = [batch["x"] for batch in rx.data.from_parquet(tmp_path / "a").batch(1)]
    assert len(batches) == 30
    assert first.base.nbytes < 12 << 20


# --- files that are damaged ---------------------------------------------------------------------------


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-3])


def make_random(path):
    path.write_bytes(np.random.default_rng(0).bytes(100_000))


def make_text(path):
    path.write_text("n\n1,2,3\n4\n")


def make_gzip(path):
    path.write_bytes(gzip.compress(path.read_bytes()))


DAMAGED = [
    ("tfrecords", cut_short),
    ("tfrecords", make_random),
    ("tfrecords", make_text),
    ("tfrecords", make_gzip),
    ("array_records", cut_short),
    ("array_records", make_random),
    ("array_records", make_text),
    ("parquet", cut_short),
    ("parquet", make_random),
    ("parquet", make_text),
    ("gzip lines", cut_short),
    ("gzip csv", cut_short),
    ("csv", make_text),
]


@pytest.mark.parametrize(("kind", "damage"), DAMAGED, ids=lambda value: getattr(value, "__name__", value))
def test_damaged_files(tmp_path, kind, damage):
    files = write_files(tmp_path, kind, [3, 3])
    damage(files[1])
    dataset = open_numbers(kind, files).batch(3)
    iterator = iter(dataset)
    assert next(iterator)["n"].tolist() == [0, 1, 2], "the first file is whole"
    text = message(rx.errors.UnreadableFileError, lambda: list(iterator), repr(str(files[1])))
    assert ("gzip" in text) == (damage is make_gzip or kind.startswith("gzip"))


def test_damage_inside_tfrecords(tmp_path):
    (path,) = write_files(tmp_path, "tfrecords", [3])
    data = bytearray(path.read_bytes())
    data[17 + 7] = 0xFF  # the highest byte of the second length
    path.write_bytes(data)
    iterator = iter(rx.data.from_tfrecords(path))
    assert next(iterator) == b"0"
    message(rx.errors.UnreadableFileError, lambda: list(iterator), str(path))


def test_damage_inside_array_records(tmp_path):
    path = tmp_path / "a"
    write_array_records(path, [np.random.default_rng(n).bytes(100_000) for n in range(5)])
    data = bytearray(path.read_bytes())
    data[300_000:300_100] = bytes(100)
    path.write_bytes(data)
    message(rx.errors.UnreadableFileError, lambda: list(rx.data.from_array_records(path)), str(path), "hash")


def test_csv_column_that_changes_its_type(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("n\n" + "1\n" * 1_000_000 + "1.5\n")
    message(
        rx.errors.UnreadableFileError,
        lambda: list(rx.data.from_csv(path).batch(1000)),
        "a.csv",
        "column_dtypes",
    )
    dataset = rx.data.from_csv(path, column_dtypes={"n": float}).batch(500_000)
    assert [len(batch["n"]) for batch in dataset] == [500_000, 500_000, 1]


@pytest.mark.parametrize("kind", FORMATS)
def test_file_removed_while_reading(tmp_path, kind):
    files = write_files(tmp_path, kind, [3, 3])
    dataset = open_numbers(kind, files).batch(3)
    files[1].unlink()
    message(rx.errors.UnreadableFileError, lambda: list(dataset), str(files[1]))


def test_errors_of_the_users_function_are_raised_unchanged(tmp_path):
    (tmp_path / "a").write_text("1\nx\n")
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(rx.data.from_text_lines(tmp_path / "a").map(int).batch(2))
    assert not isinstance(caught.value, rx.errors.ReplicaxError)


# --- optional dependencies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("from_tfrecords", "grain", "grain"),
        ("from_array_records", "grain", "grain"),
        ("from_parquet", "pyarrow.parquet", "pyarrow"),
        ("from_csv", "pyarrow.csv", "pyarrow"),
    ],
)
def test_missing_extras(monkeypatch, tmp_path, name, module, package):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    make = getattr(rx.data, name)
    says = (f"rx.data.{name} needs {package}", "the extra files")
    message(rx.errors.MissingExtraError, lambda: make(tmp_path / "none"), *says)


def test_checksum():
    assert masked_crc32c(struct.pack("<Q", 0)) == struct.unpack("<I", bytes.fromhex("29039807"))[0]
    crc = (masked_crc32c(b"123456789") - 0xA282EAD8) & 0xFFFFFFFF
    assert (crc << 15 | crc >> 17) & 0xFFFFFFFF == 0xE3069283, "the check value of CRC-32C"


def test_grain_reads_the_same(tmp_path):
    (path,) = write_files(tmp_path, "tfrecords", [4])
    assert list(rx.data.from_tfrecords(path)) == list(grain.experimental.TFRecordIterDataset(str(path)))


def test_file_removed_before_reading(tmp_path):
    rows = make_numbers(tmp_path, "csv", [3, 3])
    pathlib.Path(rows.files[1]).unlink()
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(rx.errors.MissingFileError, match="It was there when the dataset was made"):
        list(strategy.experimental_distribute_dataset(rows.batch(2)))


def test_error_for_missing_columns_shows_the_header(tmp_path):
    (tmp_path / "a.csv").write_text("x;y\n1;2\n")
    with pytest.raises(rx.errors.ColumnError, match=r"its header line is 'x;y'.*delimiter=','"):
        list(rx.data.from_csv(tmp_path / "a.csv", columns=["x"]).batch(1))


def test_a_file_of_zeros_is_no_tfrecord_file(tmp_path):
    path = tmp_path / "zeros.tfrecord"
    path.write_bytes(bytes(64))
    with pytest.raises(UnreadableFileError, match=r"zeros\.tfrecord"):
        list(rx.data.from_tfrecords(str(path)))
