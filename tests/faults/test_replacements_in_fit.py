"""Replacements of killed workers, with real processes: they enter a ``fit`` or a loop where they are told, and all end
with the bits of an undisturbed run."""

import pytest

import replaced_workers
from launched_jobs import LaunchedJob

SOON_S = 300
WORKERS = 3

FIT, LOOP = replaced_workers.replaced_fit, replaced_workers.replaced_loop


def run(folder, program, arguments="", max_restarts=9):
    """The job, after it has ended with success."""
    with LaunchedJob(folder, program, arguments, workers=WORKERS, max_restarts=max_restarts) as job:
        assert job.wait(SOON_S) == 0, job.text(200)
    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns what all workers print, by the program and its arguments, if nobody dies."""
    known = {}

    def ends_of(program, arguments):
        key = program, arguments
        if key not in known:
            known[key] = ends(run(tmp_path_factory.mktemp("undisturbed"), program, arguments))
        return known[key]

    return ends_of


def ends(job):
    """What all workers print at the end, which must be equal."""
    of_all = {}
    for word in ("bits", "epochs", "steps", "saved"):
        for task, text in job.printed(word):
            of_all.setdefault(task, {})[word] = text
    assert set(of_all) == {f"worker {number}" for number in range(WORKERS)}, job.text(200)
    (first, *others) = of_all.values()
    assert all(other == first for other in others), job.text(200)
    return first


def check(tmp_path, undisturbed, program, arguments, dies, waits):
    job = run(tmp_path, program, f"dies={dies}, waits={waits}, {arguments}")
    assert len(job.printed("dies")) == len(dies), job.text(200)
    assert ends(job) == undisturbed(program, arguments)
    assert "start again" not in job.text(200), "all have started again"
    return job


@pytest.mark.timeout(900)
def test_replacement_enters_a_fit_in_the_middle_of_an_epoch(tmp_path, undisturbed):
    check(tmp_path, undisturbed, FIT, "epochs=3", [(1, "step 3")], ["step 7"])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dies", "waits"),
    [
        ([(0, "step 2")], ["step 5"]),
        ([(0, "validation 0")], ["end 0"]),
        ([(2, "end 0")], ["step 6"]),
        ([(1, "step 2"), (0, "step 8")], ["step 4", "step 10"]),
        ([(0, "step 2"), (0, "validation 1")], ["step 4", "step 12"]),
    ],
    ids=str,
)
def test_replacements_enter_a_fit_anywhere(tmp_path, undisturbed, dies, waits):
    check(tmp_path, undisturbed, FIT, "epochs=3", dies, waits)


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_replacements_save_continuously_with_the_others(tmp_path, undisturbed):
    """They get the counts by which all decide when the next save begins."""
    dies, waits = [(1, "step 2"), (0, "step 8")], ["step 4", "step 10"]
    check(tmp_path, undisturbed, FIT, "epochs=3, save_freq='continuous'", dies, waits)


@pytest.mark.timeout(900)
def test_replacement_enters_a_loop_with_a_manager(tmp_path, undisturbed):
    check(tmp_path, undisturbed, LOOP, "epochs=3", [(0, "step 3")], ["step 5"])
