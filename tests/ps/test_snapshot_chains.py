"""Snapshots that build on earlier ones: each writes the changes, and together they equal the store bit for bit."""

import contextlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import export

from asked_store import ME, ask, create, send
from replicax._ps.programs.programs import NamedRows, UpdateProgram
from replicax._ps.store import (
    held_values,
    snapshot_parts,
    snapshot_plan,
    snapshot_rules,
    snapshots,
)
from replicax._ps.store.store import Store
from replicax._src.vocabulary.errors import SnapshotError

ROWS, COLUMNS, NUM_IDS = 1701, 24, 5  # rows of 96 bytes, 3 in a unit; the last unit has fewer
UNIT_BYTES = 3 * COLUMNS * 4


def _adagrad(t, m, ids, g):
    at = jnp.where(ids < 0, ROWS, ids)
    m = m.at[at].add(g * g, mode="drop")
    return t.at[at].add(-g / jnp.sqrt(1e-3 + m.at[at].get(mode="clip")), mode="drop"), m


def _program():
    table = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32)
    given = jax.ShapeDtypeStruct((NUM_IDS,), np.int32), jax.ShapeDtypeStruct((NUM_IDS, COLUMNS), np.float32)
    blob = export.export(jax.jit(_adagrad), platforms=["cpu"])(table, table, *given).serialize()
    named = (NamedRows(0),)
    return UpdateProgram(bytes(blob), ("t", "m"), (0, 1), rows=(named, named))


PROGRAM = _program()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (held_values, snapshot_parts):
        monkeypatch.setattr(module, "BYTES_PER_BLOCK", 20_000)
    monkeypatch.setattr(snapshot_parts, "_UNITS_BYTES", 1000)


def new_store():
    """A table, its slot, and a small value."""
    store = Store()
    store.hello(ME)
    table = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    create(store, t=table, m=np.zeros_like(table), count=np.zeros((), np.int64))
    send(store, PROGRAM)
    return store


def update(store, *ids, seed=1):
    """Rows of the table and the slot; invalid numbers are padding."""
    padded = np.full(NUM_IDS, ROWS, np.int32)
    padded[: len(ids)] = ids
    gradients = np.random.default_rng(seed).standard_normal((NUM_IDS, COLUMNS)).astype(np.float32)
    ask(store, "step", [padded, gradients], program=PROGRAM.digest, pull=[])


def values(store):
    keys = ["t", "m", "count"]
    read = ask(store, "step", pull=[[key, None] for key in keys], program=None).arrays
    return [np.array(value) for value in read]


def assert_same(store, wanted):
    for got, value in zip(values(store), wanted, strict=True):
        assert (got.shape, got.dtype) == (value.shape, value.dtype)
        assert got.tobytes() == value.tobytes()


def restored(directory, **how):
    store = Store()
    return store, store.restore(directory, **how)


def numbers(directory):
    return sorted(int(path.stem.split("-")[1]) for path in Path(directory).glob("*.rxps"))


# --- what is written ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_copied", [True, False])
def test_snapshot_has_the_bytes_of_the_changes(tmp_path, monkeypatch, is_copied):
    if not is_copied:
        monkeypatch.setattr(snapshot_plan, "MAX_COPIED_BYTES", 0)
    store = new_store()
    held = store.statistics()["bytes"]
    base = store.snapshot(tmp_path)
    assert base["is_base"]
    assert held < base["bytes"] < held + 3000
    empty = store.snapshot(tmp_path)["bytes"]
    assert empty < 3000
    update(store, 7, 7, 1700, -1, ROWS)  # the first, and the last, which is not whole
    small = store.snapshot(tmp_path)
    assert not small["is_base"]
    changed = 2 * (
        UNIT_BYTES + 2 * 8 + 2 * 64 + UNIT_BYTES
    )  # of t and m: two units, their numbers, and padding
    assert empty < small["bytes"] <= empty + changed + 400
    wanted = values(store)
    update(store, 3)
    again, what = restored(tmp_path)
    assert what["file"] == small["file"]
    assert_same(again, wanted)
    ask(store, "assign", [np.array(5)], keys=["count"])
    told = store.snapshot(tmp_path)  # the table's rows since, and what is small
    assert told["bytes"] <= empty + changed + 500
    assert_same(restored(tmp_path)[0], values(store))


def test_chain_continues_after_restoring(tmp_path):
    store = new_store()
    store.snapshot(tmp_path)
    update(store, 1, 2, 3)
    store.snapshot(tmp_path)
    again, _ = restored(tmp_path)
    send(again, PROGRAM)
    update(again, 1699, 2)
    told = again.snapshot(tmp_path)
    assert not told["is_base"]
    assert told["bytes"] < 5000
    assert_same(restored(tmp_path)[0], values(again))


def test_shard_with_many_changes_is_written_in_full(tmp_path):
    store = new_store()
    store.snapshot(tmp_path)
    table, _, _ = values(store)
    ask(store, "assign", [table + 1], keys=["t"])  # any row may have changed
    told = store.snapshot(tmp_path)
    assert not told["is_base"]  # as half of all has
    assert table.nbytes <= told["bytes"] <= table.nbytes + 3000
    assert_same(restored(tmp_path)[0], values(store))
    update(store, 1)
    ask(store, "assign", [table + 2], keys=["t"])
    assert store.snapshot(tmp_path)[
        "is_base"
    ]  # with this one the chain would be twice as large as the shards
    assert_same(restored(tmp_path)[0], values(store))


def test_recreated_shards_are_new_ones(tmp_path):
    store = new_store()
    store.snapshot(tmp_path)
    table, _, _ = values(store)
    ask(store, "drop", keys=["t"])
    create(store, t=table * 2)
    store.snapshot(tmp_path)
    assert_same(restored(tmp_path)[0], values(store))
    store.hello("another")
    assert store.snapshot(tmp_path)["updates"] == 0
    assert restored(tmp_path)[1]["shards"] == 0


def test_bounds_of_a_chain(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_rules, "MAX_FILES", 4)
    store = new_store()
    are_bases = []
    for number in range(11):
        update(store, number)
        are_bases.append(store.snapshot(tmp_path)["is_base"])
    assert [n for n, is_base in enumerate(are_bases) if is_base] == [0, 4, 8]
    assert numbers(tmp_path) == [5, 6, 7, 8, 9, 10, 11]  # of the last base, and of the one before
    monkeypatch.setattr(snapshot_rules, "MAX_FILES", 100)
    for number in range(60):
        update(store, *range(number, ROWS, 400))
        store.snapshot(tmp_path)
        # Two chains, and their descriptions, which are large for so small a table.
        held = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert held <= (2 * snapshot_rules.GROWTH + 0.5) * store.statistics()["bytes"]
    assert_same(restored(tmp_path)[0], values(store))


def test_snapshots_after_a_rewind_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_rules, "MAX_FILES", 3)
    store = new_store()
    for epoch in range(1, 5):
        update(store, epoch)
        store.snapshot(tmp_path, epoch=epoch)
    assert numbers(tmp_path) == [1, 2, 3, 4]  # 4 is a base
    again, _ = restored(tmp_path, epoch=2)
    send(again, PROGRAM)
    update(again, 7)
    again.snapshot(tmp_path)
    assert numbers(tmp_path) == [1, 2, 5]
    assert_same(restored(tmp_path)[0], values(again))
    update(again, 8)
    assert again.snapshot(tmp_path)["is_base"]
    assert numbers(tmp_path) == [1, 2, 5, 6]
    os.truncate(tmp_path / "snapshot-0000000006.rxps", 100)
    assert restored(tmp_path)[1]["file"].endswith("5.rxps")


def test_last_epoch_of_all_servers_is_kept_while_others_fail(tmp_path, monkeypatch):
    """Another server fails to write the epochs after the first one, so all may go back to that."""
    monkeypatch.setattr(snapshot_rules, "MAX_FILES", 2)
    store = new_store()
    states = {}
    for epoch in range(1, 10):
        update(store, epoch)
        store.snapshot(tmp_path, epoch, kept_epoch=2 if epoch > 2 else 0)
        states[epoch] = values(store)
    assert numbers(tmp_path) == [1, 2, 7, 8, 9]
    again, told = restored(tmp_path, epoch=2)
    assert told["epoch"] == 2
    assert_same(again, states[2])
    newest, _ = restored(tmp_path)  # a new process, which does not know the epochs of the last one
    send(newest, PROGRAM)
    for epoch in range(10, 15):
        update(newest, epoch)
        newest.snapshot(tmp_path, epoch, kept_epoch=2)
    assert {1, 2} < set(numbers(tmp_path))
    newest.snapshot(tmp_path, 15, kept_epoch=14)
    assert numbers(tmp_path)[0] > 2


# --- what goes wrong ------------------------------------------------------------------------------------


def test_a_snapshot_that_fails_is_in_the_next_one(tmp_path, monkeypatch):
    store = new_store()
    store.snapshot(tmp_path)
    update(store, 10, 20)
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError("no room")

        patch.setattr(snapshots.os, "fsync", full)
        with pytest.raises(SnapshotError, match="no room"):
            store.snapshot(tmp_path)
    update(store, 1000)
    told = store.snapshot(tmp_path)
    assert told["bytes"] < 6000
    assert_same(restored(tmp_path)[0], values(store))


def test_chain_does_not_continue_from_removed_files(tmp_path):
    for breaks in (os.unlink, lambda path: os.truncate(path, 100)):
        store = new_store()
        first = store.snapshot(tmp_path)["file"]
        breaks(first)
        update(store, 1)
        assert store.snapshot(tmp_path)["is_base"]
        assert_same(restored(tmp_path)[0], values(store))
    shutil.rmtree(tmp_path)
    assert store.snapshot(tmp_path)["is_base"]


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """A folder with two chains of three, and the values of each snapshot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_rules, "MAX_FILES", 3)
        directory, store, states = tmp_path_factory.mktemp("chains"), new_store(), {}
        for number in range(1, 7):
            update(store, number, 100 * number, seed=number)
            store.snapshot(directory)
            states[number] = values(store)
    assert numbers(directory) == list(states)
    return directory, states


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "header"])
def test_each_file_that_is_broken(chains, tmp_path, number, how):
    """The newest snapshot that does not need the file is taken; the log names the damage of those that do."""
    directory, states = chains
    folder = tmp_path / "copy"
    shutil.copytree(directory, folder)
    path = folder / f"snapshot-{number:010}.rxps"
    if how == "missing":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2 if number in (1, 4) else 70)
    else:
        content = bytearray(path.read_bytes())
        content[-60 if how == "header" else 64] ^= 4
        path.write_bytes(content)
    again, what = restored(folder)
    # A header does not list the bytes: other files know their positions.
    lost = [number] if how == "header" else [n for n in states if number <= n <= (number + 2) // 3 * 3]
    if lost == [n for n in states if n >= min(lost)] and min(lost) > 1:
        newest = min(lost) - 1
    else:
        newest = max(n for n in states if n not in lost)
    assert_same(again, states[newest])
    assert what["file"].endswith(f"snapshot-{newest:010}.rxps")
    there = [n for n in range(6, newest, -1) if how != "missing" or n != number]
    assert len(what["refused"]) == len(there)
    assert all(path.name in text for text in what["refused"])
    send(again, PROGRAM)
    update(again, 5)
    again.snapshot(folder)
    assert_same(restored(folder)[0], values(again))


def of_format_1(path, store_values):
    """A file in the format of earlier versions."""
    content, shards = b"rx-ps-01", []
    for key, value in store_values.items():
        content += bytes(-len(content) % 64)
        described = {"key": key, "shape": list(value.shape), "dtype": value.dtype.name, "number": 3}
        memory = value.tobytes()
        place = {"offset": len(content), "bytes": len(memory), "checksum": zlib.crc32(memory)}
        shards.append({**described, **place})
        content += memory
    said = {
        "epoch": 0,
        "instance": "x",
        "incarnation": ME,
        "updates": 4,
        "highest_number": 3,
        "windows": {},
        "programs": [],
    }
    header = json.dumps({"format": 1, "content": said, "shards": shards}).encode()
    footer = struct.pack("<QQII8s", len(content), len(header), zlib.crc32(header), 0, b"rx-ps-01")
    path.write_bytes(content + header + footer)


def test_files_of_earlier_versions(tmp_path):
    table = np.random.default_rng(3).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    of_format_1(tmp_path / "snapshot-0000000007.rxps", {"t": table, "m": table**2, "count": np.array(3)})
    store, what = restored(tmp_path)
    assert (what["updates"], what["shards"]) == (4, 3)
    assert_same(store, [table, table**2, np.array(3)])
    send(store, PROGRAM)
    update(store, 1, 2)
    assert not store.snapshot(tmp_path)["is_base"]
    assert numbers(tmp_path) == [7, 8]
    assert_same(restored(tmp_path)[0], values(store))


def places_in(value, path=()):
    yield path
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(child, (*path, key))


WRONG = (None, True, -1, 0, 7, 2**40, 2**70, 0.5, "", "x", [], [1], {}, {"a": 1}, [[[1, 2, 3, 4], None]])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_wrong_index_with_a_right_checksum_is_refused(chains, tmp_path_factory, data):
    """Another snapshot is taken, or the only error is a SnapshotError, also for shapes that no memory holds."""
    folder = tmp_path_factory.mktemp("wrong") / "copy"
    shutil.copytree(chains[0], folder)
    path = folder / "snapshot-0000000006.rxps"
    content = path.read_bytes()
    offset, length, *_ = struct.unpack("<QQII8s", content[-32:])
    header = json.loads(content[offset : offset + length])
    *above, last = data.draw(st.sampled_from([place for place in places_in(header) if place]))
    inner = header
    for key in above:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[last] = data.draw(st.sampled_from(WRONG))
    else:
        del inner[last]
    text = json.dumps(header).encode()
    footer = struct.pack("<QQII8s", offset, len(text), zlib.crc32(text), 0, b"rx-ps-01")
    path.write_bytes(content[:offset] + text + footer)
    with contextlib.suppress(SnapshotError):
        restored(folder)
    shutil.rmtree(folder)


class Killed(BaseException):
    """The process ends here."""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.rest
def test_restore_gives_the_last_intact_snapshot(tmp_path, data):
    """Any sequence of updates, snapshots, failing snapshots, crashes, and flipped bits in the last file."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    store, states, is_flipped = new_store(), [], False
    row = st.integers(-2, ROWS + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_rules, "MAX_FILES", data.draw(st.integers(1, 4)))
        patch.setattr(snapshot_plan, "MAX_COPIED_BYTES", data.draw(st.sampled_from([0, 1000, 1 << 24])))
        for _ in range(data.draw(st.integers(3, 14))):
            what = data.draw(
                st.sampled_from(["rows", "rows", "all", "snapshot", "snapshot", "full", "killed", "flip"])
            )
            if what == "rows":
                update(store, *data.draw(st.lists(row, max_size=NUM_IDS)), seed=len(states))
            elif what == "all":
                key, number = data.draw(st.sampled_from("tm")), data.draw(st.integers(0, 9))
                ask(store, "assign", [np.full((ROWS, COLUMNS), number, np.float32)], keys=[key])
            elif what == "snapshot":
                states.append((values(store), store.snapshot(folder)["file"]))
                is_flipped = False
            elif what in ("full", "killed"):
                _break_off(store, folder, data)
            elif len(states) > 1 and not is_flipped:
                _flip(states.pop()[1])
                is_flipped = True
            if states and what in ("killed", "flip"):
                store, told = restored(folder)
                assert told["file"] == states[-1][1]
                assert_same(store, states[-1][0])
                send(store, PROGRAM)
        if states:
            assert_same(restored(folder)[0], states[-1][0])


def _break_off(store, folder, data):
    """A snapshot fails in the middle, or the process ends there."""
    error, raised = data.draw(st.sampled_from([(OSError("full"), SnapshotError), (Killed(), Killed)]))

    def fails(*_):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        where = data.draw(st.sampled_from(["write", "fsync", "rename"]))
        if where == "rename":
            patch.setattr(Path, "rename", fails)
        elif where == "fsync":
            patch.setattr(snapshots.os, "fsync", fails)
        else:
            patch.setattr(snapshots, "write_entry", fails)
        with pytest.raises(raised):
            store.snapshot(folder)


def _flip(path):
    content = bytearray(Path(path).read_bytes())
    content[-60] ^= 1
    Path(path).write_bytes(content)


def work(directory, until=1_000_000):
    """Updates that depend on their number, and a snapshot after every few; resumes from the last one."""
    store, told = restored(directory)
    if told is None:
        store = new_store()
        done = 0
    else:
        send(store, PROGRAM)
        done = told["updates"]
    while done < until:
        update(store, *((7 * done + 301 * n) % ROWS for n in range(NUM_IDS)), seed=done)
        done += 1
        if until == 1_000_000 and done % 3 == 0:
            store.snapshot(directory)
            print(done, flush=True)
    return store


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_process_that_is_killed_while_it_writes(tmp_path):
    """The process is killed by `kill -9` ten times, at random moments: the restored state equals a store after as many
    updates, bit for bit."""
    chance = random.Random(0)
    command = [sys.executable, "-c", f"import test_snapshot_chains as t; t.work({str(tmp_path / 'ps')!r})"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    for _ in range(10):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            told = int(process.stdout.readline())
            time.sleep(chance.uniform(0.0, 0.3))
            process.kill()
            told = max([told, *(int(line) for line in process.stdout if line.endswith("\n"))])
        again, what = restored(tmp_path / "ps")
        assert what["updates"] >= told
        assert not what["refused"]
        assert_same(again, values(work(tmp_path / "none", until=what["updates"])))
