"""A process that does not write follows the chief's checkpoint on the disk, as long as the files change."""

import threading
import time
import types

import pytest

from checks import message
from replicax._src.checkpoint import processes
from replicax._src.checkpoint.errors import CheckpointError


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    peers = types.SimpleNamespace(names=("worker 0", "worker 1"), check=lambda: None)
    monkeypatch.setattr(processes, "joined_peers", lambda: peers)
    monkeypatch.setattr(processes, "_SHARED_WITHIN_S", 0.1)
    monkeypatch.setattr(processes, "_UNCHANGED_WITHIN_S", 1.0)


def follow(tmp_path):
    path = str(tmp_path / "ckpt-1")
    processes.follow_chief(path, f"{path}.part-", None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_left", [False, True])
def test_missing_checkpoint_raises_even_if_a_part_is_left(is_left, tmp_path):
    if is_left:
        part = tmp_path / "ckpt-1.part-host-1-0"
        part.mkdir()
        (part / "array").write_text("half")
    message(CheckpointError, lambda: follow(tmp_path), "worker 0 has not written")


@pytest.mark.rest
def test_growing_part_is_waited_for(tmp_path):
    part = tmp_path / "ckpt-1.part-host-1-0"
    part.mkdir()

    def write():
        for _ in range(6):
            time.sleep(0.3)
            with open(part / "array", "a") as file:
                file.write("more")
        (part / processes.MANIFEST).touch()
        part.rename(tmp_path / "ckpt-1")

    writer = threading.Thread(target=write)
    writer.start()
    follow(tmp_path)
    writer.join()
    assert (tmp_path / "ckpt-1" / "array").read_text() == "more" * 6
