"""Each file of a checkpoint is deleted, emptied, truncated, or gets one flipped bit: the damage is found and named,
and an older checkpoint is used."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.checkpoint import chunks
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


DAMAGES = {"deleted": delete, "emptied": empty, "cut": cut} | {
    f"flipped at {at}": flip(at) for at in (0, 0.5, 1)
}


def tracked(value):
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        own = rx.Variable(value, synchronization="on_read", aggregation="sum", trainable=False)
    return rx.Checkpoint(w=rx.Variable(np.full(1000, value, np.float32)), own=own)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    checkpoint = tracked(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 2000)  # so that the file of w has an index of chunks
        manager = rx.CheckpointManager(checkpoint, directory, asynchronous=False)
        manager.save()
        checkpoint.w.assign(np.full(1000, 2.0))
        manager.save()
    return directory


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
