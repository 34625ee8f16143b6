"""Saves that nobody has waited for: which ones are found, and for how long."""

import os
import threading

import numpy as np
import pytest

import replicax as rx
from replicax._src.checkpoint.background import Background, saves_under
from replicax.checkpoint import CheckpointWriteError


def test_failed_write_is_not_a_save_into_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    may_end = threading.Event()
    save = Background()
    save.start(may_end.wait)
    assert saves_under(os.getcwd()) == saves_under("ckpt-1") == []
    may_end.set()
    save.wait()


@pytest.mark.timeout(60)
def test_without_threads_the_caller_writes(tmp_path, monkeypatch):
    start = threading.Thread.start

    def fails(thread):
        if thread.name == "replicax-checkpoint":
            raise RuntimeError("can't start new thread")
        start(thread)

    checkpoint = rx.Checkpoint(state={"rows": np.arange(8.0)})
    manager = rx.CheckpointManager(checkpoint, tmp_path / "ckpts")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        first = manager.save()
        assert manager.latest_checkpoint == first
        patched.setattr("replicax._src.checkpoint.writing.write_pieces", None)
        manager.save()
        with pytest.raises(CheckpointWriteError):
            manager.wait()
    checkpoint.state["rows"] += 1
    manager.save()  # its memory was freed
    manager.wait()
    assert rx.checkpoint.load_variable(manager.latest_checkpoint, "state/rows").tolist() == [*range(1, 9)]
