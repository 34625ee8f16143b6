"""Two copies lose nothing that was acknowledged, in any order of events: seeds of the simulated world."""

import pytest

from ps_simulation.copies import Copies
from simulation import runs


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_what_two_servers_acknowledge_is_counted_once_whatever_fails(first):
    failed, outcomes = runs.first_failure(Copies, range(first, first + 50))
    assert failed is None, runs.report(Copies, failed)
    assert outcomes["counted"] > 30


def test_run_repeats_from_its_seed():
    one, other = (runs.run(Copies, 36, is_traced=True) for _ in range(2))
    assert len(one.trace) > 1000
    assert one.trace == other.trace
