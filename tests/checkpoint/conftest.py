"""What the tests of checkpoints share."""

import pytest

import replicax as rx


@pytest.fixture
def saved(tmp_path):
    """Saves what it is given by name, and gives the path."""

    def save(**tracked):
        return rx.Checkpoint(**tracked).save(tmp_path / "ckpt")

    return save
