"""Tasks of `replicax launch` are killed at random moments, repeatedly: the result is bit-identical to that of an
undisturbed run."""

import re

import pytest

from launched_jobs import LaunchedJob, fitting, kill_after_saving, kill_at_random, looping

pytestmark = [pytest.mark.timeout(250), pytest.mark.rest]
SOON_S = 100
LONG_S = 5000


def counted(job):
    """The numbers of counted and uncounted restarts."""
    text = "\n".join(job.lines)
    return len(re.findall(r"restart \d+ of", text)), text.count("this restart is not counted")


def damage(folder):
    """Flips a bit in each compiled program that JAX keeps; returns their number."""
    kept = [path for path in (folder / ".compiled").rglob("*-cache") if path.is_file()]
    for path in kept:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    return len(kept)


def test_killed_tasks_resume_bit_identically(tmp_path, monkeypatch, capsys):
    """The chief and the other worker; one restart may count, and only restarts without progress do.

    Compiled programs of all tasks are kept. Damaged ones cause no failure, and only the next start compiles them
    again.
    """
    monkeypatch.delenv("REPLICAX_CACHE_DIR")  # of all tests; here programs are kept with the checkpoints
    monkeypatch.setenv("REPLICAX_CHECKPOINT_DIR", str(tmp_path / "alone"))
    looping(100, pause_s=0)
    expected = re.search(r"^bits (\w+)$", capsys.readouterr().out, re.MULTILINE)[1]
    with LaunchedJob(tmp_path, looping, "100, pause_s=0.04", max_restarts=1) as job:
        num_damaged = kill_after_saving(job, "worker 0", SOON_S, before=lambda: damage(job.saved))
        kill_after_saving(job, "worker 1", SOON_S)
        assert job.wait(SOON_S) == 0, job.text()
    assert [bits for _, bits in job.printed("bits")] == [expected, expected], job.text()
    assert counted(job) == (0, 2)
    assert num_damaged > 0
    assert "Error reading persistent compilation cache" in "\n".join(job.lines)
    assert sorted(job.printed("anew")) == [("worker 0", "0"), ("worker 1", "0")]


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_S)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("program", "arguments"), [(looping, "1100"), (fitting, "epochs=80")])
def test_fifty_kills(tmp_path, program, arguments, seed):
    """Kills come at random moments, also during the start, and more often than restarts without progress are allowed."""
    with LaunchedJob(tmp_path / "alone", program, arguments) as job:
        assert job.wait(LONG_S) == 0, job.text()
    expected = job.printed("bits") + job.printed("epoch")
    with LaunchedJob(tmp_path / "killed", program, arguments, max_restarts=40) as job:
        killed = kill_at_random(job, 50, seed=seed, timeout_s=SOON_S)
        assert job.wait(LONG_S) == 0, job.text()
    num_counted, num_others = counted(job)
    print(f"{killed}\n{num_counted} restarts were counted, {num_others} were not.")
    assert len(killed) == 50, "it has ended before: give it more steps"
    assert num_counted + num_others == 50
    assert sorted(job.printed("bits") + job.printed("epoch")) == sorted(expected), job.text()
