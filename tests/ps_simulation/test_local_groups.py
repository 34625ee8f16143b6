"""Each row of groups that train alone counts once, or is named as lost: seeds of the simulated world."""

from ps_simulation.local_groups import LocalGroups
from ps_simulation.logged_groups import LoggedGroups
from simulation import runs


def test_progress_of_each_row_is_merged_once_or_named_as_lost_whatever_fails():
    failed, outcomes = runs.first_failure(LocalGroups, range(300))
    assert failed is None, runs.report(LocalGroups, failed)
    assert outcomes["merged"] > 280


def test_logs_of_groups_say_which_pushes_each_round_has_whatever_fails():
    failed, outcomes = runs.first_failure(LoggedGroups, (*range(200, 230), *range(310, 325)))
    assert failed is None, runs.report(LoggedGroups, failed)
    assert outcomes["merged"] > 30


def test_run_repeats_from_its_seed():
    one, other = (runs.run(LocalGroups, 1, is_traced=True) for _ in range(2))
    assert len(one.trace) > 1000
    assert one.trace == other.trace
