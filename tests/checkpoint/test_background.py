"""Saves that nobody has waited for: which ones are found, and for how long."""

import os
import threading

from replicax._src.checkpoint.background import Background, saves_under


def test_failed_write_is_not_a_save_into_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    may_end = threading.Event()
    save = Background()
    save.start(may_end.wait)
    assert saves_under(os.getcwd()) == saves_under("ckpt-1") == []
    may_end.set()
    save.wait()
