"""A worker that is alive but is stuck in a program, or before it: it is named, and the launcher restarts the job."""

import re

import pytest

from launched_jobs import LaunchedJob, getting_stuck, staying_away

pytestmark = [pytest.mark.timeout(250), pytest.mark.rest]
LIMIT_S = 200


def test_job_with_a_worker_that_hangs_in_a_callback_restarts_and_completes(tmp_path, monkeypatch):
    """Its heartbeats continue, and the others wait for it inside of the same program."""
    monkeypatch.setenv("REPLICAX_STUCK_TIMEOUT_S", "4")
    with LaunchedJob(tmp_path, getting_stuck, max_restarts=1) as job:
        assert job.wait(LIMIT_S) == 0, job.text()
    assert sorted(job.printed("total")) == [("worker 0", "2.0"), ("worker 1", "2.0")]
    text = job.text(1000)
    assert "which all tasks have reached, and which does not end: worker 1 is in its program number" in text
    assert "in read_a_sensor" in text
    assert "It fails after 4 s (REPLICAX_STUCK_TIMEOUT_S)" in text
    assert text.count("Starting all tasks again") == 1


@pytest.mark.long
def test_job_with_a_worker_that_never_comes_to_a_step_restarts_and_completes(tmp_path):
    """Its heartbeats continue; the others do not wait for it for ever."""
    with LaunchedJob(tmp_path, staying_away, max_restarts=1) as job:
        assert job.wait(LIMIT_S) == 0, job.text()
    assert sorted(job.printed("total")) == [("worker 0", "2.0"), ("worker 1", "2.0")]
    text = job.text(1000)
    assert re.search(r"PeerFailureError: worker 0 has waited ([5-9]|\d\d+) s", text)
    assert "for worker 1, which has not reached it" in text
    assert "in read_a_sensor" in text
    assert text.count("Starting all tasks again") == 1
