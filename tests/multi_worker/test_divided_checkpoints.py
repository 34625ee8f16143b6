"""Checkpoints of arrays that are divided over processes: each process writes and reads its part, and gathers nothing."""

import itertools
import shutil

import numpy as np
import pytest

import replicax as rx
from checkpoints import divided_state
from checks import path_of_programs
from replicax._src.checkpoint.saved import SavedCheckpoint
from replicax.checkpoint import CorruptCheckpointError
from replicax.testing import LocalCluster

pytestmark = [pytest.mark.timeout(240), pytest.mark.rest]
NUM_BYTES = 4 << 20  # of each of five arrays
NUM_ARRAYS = 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory, reports_of):
    """The directory, and the reports, of a save by two processes with two devices each."""
    folder = tmp_path_factory.mktemp("divided")
    return folder, reports_of(divided_state, str(folder), "save", str(NUM_BYTES), workers=2, devices=2)


def test_each_process_copies_and_writes_its_share(saved):
    folder, reports = saved
    for worker in reports:
        assert worker["written"] == pytest.approx(worker["total"] / 2, rel=0.1)
        assert worker["buffers"] == worker["written"]
    stored = SavedCheckpoint(str(folder / "ckpt-1")).contents
    by_files = dict.fromkeys(range(2), 0)
    for name, _, array in stored.folders():
        grid = [range(0, size, by) for size, by in zip(array.shape, array.file, strict=True)]
        for position, origin in enumerate(itertools.product(*grid)):
            file = ".".join(["c", *(str(at // by) for at, by in zip(origin, array.file, strict=True))])
            writer = array.writers[position if len(array.writers) > 1 else 0]
            by_files[writer] += (folder / "ckpt-1" / name / file).stat().st_size
    assert [by_files[0], by_files[1]] == pytest.approx([r["written"] for r in reports], rel=0.01)


@pytest.mark.parametrize(
    ("workers", "devices"),
    [
        (1, 1),
        pytest.param(1, 8, marks=pytest.mark.long),
        (4, 1),
        pytest.param(4, 2, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
    ],
)
def test_each_process_reads_what_its_devices_need(saved, reports_of, tmp_path, workers, devices):
    copy = shutil.copytree(saved[0], tmp_path / "copy")
    for worker in reports_of(
        divided_state, str(copy), "restore", str(NUM_BYTES), workers=workers, devices=devices
    ):
        assert worker["path"] == "ckpt-1"
        assert worker["equal"]
        assert worker["kept"]
        assert worker["read"] < 1.1 * worker["needed"] + NUM_ARRAYS * (1 << 16)


def test_lost_part_of_a_process_is_named(saved, tmp_path):
    path = shutil.copytree(saved[0], tmp_path / "copy") / "ckpt-1"
    lost = sorted((path / "arrays" / "state" / "rows").glob("c.*"))[-1]
    lost.unlink()
    state = {"rows": np.zeros((NUM_BYTES // 2048, 512), np.float32), "number": np.int64(0)}
    checkpoint = rx.Checkpoint(state=state)
    with pytest.raises(CorruptCheckpointError) as caught:
        checkpoint.restore(path)
    for text in (f"arrays/state/rows/{lost.name}", "'state/rows'", "worker 1"):
        assert text in str(caught.value)
    assert checkpoint.state["number"] == 0


def test_exchanged_parts_of_two_processes_are_found(saved, tmp_path):
    path = shutil.copytree(saved[0], tmp_path / "copy") / "ckpt-1"
    files = sorted((path / "arrays" / "state" / "rows").glob("c.*"))
    first, last = files[0].read_bytes(), files[-1].read_bytes()
    assert len(first) == len(last)
    files[0].write_bytes(last)
    files[-1].write_bytes(first)
    checkpoint = rx.Checkpoint(state={"rows": np.zeros((NUM_BYTES // 2048, 512), np.float32)})
    with pytest.raises(CorruptCheckpointError, match="arrays/state/rows"):
        checkpoint.restore(path)
    assert not checkpoint.state["rows"].any()


def test_death_while_writing_is_told_and_leaves_the_previous_checkpoint(tmp_path):
    environment = {"KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs()}
    with LocalCluster(2, devices_per_worker=1, environment=environment, timeout_s=150) as cluster:
        cluster.start(divided_state, (str(tmp_path), "die", str(1 << 20)))
        first, second = cluster.wait().values()
    assert second.exit_code == 9
    assert "worker 1" in first.report["died"]
    assert first.report["after_s"] < 30  # under any load; in a quiet machine it takes less than a second
    assert first.report["left"] == ["ckpt-1"]
