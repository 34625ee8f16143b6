"""Arrays in chunks and files: every element is written once, by one process, and is read and verified by any."""

import gc
import itertools
import math
import weakref
import zlib

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import tensorstore

from replicax._src.checkpoint import array_chunks, array_files
from replicax._src.checkpoint.array_chunks import Cut, chunk_shapes, part_at, writers_of
from replicax._src.checkpoint.array_files import ArrayReader, Piece, write_metadata, write_pieces
from replicax._src.checkpoint.contents import StoredArray, WrittenFiles
from replicax._src.checkpoint.errors import CorruptCheckpointError

FEW = hypothesis.settings(
    max_examples=40, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
DTYPES = ["bool", "int4", "uint4", "int8", "int64", "float16", "bfloat16", "float32", "complex64", "uint2"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(array_chunks, "CHUNK_BYTES", 64)
    monkeypatch.setattr(array_chunks, "FILE_BYTES", 512)


@st.composite
def cuts(draw):
    """An array over a grid of blocks, each of which some of up to four processes hold."""
    block = tuple(draw(st.lists(st.integers(1, 13), min_size=0, max_size=3)))
    counts = [draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in block]
    shape = tuple(size * count for size, count in zip(block, counts, strict=True))
    holders = {
        start: tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1, max_size=4))))
        for start in itertools.product(*(range(0, n, b) for n, b in zip(shape, block, strict=True)))
    }
    item_bytes = draw(st.sampled_from([1, 2, 4, 8]))
    return Cut(shape, item_bytes, block, holders, *chunk_shapes(shape, block, item_bytes))


@FEW
@hypothesis.given(cut=cuts())
def test_chunks_divide_files_and_files_divide_the_blocks_of_devices(cut):
    for size, block, chunk, file in zip(cut.shape, cut.block, cut.chunk, cut.file, strict=True):
        assert file % chunk == 0
        if block < size:
            assert block % file == 0
    assert math.prod(cut.chunk) * cut.item_bytes <= 64
    assert math.prod(cut.file) * cut.item_bytes <= 512


@FEW
@hypothesis.given(parts=st.lists(cuts(), min_size=1, max_size=4))
def test_every_element_is_written_once_by_a_process_that_holds_it(parts):
    named = {f"a{number}": cut for number, cut in enumerate(parts)}
    writers = writers_of(named)
    assert writers == writers_of(dict(reversed(named.items()))), "the order of the keys does not matter"
    for key, cut in named.items():
        num_writes = np.zeros(cut.shape, int)
        for position, origin in enumerate(cut.files):
            num_writes[part_at(origin, cut.file, cut.shape)] += 1
            writer = writers[key][position if len(writers[key]) > 1 else 0]
            assert writer in cut.holders[cut.block_of(origin)]
        assert (num_writes == 1).all()


def test_processes_take_turns_at_what_all_hold():
    def replicated(rows):
        shape = (rows, 8)
        return Cut(shape, 4, shape, {(0, 0): (0, 1, 2)}, *chunk_shapes(shape, shape, 4))

    named = {f"a{rows}": replicated(rows) for rows in (300, 20, 64, 5)}
    num_bytes = [0, 0, 0]
    for key, writers in writers_of(named).items():
        for position, origin in enumerate(named[key].files):
            writer = writers[position if len(writers) > 1 else 0]
            num_bytes[writer] += named[key].bytes_of(origin)
    assert max(num_bytes) - min(num_bytes) <= array_chunks.FILE_BYTES


def stored_as(cut, dtype):
    return StoredArray(cut.shape, dtype, cut.chunk, cut.file, (0,))


def filled(shape, dtype):
    values = np.random.default_rng(0).integers(0, 2, shape)
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def save(part, cut, value, dtype):
    """Writes an array in three turns, as three processes do, and returns its reader."""
    stored = stored_as(cut, dtype)
    pieces = [
        Piece("a", origin, np.array(value[(*part_at(origin, cut.file, cut.shape), ...)]))
        for origin in cut.files
    ]
    written = [write_pieces(str(part), {"a": stored}, pieces[number::3]).get("a", []) for number in range(3)]
    files = WrittenFiles.from_rows(itertools.chain(*written), stored.num_files)
    checksums = write_metadata(str(part), {"a": stored}, "a save")
    return reader_of(part, stored, checksums["a"], files)


def reader_of(part, stored, crc32, files=None):
    return ArrayReader(str(part), "a", stored, crc32, files, "label", ("worker 0", "worker 1"))


@FEW
@hypothesis.given(cut=cuts(), dtype=st.sampled_from(DTYPES), data=st.data())
def test_any_part_reads_back_as_it_was_written(cut, dtype, data, tmp_path_factory):
    itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    cut = Cut(cut.shape, itemsize, cut.block, cut.holders, *chunk_shapes(cut.shape, cut.block, itemsize))
    value = filled(cut.shape, dtype)
    reader = save(tmp_path_factory.mktemp("part"), cut, value, dtype)
    assert reader.read().dtype == value.dtype
    assert reader.read().tobytes() == value.tobytes()
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in cut.shape]
    index = tuple(slice(*one) for one in bounds)
    assert reader.read(index).tobytes() == value[(*index, ...)].tobytes()


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), ()])
def test_empty_arrays_and_scalars(shape, tmp_path):
    cut = Cut(shape, 4, shape, {}, *chunk_shapes(shape, shape, 4))
    value = np.full(shape, np.float32(-0.0))
    assert save(tmp_path, cut, value, "float32").read().tobytes() == value.tobytes()


@pytest.mark.parametrize("rows", [1009, 50257])
def test_large_prime_dims_are_cut_into_chunks_of_useful_sizes(rows):
    for shape in ((rows, 16), (rows,)):
        chunk, file = chunk_shapes(shape, shape, 4)
        assert 16 <= math.prod(chunk) * 4 <= 64
        assert 64 < math.prod(file) * 4 <= 512


def test_zeros_are_stored_and_a_lost_file_is_not_read_as_zeros(tmp_path):
    cut = Cut((40, 8), 4, (20, 8), {}, *chunk_shapes((40, 8), (20, 8), 4))
    reader = save(tmp_path, cut, np.zeros((40, 8), np.float32), "float32")
    assert not reader.read().any()
    lost = sorted(path for path in (tmp_path / "a").iterdir() if path.name != "zarr.json")[-1]
    lost.unlink()
    again = reader_of(tmp_path, reader.stored, zlib.crc32((tmp_path / "a" / "zarr.json").read_bytes()))
    with pytest.raises(CorruptCheckpointError) as caught:
        again.read()
    for text in ("label", f"a/{lost.name}", "worker 0"):
        assert text in str(caught.value)


def num_read():
    """The number of bytes that this process has read."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_devices_that_share_chunks_read_them_once(tmp_path, monkeypatch):
    monkeypatch.setattr(array_chunks, "CHUNK_BYTES", 1 << 18)
    monkeypatch.setattr(array_chunks, "FILE_BYTES", 1 << 20)
    cut = Cut((1024, 512), 4, (512, 512), {}, *chunk_shapes((1024, 512), (512, 512), 4))
    value = np.random.default_rng(0).random(cut.shape, np.float32)
    reader = save(tmp_path, cut, value, "float32")

    before = num_read()
    for column in range(0, 512, 32):  # each cuts through chunks
        index = (slice(None), slice(column, column + 32))
        assert reader.read(index).tobytes() == value[index].tobytes()
    assert num_read() - before < 1.1 * value.nbytes


@FEW
@hypothesis.given(cut=cuts(), data=st.data())
def test_file_of_another_save_or_place_is_found_by_those_who_read_it(cut, data, tmp_path_factory):
    hypothesis.assume(math.prod(cut.shape) > 0)
    random = np.random.default_rng(0)
    cut = Cut(cut.shape, 8, cut.block, cut.holders, *chunk_shapes(cut.shape, cut.block, 8))
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    value = random.random(cut.shape)
    reader = save(one, cut, value, "float64")
    save(other, cut, random.random(cut.shape), "float64")
    names = sorted(path.name for path in (one / "a").glob("c*"))
    replaced = data.draw(st.sampled_from(names))
    source, name = data.draw(st.sampled_from([(here, name) for here in (one, other) for name in names]))
    hypothesis.assume((source, name) != (one, replaced))
    (one / "a" / replaced).write_bytes((source / "a" / name).read_bytes())
    for position, origin in enumerate(cut.files):
        index = part_at(origin, cut.file, cut.shape)
        if ".".join(["c", *(str(at // by) for at, by in zip(origin, cut.file, strict=True))]) != replaced:
            assert np.array_equal(reader.read(index), value[(*index, ...)]), position
            continue
        with pytest.raises(CorruptCheckpointError, match="label"):
            reader.read(index)


def test_reading_a_part_costs_what_the_part_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(array_chunks, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(array_chunks, "FILE_BYTES", 1 << 20)
    cut = Cut((4096, 256), 4, (2048, 256), {}, *chunk_shapes((4096, 256), (2048, 256), 4))
    assert cut.chunk != cut.file
    value = np.random.default_rng(0).random(cut.shape, np.float32)
    reader = save(tmp_path, cut, value, "float32")
    for index in (
        (slice(0, 1), slice(0, 1)),
        (slice(0, 2048), slice(0, 128)),
        (slice(2000, 2100), slice(0, 256)),
        (slice(100, 4000), slice(200, 256)),
    ):
        rows, columns = (
            -(-part.stop // by) * by - part.start // by * by
            for part, by in zip(index, cut.chunk, strict=True)
        )
        before = num_read()
        assert np.array_equal(reader.read(index), value[index])
        assert num_read() - before < 1.1 * 4 * rows * columns


def test_only_some_files_are_in_flight(tmp_path, monkeypatch):
    """Pieces are taken from the iterator as earlier ones reach the disk."""
    monkeypatch.setattr(array_files, "_WINDOW_BYTES", 1024)
    shape = (512, 8)
    cut = Cut(shape, 4, shape, {}, *chunk_shapes(shape, shape, 4))
    value = np.arange(4096, dtype=np.float32).reshape(shape)
    ahead = []

    def pieces():
        for number, origin in enumerate(cut.files):
            num_there = len(list((tmp_path / "a").glob("c.*[0-9]"))) if number else 0
            ahead.append(number - num_there)
            yield Piece("a", origin, value[part_at(origin, cut.file, shape)])

    write_pieces(str(tmp_path), {"a": stored_as(cut, "float32")}, pieces())
    assert len(ahead) > 20
    assert max(ahead) <= 3


def test_all_reads_and_writes_use_the_same_threads(tmp_path, monkeypatch):
    made, make = [], tensorstore.Context

    def recorded(*args, **options):
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(tensorstore, "Context", recorded)
    cut = Cut((8, 4), 4, (8, 4), {}, *chunk_shapes((8, 4), (8, 4), 4))
    for number in range(2):
        assert save(tmp_path / f"{number}", cut, filled((8, 4), "float32"), "float32").read().shape == (8, 4)
    pools = {tuple(one[name] for name in array_files._LIMITS) for one in made}
    assert len(pools) == 1
    assert pools == {tuple(array_files._threads()[name] for name in array_files._LIMITS)}


def test_threads_of_reads_and_writes_are_never_freed():
    """A thread of tensorstore may still use its pool when the last read has ended."""
    threads = weakref.ref(array_files._threads.__wrapped__())
    gc.collect()
    assert threads() is not None
