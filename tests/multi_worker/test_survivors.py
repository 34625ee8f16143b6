"""Real workers with ``fault_tolerance``: some die in the middle, and the others end with the same bits."""

import inspect
import re

import pytest

import fits_with_deaths
from checks import path_of_programs
from replicax._testing.fixtures import is_there
from replicax.testing import LocalCluster

pytestmark = pytest.mark.timeout(200)


def results_of(program, *args, workers=3):
    source = f"{inspect.getsource(program)}\n\n{program.__name__}(*{args!r})\n"
    environment = {"KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs()}
    with LocalCluster(workers, environment=environment, timeout_s=170) as cluster:
        cluster.start(source)
        results = cluster.wait()
    assert not [pid for pid in cluster.pids if is_there(pid)]
    return results


DEATHS = {
    "the chief in a step": ("arrays", (0, 7)),
    "in validation, a second one in evaluation": ("arrays", (2, 6), (0, 23)),
    "two at once": ("dataset", (0, 8), (1, 8)),
    "in evaluation, after a generator": ("generator", (1, 7)),
}
QUICK, REST = "the chief in a step", "in evaluation, after a generator"


@pytest.mark.parametrize(
    "name",
    [
        QUICK,
        pytest.param(REST, marks=pytest.mark.rest),
        *(pytest.param(n, marks=pytest.mark.long) for n in DEATHS if n not in (QUICK, REST)),
    ],
)
def test_survivors_end_with_the_bits_of_an_undisturbed_training(name):
    data, *deaths = DEATHS[name]
    results = results_of(fits_with_deaths.fit_twice, data, *deaths)
    check_that_deaths_changed_nothing(results, deaths)
    if name == QUICK:
        shows_last_epoch = ["Epoch 3/3" in "\n".join(result.output) for result in results.values()]
        assert shows_last_epoch == [True, True, False], "the next chief shows the progress"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("deaths", "in_function"),
    [
        pytest.param([(0, 7)], False, marks=pytest.mark.long),
        ([(2, 3), (0, 12)], True),
        pytest.param([(0, 7)], True, marks=pytest.mark.long),
        pytest.param([(2, 3), (0, 12)], False, marks=pytest.mark.long),
    ],
)
def test_survivors_end_a_loop_of_their_own_with_the_same_bits(deaths, in_function, tmp_path):
    results = results_of(fits_with_deaths.loop_twice, in_function, str(tmp_path), *deaths)
    check_that_deaths_changed_nothing(results, deaths)


def check_that_deaths_changed_nothing(results, deaths):
    victims = {victim for victim, _ in deaths}
    survivors = [number for number in range(3) if number not in victims]
    reports = {number: results["worker", number].report for number in survivors}
    assert {one["undisturbed"] for one in reports.values()} == {one["disturbed"] for one in reports.values()}
    assert len({one["undisturbed"] for one in reports.values()}) == 1
    assert sorted(replica for one in reports.values() for replica in one["replicas"]) == [0, 1, 2]
    assert [one["is_chief"] for one in reports.values()] == [[True] * 2, *[[False] * 2] * (len(reports) - 1)]
    log = "\n".join(line for result in results.values() for line in result.output)  # of each chief
    for victim in victims:
        assert re.search(rf"[Ww]orker {victim} (and worker \d )?died", log), log


@pytest.mark.rest
def test_all_begin_with_the_values_of_the_chief():
    results = results_of(fits_with_deaths.fit_from_other_values)
    results.raise_if_failed()
    reports = [result.report for result in results.values()]
    assert all(report == reports[0] for report in reports)
    assert reports[0]["plain"] == 0.0
    assert all("different values (sequential" in "\n".join(result.output) for result in results.values())


@pytest.mark.rest
def test_worker_that_ends_its_program_early_is_named():
    results = results_of(fits_with_deaths.fit_and_exit_early, 1, None)
    for number in (0, 2):
        text = "\n".join(results["worker", number].output)
        assert "ProgramMismatchError" in text
        assert "worker 1: waiting to end" in text
    assert all(result.exit_code for result in results.values())


@pytest.mark.rest
@pytest.mark.parametrize("code", [0, 3])
def test_others_adopt_the_replica_of_a_worker_that_calls_sys_exit_in_fit(code):
    results = results_of(fits_with_deaths.fit_and_exit_early, 0, code)
    assert [result.exit_code for result in results.values()] == [code, 0, 0]
    replicas = [results["worker", number].report["replicas"] for number in (1, 2)]
    assert sorted(replicas[0] + replicas[1]) == [0, 1, 2]
    how = "raised an error" if code else "ended its program early"
    assert re.search(
        rf"Worker 0 {how} (in step [56]|after step 5) of ", "\n".join(results["worker", 1].output)
    )
