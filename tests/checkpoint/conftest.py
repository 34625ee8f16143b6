"""Shared parts of the tests of checkpoints."""

import pytest

import replicax as rx


@pytest.fixture
def saved(tmp_path):
    """Saves its arguments by name, and returns the path."""

    def save(**tracked):
        return rx.Checkpoint(**tracked).save(tmp_path / "ckpt")

    return save
