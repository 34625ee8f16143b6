"""An agreement of a thousand members is cheap."""

import pytest

from simulation.agreement import cost


def test_agreement_needs_three_messages_for_each_member_and_four_latencies():
    for number in (10, 100):
        found = cost(number)
        assert found.num_messages == 3 * (number - 1)  # end, report, form
        assert found.virtual_s == pytest.approx(0.004)


def test_a_thousand_members_agree_within_a_second():
    found = cost(1000)
    assert found.num_messages == 3 * 999
    assert found.virtual_s + found.cpu_s < 1.0
