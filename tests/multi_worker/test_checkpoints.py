"""Checkpoints of several processes: all write, all restore, on the same number bit-identically, and on other numbers."""

import os
import re
import shutil

import pytest

from checkpoints import continuous, training

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def first(folder, reports_of):
    reports = reports_of(training, str(folder), "6", "False")
    flip_a_bit(folder / "ckpt-3" / "arrays" / "model" / "layers" / "0" / "kernel" / "c.0.0")
    return reports


def flip_a_bit(chunk):
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)


def resumed(folder, first, reports_of, num_steps, workers):
    assert first
    copy = folder.with_name(f"resumed-{workers}")
    if not copy.exists():
        shutil.copytree(folder, copy)
    return reports_of(training, str(copy), num_steps, "True", workers=workers)


@pytest.mark.rest
def test_processes_write_together(folder, first):
    assert [worker["num_written"] for worker in first] == [3, 3]
    assert sorted(os.listdir(folder)) == ["ckpt-1", "ckpt-2", "ckpt-3"]
    assert first[0]["state"] == first[1]["state"]


@pytest.mark.rest
def test_same_number_resumes_bit_identically_from_the_newest_intact_checkpoint(folder, first, reports_of):
    for worker, uninterrupted in zip(resumed(folder, first, reports_of, "2", 2), first, strict=True):
        assert (worker["restored"], worker["at_restore"]) == ("ckpt-2", 48)
        assert worker["losses"] == uninterrupted["losses"][4:]
        assert worker["state"] == uninterrupted["state"]
        assert worker["rows"] == uninterrupted["rows"]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.long
def test_another_number_of_workers_resumes_too(workers, folder, first, reports_of):
    for worker in resumed(folder, first, reports_of, "2", workers):
        assert (worker["restored"], worker["at_restore"]) == ("ckpt-2", 48)
        assert worker["rows"][0] == 72


@pytest.mark.rest
def test_wait_waits_for_all_writers(first):
    for worker in first:
        assert "after 0.1 s" in worker["late"]
        assert worker["after_wait"] == ["ckpt-4"]
        assert "'NoneType' object is not callable" in worker["failed"]
        assert worker["after_failure"] == ["ckpt-4", "ckpt-6"]
        assert worker["failed"].startswith("CheckpointWriteError")
    assert "worker 1 failed at writing ckpt-5" in first[0]["failed"]


def test_save_in_progress_counts_as_saved_in_every_process(first):
    assert first[1]["under_way"] == "ckpt-1"
    for worker in first:
        assert worker["after_close"] == "ckpt-1"
        assert worker["reopened"] == "ckpt-3"
        assert worker["failed_alone"] == "CheckpointWriteError"
        assert "'NoneType' object is not callable" in worker["failed_together"]
        assert worker["after_all"] == "ckpt-3"


def test_unshared_directories_are_detected(first):
    for worker in first:
        assert "worker 1 cannot see" in worker["unshared"]
        assert "share (NFS" in worker["unshared"]


def test_worker_with_another_directory_uses_the_chiefs(folder, first):
    for worker in first:
        assert worker["saved_to"] == f"{folder}-shared"
        assert worker["latest"] == f"{folder}-shared/ckpt-2"


def test_all_restore_one_checkpoint_or_none_do(first):
    for number, worker in enumerate(first):
        assert re.search(r"worker 0 '.*ckpt-4', worker 1 '.*ckpt-6'", worker["restoring_another"])
        assert re.search(r"worker 0 None, worker 1 '.*ckpt-4'", worker["restoring_none"])
        kind = ("CheckpointNotFoundError: worker 1 failed", "CheckpointNotFoundError: There is no")[number]
        assert worker["restoring_missing"].startswith(kind)
        assert worker["untouched"]


@pytest.mark.rest
@pytest.mark.parametrize("saves_on_failure", ["False", pytest.param("True", marks=pytest.mark.long)])
def test_continuous_saves_begin_at_the_same_step_in_all_processes(saves_on_failure, tmp_path, reports_of):
    """One worker's disk is slow, and full in the steps 40 to 79: training goes on."""
    first, second = reports_of(continuous, str(tmp_path / "saved"), saves_on_failure)
    assert first == second
    assert len(first["began"]) > 5
    assert first["began"][0] == 1
    assert first["kept"][-1] == "150"
    assert (first["step"], first["weights"]) == (150, [150.0] * 4)
