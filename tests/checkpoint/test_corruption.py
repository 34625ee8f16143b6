"""Each file of a checkpoint is deleted, emptied, truncated, or gets one flipped bit: the damage is found and named,
and an older checkpoint is used."""

import functools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.checkpoint import array_chunks
from replicax.checkpoint import CheckpointNotFoundError, CorruptCheckpointError


def delete(file):
    file.unlink()


def empty(file):
    file.write_bytes(b"")


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(at):
    def flip(file):
        data = bytearray(file.read_bytes())
        data[int(at * (len(data) - 1))] ^= 4
        file.write_bytes(data)

    return flip


OF_FORMAT_4 = Path(__file__).parent / "of_format_4" / "ckpt-1"

DAMAGES = {"deleted": delete, "emptied": empty, "cut": cut} | {
    f"flipped at {at}": flip(at) for at in (0, 0.5, 1)
}


def tracked(value, strategy=None):
    with (strategy or rx.MirroredStrategy(["cpu:0", "cpu:1"])).scope():
        own = rx.Variable(value, synchronization="on_read", aggregation="sum", trainable=False)
    return rx.Checkpoint(w=rx.Variable(np.full(1000, value, np.float32)), own=own)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    checkpoint = tracked(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_chunks, "CHUNK_BYTES", 2000)  # so that the file of w has an index of chunks
        manager = rx.CheckpointManager(checkpoint, directory, asynchronous=False)
        manager.save()
        checkpoint.w.assign(np.full(1000, 2.0))
        manager.save()
    return directory


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group


def files_of(directory):
    return sorted(
        path.relative_to(directory) for path in Path(directory, "ckpt-2").rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_file_is_named_and_the_previous_checkpoint_is_used(damage, two_checkpoints, tmp_path, caplog):
    names = files_of(two_checkpoints)
    assert len(names) == 6
    for number, name in enumerate(names):
        directory = tmp_path / str(number)
        shutil.copytree(two_checkpoints, directory)
        size = (directory / name).stat().st_size
        if not size and damage != "deleted":
            continue
        DAMAGES[damage](directory / name)
        checkpoint = tracked(0.0)
        with pytest.raises(CorruptCheckpointError, match=name.name):
            checkpoint.restore(directory / "ckpt-2")
        assert float(checkpoint.w[0]) == 0.0

        caplog.clear()
        restored = rx.CheckpointManager(checkpoint, directory).restore_or_initialize()
        assert Path(restored).name == "ckpt-1"
        assert float(checkpoint.w[0]) == 1.0
        assert name.name in caplog.text
        assert "ckpt-1 instead" in caplog.text


def test_manifest_of_another_kind_is_named(two_checkpoints, tmp_path):
    path = shutil.copytree(two_checkpoints, tmp_path / "copy") / "ckpt-2"
    manifest = path / "manifest.json"
    for text in ("[" * 100_000, '{"crc32": 223132457, "contents": []}', "null", ""):
        manifest.write_text(text)
        message(CorruptCheckpointError, lambda: rx.Checkpoint().restore(path), "manifest.json")
    manifest.unlink()
    manifest.mkdir()
    message(CorruptCheckpointError, lambda: rx.Checkpoint().restore(path), "manifest.json", "cannot be read")


@pytest.mark.parametrize("name", ["arrays/w", "components/own"])
def test_array_of_another_checkpoint_is_found(name, two_checkpoints, tmp_path):
    """Each chunk is intact, but it is of another save."""
    shutil.copytree(two_checkpoints, tmp_path / "mixed")
    shutil.rmtree(tmp_path / "mixed" / "ckpt-2" / name)
    shutil.copytree(two_checkpoints / "ckpt-1" / name, tmp_path / "mixed" / "ckpt-2" / name)
    checkpoint = tracked(0.0)
    message(CorruptCheckpointError, lambda: checkpoint.restore(tmp_path / "mixed" / "ckpt-2"), name)
    assert float(checkpoint.w[0]) == 0.0


@pytest.fixture(scope="module")
def two_of_several_files(tmp_path_factory):
    """Two saves of an array in two files of four chunks each, and of components in a file each."""
    directory = tmp_path_factory.mktemp("several")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_chunks, "CHUNK_BYTES", 500)
        patch.setattr(array_chunks, "FILE_BYTES", 2000)
        strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
        checkpoint = tracked(1.0, strategy)
        manager = rx.CheckpointManager(checkpoint, directory, asynchronous=False)
        for number in (1.0, 2.0):
            checkpoint.w.assign(number * np.arange(1000))
            strategy.run(lambda: checkpoint.own.assign_add(1.0 + replica_id()))
            manager.save()
    return directory


def exchange(directory, file, other):
    kept = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def take_from_the_first_save(directory, file, other):
    shutil.copy(directory / "ckpt-1" / file.relative_to(directory / "ckpt-2"), file)


def take_a_chunk_from_the_first_save(directory, file, other):
    """The codec's checksum of the chunk comes along."""
    length = file.stat().st_size if file.stat().st_size < 500 else 504
    of_first = (directory / "ckpt-1" / file.relative_to(directory / "ckpt-2")).read_bytes()
    file.write_bytes(of_first[:length] + file.read_bytes()[length:])


def append(directory, file, other):
    with open(file, "ab") as opened:
        opened.write(b"\0")


REPLACEMENTS = (exchange, take_from_the_first_save, take_a_chunk_from_the_first_save, append)


@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
@pytest.mark.parametrize(("folder", "name"), [("arrays/w", "'w'"), ("components/own", "'own'")])
def test_part_of_another_save_or_place_is_found(
    folder, name, replace, two_of_several_files, tmp_path, caplog
):
    """Each chunk has the right checksum, as after an interrupted copy, or a sync that compares sizes."""
    directory = shutil.copytree(two_of_several_files, tmp_path / "copy")
    file, other = (directory / "ckpt-2" / folder / part for part in ("c.0", "c.1"))
    replace(directory, file, other)
    checkpoint = tracked(0.0)
    message(CorruptCheckpointError, lambda: checkpoint.restore(directory / "ckpt-2"), folder)
    assert float(checkpoint.w[999]) == 0.0

    restored = rx.CheckpointManager(checkpoint, directory).restore_or_initialize()
    assert Path(restored).name == "ckpt-1"
    assert float(checkpoint.w[999]) == 999.0
    assert "ckpt-1 instead" in caplog.text

    key = Path(folder).name
    message(CorruptCheckpointError, lambda: rx.checkpoint.load_variable(directory / "ckpt-2", key), folder)
    exported = tmp_path / "model.safetensors"
    message(
        CorruptCheckpointError,
        lambda: rx.checkpoint.export(directory / "ckpt-2", exported, only=key),
        folder,
    )
    assert not exported.exists()


def test_checkpoint_of_an_earlier_version_restores():
    """Its manifest does not describe the files of arrays; their chunks have checksums."""
    checkpoint = rx.Checkpoint(
        w=rx.Variable(np.zeros(1000, np.float32)),
        small=rx.Variable(np.zeros(4, np.int32)),
        own=tracked(0.0).own,
        best=0.0,
    )
    checkpoint.restore(OF_FORMAT_4).assert_consumed()
    assert np.array_equal(checkpoint.w, np.arange(1000))
    assert np.array_equal(checkpoint.small, np.arange(4))
    assert (float(checkpoint.own), checkpoint.best) == (6.0, 0.5)


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_file_of_an_earlier_version_is_found(damage, tmp_path):
    path = shutil.copytree(OF_FORMAT_4, tmp_path / "ckpt-1")
    for name in ("arrays/small/c.0", "arrays/w/c.1", "components/own/c.0"):
        DAMAGES[damage](path / name)
        load = functools.partial(rx.checkpoint.load_variable, path, Path(name).parent.name)
        message(CorruptCheckpointError, load, name)


def test_values_that_no_object_takes_are_verified_too(two_checkpoints, tmp_path):
    path = shutil.copytree(two_checkpoints, tmp_path / "copy") / "ckpt-2"
    flip(0.5)(path / "arrays" / "w" / "c.0")
    only = rx.Checkpoint(own=tracked(0.0).own)
    message(CorruptCheckpointError, lambda: only.restore(path), "'Variable'", "arrays/w")
    assert float(only.own) == 0.0


def test_error_says_if_no_checkpoint_is_intact(two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints, tmp_path / "all")
    for name in ("ckpt-1", "ckpt-2"):
        os.remove(tmp_path / "all" / name / "manifest.json")
    manager = rx.CheckpointManager(tracked(0.0), tmp_path / "all")
    message(CorruptCheckpointError, manager.restore_or_initialize, "None of the 2", "manifest.json")
    message(CheckpointNotFoundError, lambda: tracked(0.0).restore(tmp_path / "no"), "latest_checkpoint")
    assert rx.CheckpointManager(tracked(0.0), tmp_path / "new").restore_or_initialize() is None
