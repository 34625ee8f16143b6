"""Rows of one moment: the reports of which second a reader shows."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from replicax._src.control.moments import NUM_KEPT, next_moment, reports_of_one_moment


def reports(*moments):
    return [{"moment": moment, "steps": 150 * moment} for moment in moments]


def shown(*kept):
    return [report.get("steps") for report in reports_of_one_moment(kept)]


def test_all_show_the_newest_second_that_all_have_reported():
    assert shown(reports(7, 8), reports(6, 7), reports(6, 7, 8)) == [150 * 7] * 3


def test_member_without_that_second_shows_its_newest_report_and_delays_no_other():
    silent, late, absent = reports(1, 2), reports(7), []
    assert shown(reports(7, 8), reports(7, 8), silent, late, absent) == [150 * 7] * 2 + [300, 1050, None]
    assert shown(reports(7, 8), reports(7, 8), silent, absent) == [150 * 8] * 2 + [300, None]


def test_reports_without_a_moment_are_shown_as_they_are():
    assert reports_of_one_moment([[{"steps": 1}, {"steps": 2}], []]) == [{"steps": 2}, {}]


@given(st.lists(st.integers(0, NUM_KEPT - 2), min_size=1, max_size=64), st.integers(10, 20))
def test_members_that_report_each_second_show_the_same_one_however_late_they_are(delays, now):
    kept = [reports(*range(now - delay - NUM_KEPT + 1, now - delay + 1)) for delay in delays]
    assert len(set(shown(*kept))) == 1


def test_reports_follow_the_full_seconds_of_the_clock():
    now, moments = 12.3, []
    for late_s in itertools.islice(itertools.cycle([0.0, 0.2, 0.4]), 30):
        moment, wait_s = next_moment(now)
        moments.append(moment)
        now += wait_s + late_s
    assert moments == list(range(12, 42))
