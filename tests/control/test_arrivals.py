"""Connections of peers wait for this process to be in their epoch."""

from replicax._src.control.arrivals import Arrivals


def test_peer_that_comes_early_waits_until_its_connection_is_taken():
    arrivals = Arrivals()
    arrivals.end(1)
    assert arrivals.arrive(2, 0, "a") == arrivals.arrive(3, 0, "b") == []
    assert arrivals.missing(2, [0, 1]) == [1]
    assert arrivals.take(2, [0, 1]) == {0: "a"}
    assert arrivals.take(2, [0, 1]) == {}
    assert arrivals.end(2) == []
    assert arrivals.take(3, [0]) == {0: "b"}


def test_connection_of_an_epoch_that_has_ended_is_closed_whenever_it_comes():
    arrivals = Arrivals()
    arrivals.arrive(1, 0, "early")
    arrivals.arrive(3, 0, "next")
    assert arrivals.end(2) == ["early"]
    assert arrivals.arrive(2, 1, "late") == ["late"]
    assert arrivals.end(1) == []
    assert [arrivals.has_ended(epoch) for epoch in range(4)] == [True, True, True, False]


def test_peer_that_comes_again_replaces_its_earlier_connection():
    arrivals = Arrivals()
    assert arrivals.arrive(1, 0, "first") == []
    assert arrivals.arrive(1, 0, "second") == ["first"]
    assert arrivals.take(1, [0]) == {0: "second"}
