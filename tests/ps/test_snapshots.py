"""Snapshots of a store: they are read again, or reported as broken; earlier ones stay."""

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import export

from asked_store import ME, ask, create, send
from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.store import snapshot_parts, snapshots, unwritten
from replicax._ps.store.held_values import BYTES_PER_BLOCK
from replicax._ps.store.store import Store
from replicax._src.vocabulary.errors import SnapshotError, UnavailableError, UnknownProgramError

ONE = np.ones(4, np.float32)


def program_of(like):
    """Adds to piece w."""
    avals = [jax.ShapeDtypeStruct(like.shape, like.dtype)] * 2
    blob = export.export(jax.jit(lambda w, by: w + by), platforms=["cpu"])(*avals).serialize()
    return UpdateProgram(bytes(blob), ("w",), (0,))


ADD = program_of(ONE)


def step(store, closure=None, program=ADD, like=ONE):
    closure = closure if closure is None else [ME, closure]
    return ask(store, "step", [np.ones_like(like)], closure=closure, low=0, program=program.digest, pull=[])


def read(store, *keys):
    return [
        value.copy() for value in ask(store, "step", pull=[[key, None] for key in keys], program=None).arrays
    ]


def new_store(**values):
    store = Store()
    store.hello(ME)
    create(store, **values)
    send(store, ADD)
    return store


def restored(directory, **how):
    store = Store()
    return store, store.restore(directory, **how)


def test_all_values_are_restored(tmp_path):
    rows = BYTES_PER_BLOCK // 400 * 2 + 7
    values = {
        "w": np.zeros(4, np.float32),
        "large": np.random.default_rng(0).standard_normal((rows, 100)).astype(np.float32),
        "scalar": np.array(7, np.int32),
        "empty": np.zeros((0, 3), np.float32),
        "half": np.arange(6).reshape(2, 3).astype(jnp.bfloat16),
        "wide": np.arange(3) + 0.5,
        "flags": np.array([True, False]),
    }
    store = new_store(**values)
    step(store, 0)
    step(store, 5)
    version = ask(store, "step", pull=[["w", None]]).header["versions"][0]
    told = store.snapshot(tmp_path, epoch=3)
    assert (told["epoch"], told["updates"]) == (3, 2)
    assert Path(told["file"]).stat().st_size == told["bytes"]
    step(store, 6)

    again, what = restored(tmp_path)
    assert 0 <= what.pop("age_s") < 60
    assert what == {
        "file": told["file"],
        "epoch": 3,
        "incarnation": ME,
        "updates": 2,
        "shards": 7,
        "keys": list(values),
        "programs": [ADD.digest],
        "refused": [],
        "position": None,  # a store that is no copy does not number its updates
        "num_held_gradients": 0,
        "applied": [1, 6],  # those numbered 0 and 5 have been
    }
    values["w"] = np.full(4, 2.0, np.float32)
    for key, value in values.items():
        (got,) = read(again, key)
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(got, value)
    assert again.statistics()["updates"] == 2

    answer = ask(again, "step", pull=[["w", version]])  # the same number, of another instance
    assert len(answer.arrays) == 1
    assert answer.header["versions"][0] == [again.instance, version[1]]
    assert again.instance != store.instance

    with pytest.raises(UnknownProgramError):
        step(again, 6)
    send(again, ADD)
    assert [step(again, number).header["duplicate"] for number in (0, 5, 6)] == [True, True, False]
    again.hello(ME)  # the same coordinator goes on
    assert read(again, "w")[0].max() == 3.0
    again.hello("next")
    with pytest.raises(UnavailableError):
        read(again, "w")


def test_versions_after_restoring_are_new(tmp_path, monkeypatch):
    store = new_store(w=np.zeros(4, np.float32))
    step(store)
    store.snapshot(tmp_path)
    step(store)
    seen = ask(store, "step", pull=[["w", None]]).header["versions"][0]
    instance = store.instance
    num_held, value_of = [], snapshots.Snapshot.value

    def value(*args):
        num_held.append(store.statistics()["shards"])
        return value_of(*args)

    monkeypatch.setattr(snapshots.Snapshot, "value", value)
    store.restore(tmp_path)  # the store that runs goes back
    assert num_held == [0]  # there may be no room for both
    assert store.instance != instance
    send(store, ADD)
    ask(store, "assign", [ONE * 9], keys=["w"])
    answer = ask(store, "step", pull=[["w", seen]])
    assert [array.max() for array in answer.arrays] == [9.0]


def test_late_push_of_a_closure_that_has_ended_is_not_applied_after_restoring(tmp_path):
    store = new_store(w=np.zeros(4, np.float32))
    store.snapshot(tmp_path)
    for number in (1, 3):
        step(store, closure=number)
    store.end_closures(ME, 4, [2])
    store.restore(tmp_path)
    send(store, ADD)
    assert [step(store, closure=number).header["duplicate"] for number in range(5)] == [
        True,
        True,
        False,
        True,
        False,
    ]
    store.snapshot(tmp_path)
    store.end_closures("another", 9, [])
    store.restore(tmp_path)
    send(store, ADD)
    assert step(store, closure=3).header["duplicate"]
    assert not step(store, closure=5).header["duplicate"]


def test_updates_are_in_place_after_restoring_and_after_a_snapshot(tmp_path):
    like = np.zeros((BYTES_PER_BLOCK // 256, 100), np.float32)
    add = program_of(like)
    store = Store()
    store.hello(ME)
    create(store, w=like)
    store.snapshot(tmp_path)
    again, _ = restored(tmp_path)
    for each in (store, again):
        send(each, add)
        before = each._contents.shards["w"].value.unsafe_buffer_pointer()
        step(each, program=add, like=like)
        assert each._contents.shards["w"].value.unsafe_buffer_pointer() == before


def test_a_snapshot_is_of_one_moment(tmp_path, monkeypatch):
    store = new_store(w=np.zeros(4, np.float32), v=np.zeros(4, np.float32))
    write_entry, threads = snapshots.write_entry, []

    def slow(file, number, entry):  # while it is written, updates go on
        thread = threading.Thread(target=step, args=[store, len(threads)])
        thread.start()
        thread.join(timeout=30)
        threads.append(thread)
        return write_entry(file, number, entry)

    monkeypatch.setattr(snapshots, "write_entry", slow)
    assert store.snapshot(tmp_path)["updates"] == 0
    assert read(store, "w")[0].max() == 2.0
    again, what = restored(tmp_path)
    assert [value.max() for value in read(again, "w", "v")] == [0.0, 0.0]
    send(again, ADD)
    assert step(again, 0).header["duplicate"] is False  # whose update is not in the values
    assert what["updates"] == 0


@pytest.mark.parametrize("ends", ["written", "failed", "late"])
def test_update_waits_if_too_much_memory_would_be_doubled(tmp_path, monkeypatch, ends):
    store = new_store(w=np.zeros(4, np.float32), v=np.zeros(4, np.float32))
    monkeypatch.setattr(unwritten, "_MIN_TWICE_BYTES", 0)
    monkeypatch.setattr("replicax._ps.store.store_snapshots.LONGEST_WRITE_S", 0.2 if ends == "late" else 60)
    write_entry, threads = snapshots.write_entry, []

    def write(file, number, entry):
        if not threads:
            threads.append(threading.Thread(target=step, args=[store, 0]))
            threads[0].start()
            threads[0].join(timeout=30 if ends == "late" else 0.5)
            assert threads[0].is_alive() == (ends != "late")
            assert read(store, "v")[0].max() == 0.0  # who reads does not wait
            if ends == "failed":
                raise OSError("full")
        elif entry.key == "v":  # w is written: its update goes on
            threads[0].join(timeout=30)
            assert not threads[0].is_alive()
        return write_entry(file, number, entry)

    monkeypatch.setattr(snapshots, "write_entry", write)
    with pytest.raises(SnapshotError) if ends == "failed" else contextlib.nullcontext():
        store.snapshot(tmp_path)
    threads[0].join(timeout=30)
    assert read(store, "w")[0].max() == 1.0
    if ends != "failed":
        assert read(restored(tmp_path)[0], "w")[0].max() == 0.0


def test_snapshots_during_updates_are_consistent(tmp_path):
    like = np.zeros(1 << 16, np.float32)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (like, like, like)]
    blob = export.export(jax.jit(lambda w, v, by: (w + by, v + by)), platforms=["cpu"])(*avals).serialize()
    both = UpdateProgram(bytes(blob), ("w", "v"), (0, 1))
    store = Store()
    store.hello(ME)
    create(store, w=like, v=like)
    send(store, both)
    is_over, has_begun = threading.Event(), threading.Event()

    def update():
        number = 0
        while not is_over.is_set():
            step(store, number, both, like)
            has_begun.set()
            number += 1

    thread = threading.Thread(target=update)
    thread.start()
    try:
        assert has_begun.wait(60)
        told = [store.snapshot(tmp_path)["updates"] for _ in range(20)]
    finally:
        is_over.set()
        thread.join(timeout=30)
    assert told[-1] > 0
    again, what = restored(tmp_path)
    send(again, both)
    w, v = read(again, "w", "v")
    assert (w == told[-1]).all()
    assert (v == told[-1]).all()
    assert what["updates"] == told[-1]
    numbers = (told[-1] - 1, told[-1])
    assert [step(again, n, both, like).header["duplicate"] for n in numbers] == [True, False]


def test_last_two_snapshots_are_kept(tmp_path):
    store = new_store(w=np.zeros(4, np.float32))
    (tmp_path / "snapshot.partial").write_bytes(b"left by a process that died")
    (tmp_path / "mine.txt").write_text("not a snapshot")
    for epoch in range(4):
        step(store)
        store.snapshot(tmp_path, epoch=epoch)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.txt",
        "snapshot-0000000003.rxps",
        "snapshot-0000000004.rxps",
    ]
    assert [restored(tmp_path, epoch=epoch)[1]["updates"] for epoch in (2, 3)] == [3, 4]
    again, _ = restored(tmp_path)
    kept = again.instance
    with pytest.raises(SnapshotError, match="it is of epoch 3, not 1"):
        again.restore(tmp_path, epoch=1)
    assert again.instance == kept
    assert read(again, "w")[0].max() == 4.0


def test_no_snapshot(tmp_path):
    store = new_store(w=np.zeros(4, np.float32))
    assert store.restore(tmp_path) is None
    assert store.restore(tmp_path / "no folder") is None
    assert read(store, "w")[0].max() == 0.0


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with a snapshot of w = v = 1 and a newer one of w = v = 2, and the newer one."""
    directory = tmp_path_factory.mktemp("two")
    store = new_store(w=np.zeros(4, np.float32), v=np.zeros(37, np.float32))
    for number in (1, 2):
        step(store)
        ask(store, "assign", [np.full(37, number, np.float32)], keys=["v"])
        path = Path(store.snapshot(directory)["file"])
    return directory, path


def broken(two, tmp_path, how):
    """Breaks a copy of the newer one, and returns what is restored then."""
    directory, newer = two
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(directory, folder)
    how(folder / newer.name)
    store, what = restored(folder)
    w, v = read(store, "w", "v")
    assert (w == w[0]).all()
    assert (v == w[0]).all()
    return w[0], what


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bit(two, tmp_path, data):
    at, bit = data.draw(st.integers(0, two[1].stat().st_size - 1)), data.draw(st.integers(0, 7))
    value, what = broken(two, tmp_path, lambda path: flip(path, at, bit))
    assert (value == 1.0) == bool(what["refused"])  # else it was a byte between the pieces
    assert value in (1.0, 2.0)


def test_flipped_bit_in_the_position_of_the_header(two, tmp_path):
    for at in range(-32, -12):  # offset, length, checksum
        for bit in (0, 7):
            value, what = broken(two, tmp_path, lambda path, at=at, bit=bit: flip(path, at, bit))
            assert (value, len(what["refused"])) == (1.0, 1)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_file(two, tmp_path, data):
    size = data.draw(st.integers(0, two[1].stat().st_size - 1))

    def cut(path):
        with open(path, "rb+") as file:
            file.truncate(size)

    value, what = broken(two, tmp_path, cut)
    assert value == 1.0
    assert len(what["refused"]) == 1


@pytest.mark.parametrize(
    ("where", "text"),
    [(64, "checksum of shard"), (-60, "checksum of its header"), (-1, "does not end like a snapshot")],
)
def test_errors_name_the_damage(two, tmp_path, caplog, where, text):
    _, what = broken(two, tmp_path, lambda path: flip(path, where % path.stat().st_size))
    assert text in what["refused"][0]
    assert text in caplog.text


def test_no_intact_snapshot(two, tmp_path):
    shutil.copytree(two[0], tmp_path / "copy")
    for path in (tmp_path / "copy").iterdir():
        flip(path, 64)
    store = new_store(w=np.zeros(4, np.float32))
    with pytest.raises(SnapshotError, match=r"0000000002.*0000000001"):
        store.restore(tmp_path / "copy")
    assert read(store, "w")[0].max() == 0.0  # nothing has changed


def test_unwritable_folder(tmp_path):
    store = new_store(w=np.zeros(4, np.float32))
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SnapshotError, match="Give a folder that is writable"):
            store.snapshot(directory)
    step(store)


def test_a_snapshot_that_fails_keeps_no_views(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no room")

    like = np.zeros((BYTES_PER_BLOCK // 400, 100), np.float32)
    add = program_of(like)
    store = Store()
    store.hello(ME)
    create(store, w=like)
    send(store, add)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_parts, "zlib", SimpleNamespace(crc32=fail))
        with pytest.raises(SnapshotError, match="no room") as failure:
            store.snapshot(tmp_path)
    assert not list(tmp_path.iterdir())
    before = store._contents.shards["w"].value.unsafe_buffer_pointer()
    step(store, program=add, like=like)
    assert store._contents.shards["w"].value.unsafe_buffer_pointer() == before
    assert failure.value.__traceback__ is not None


NO_ROOM = """
import json, resource, sys
import numpy as np
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import SnapshotError
from replicax._ps.store.store import Store

directory, limit = sys.argv[1:]
store = Store()
store.hello("me")
value = np.ones(100_000, np.float32)
piece = {"key": "w", "shape": [100_000], "dtype": "float32", "initial": "array"}
store.answer(Message({"op": "create", "incarnation": "me", "shards": [piece]}, [value]))
store.snapshot(directory)
piece |= {"key": "v", "shape": [200_000]}  # what has not changed is not written again
value = np.ones(200_000, np.float32)
store.answer(Message({"op": "create", "incarnation": "me", "shards": [piece]}, [value]))
if limit == "file":
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
try:
    store.snapshot(directory)
except SnapshotError as error:
    import os
    again = Store()
    print(json.dumps([str(error), os.listdir(directory), again.restore(directory)["shards"]]))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("limit", ["file", "disk"])
def test_full_disk(tmp_path, limit):
    command = [sys.executable, "-c", NO_ROOM, str(tmp_path), limit]
    if limit == "disk":
        mount = [
            "unshare",
            "-rm",
            "sh",
            "-c",
            'mount -t tmpfs -o size=1000k tmpfs "$0" && exec "$@"',
            str(tmp_path),
        ]
        if (
            shutil.which("unshare") is None
            or subprocess.run([*mount, "true"], capture_output=True).returncode
        ):
            pytest.skip("no disk of our own can be mounted here")
        command = [*mount, *command]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    text, files, num_pieces = json.loads(run.stdout)
    assert ("File too large" if limit == "file" else "No space left on device") in text
    assert "Earlier snapshots are unchanged" in text
    assert files == ["snapshot-0000000001.rxps"]
    assert num_pieces == 1


MEMORY = """
import json, sys, threading
import jax, jax.numpy as jnp, numpy as np
from jax import export
from replicax._ps.transport.messages import Message
from replicax._ps.programs.programs import NamedRows, UpdateProgram
from replicax._ps.store.store import Store

what, directory = sys.argv[1:]


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


def ask(op, arrays=(), **header):
    return store.answer(Message({"op": op, "incarnation": "me", **header}, list(arrays)))


def send(fn, state, written, *avals):
    blob = bytes(export.export(jax.jit(fn), platforms=["cpu"])(*avals).serialize())
    program = UpdateProgram(blob, state, written, rows=tuple((NamedRows(0),) for _ in written))
    ask("program", [np.frombuffer(blob, np.uint8)], digest=program.digest, described=program.described())
    return program.digest


def work(rows, prefix, is_restored):
    # A table and a slot, made by a program or from a snapshot; rows are updated, read and written to a snapshot.
    keys = (prefix + "t", prefix + "m")
    table, ids, g = (rows, 64), np.arange(4096, dtype=np.int32), np.ones((4096, 64), np.float32)
    like = jax.ShapeDtypeStruct(table, jnp.float32)
    if is_restored:
        store.restore(directory)
    else:
        initial = send(lambda: jnp.full(table, 0.5, jnp.float32), (), ())
        pieces = [{"key": key, "shape": list(table), "dtype": "float32", "initial": initial} for key in keys]
        ask("create", shards=pieces)
    def adagrad(t, m, ids, g):
        m = m.at[ids].add(g * g, mode="drop")
        return t.at[ids].add(-g / jnp.sqrt(m[ids]), mode="drop"), m
    update = send(adagrad, keys, (0, 1), like, like, jax.ShapeDtypeStruct(ids.shape, jnp.int32), g)
    for number in range(3):
        ask("step", [ids, g, ids], program=update, rows=[keys[0]])
    if directory and not is_restored:  # while all is updated
        writing = threading.Thread(target=store.snapshot, args=[directory])
        writing.start()
        number = 0
        while writing.is_alive():
            ask("step", [ids, g], program=update)
            number += 1
        assert number > 1
        chance = np.random.default_rng(0)
        for _ in range(3):  # restored are all of a chain
            for _ in range(8):
                ask("step", [chance.integers(0, rows, 4096, np.int32), g], program=update)
            assert not store.snapshot(directory)["is_base"]
    return 2 * 4 * rows * 64


store = Store()
store.hello("me")
keep, directory = directory, ""
work(8192, "warm", False)
directory = keep
store.leave()
store.hello("me")
empty = status("VmRSS")
held = work(1 << 20, "", what == "restore")
print(json.dumps([held, status("VmHWM") - empty]))
"""


@pytest.mark.timeout(240)
@pytest.mark.rest
def test_memory_is_that_of_the_values(tmp_path):
    for what in ("create", "restore"):
        command = [sys.executable, "-c", MEMORY, what, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110)
        held, used = json.loads(run.stdout)
        assert held == 1 << 29
        assert used <= 1.2 * held, f"{what}: {used / held:.2f} ×"
