"""The smallest runs are right in every order of events."""

import pytest

from simulation.all_orders import explore


def over(*numbers, **others):
    return tuple((number, others.get(f"of_{number}", "over")) for number in numbers)


@pytest.mark.parametrize(
    ("num_members", "num_steps", "num_kills", "num_cuts", "num_endings"),
    [
        (2, 2, 0, 0, 1),
        (2, 2, 1, 0, 5),
        (2, 1, 0, 1, 1),
        pytest.param(2, 2, 0, 1, 1, marks=pytest.mark.long),
        pytest.param(2, 1, 1, 1, 5, marks=pytest.mark.long),
    ],
)
def test_every_order_ends_well(num_members, num_steps, num_kills, num_cuts, num_endings):
    num_states, endings = explore(num_members, num_steps, num_kills, num_cuts)
    assert num_states > 100
    assert len(endings) == num_endings
    assert over(0, 1) in endings
    if num_kills:
        assert over(0, 1, of_0="killed") in endings
        assert over(0, 1, of_1="killed") in endings
