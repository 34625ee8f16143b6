"""The window of applied closures, compared with a plain set of numbers."""

import json

from hypothesis import given
from hypothesis import strategies as st

from replicax._ps.store.window import Window

ADDED = st.tuples(st.just("add"), st.integers(0, 9))
LOW = st.tuples(st.just("low"), st.integers(0, 4))  # most of what is added is above
EVENTS = st.lists(ADDED | ADDED | ADDED | LOW, max_size=40)


@given(EVENTS)
def test_window_equals_a_set(events):
    window, applied, low = Window(), set(), 0
    for what, number in events:
        if what == "add":
            window.add(number)
            applied.add(number)
        else:
            window.raise_low(number)
            low = max(low, number)
        assert [n in window for n in range(12)] == [n < low or n in applied for n in range(12)]
        assert window.described()["low"] == low
        first, stop = window.extent
        assert [n in window for n in range(12)][:first] == [True] * first
        assert not any(n in window for n in range(stop, 12))
        above = {n for n in applied if n >= low}
        assert len(window.described()["runs"]) == sum(n - 1 not in above for n in above)


@given(EVENTS)
def test_window_round_trips_through_json(events):
    window = Window()
    for what, number in events:
        (window.add if what == "add" else window.raise_low)(number)
    again = Window.of(json.loads(json.dumps(window.described())))
    assert again.described() == window.described()
    assert [n in again for n in range(12)] == [n in window for n in range(12)]
    again.add(10)  # it goes on as the other one does
    window.add(10)
    assert again.described() == window.described()


def test_a_slow_closure_costs_one_run():
    window = Window(low=0)
    for number in range(1, 100_000):  # number 0 has not ended
        window.add(number)
    assert len(window.described()["runs"]) == 1
    assert 0 not in window


@given(EVENTS, st.integers(0, 40), st.sets(st.integers(0, 39)))
def test_all_but_the_unfinished_closures_have_ended(events, stop, unfinished):
    window, before = Window(), Window()
    for each in (window, before):
        for what, number in events:
            (each.add if what == "add" else each.raise_low)(number)
    window.end(stop, {number for number in unfinished if number < stop})
    assert Window.of(window.described()).described() == window.described()
    for number in range(60):
        is_ended = number < stop and number not in unfinished
        assert (number in window) == (number in before or is_ended)


def test_low_water_mark_frees_lower_numbers():
    window = Window()
    for number in range(0, 1000, 2):
        window.add(number)
    assert len(window.described()["runs"]) == 500
    window.raise_low(991)
    assert len(window.described()["runs"]) == 4
    assert 991 not in window
    window.raise_low(3)
    assert window.described()["low"] == 991
