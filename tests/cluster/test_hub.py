"""The rules of the control channel, without sockets or clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.cluster.hub import Hub

NAMES = ["worker 0", "worker 1", "worker 2"]


def hub_with(*present, **options):
    hub = Hub(NAMES, **options)
    for number in present:
        assert hub.join(number, now=0.0) is None
    return hub


def offer(key, value, position=None):
    return {"kind": "offer", "key": key, "value": value, "position": position}


def beat(position, program):
    return {"kind": "beat", "status": {"position": position, "program": program, "doing": "in"}}


def kinds(outbox):
    return [(to, message["kind"]) for to, message in outbox]


@given(st.permutations(range(3)), st.lists(st.integers(), min_size=3, max_size=3))
def test_all_are_told_all_values_when_the_last_has_offered(order, values):
    hub = hub_with(0, 1, 2)
    for number in order[:-1]:
        assert hub.receive(number, offer("k", values[number]), now=1.0) == []
    outbox = hub.receive(order[-1], offer("k", values[order[-1]]), now=1.0)
    assert sorted(to for to, _ in outbox) == [0, 1, 2]
    assert all(message == {"kind": "gathered", "key": "k", "values": values} for _, message in outbox)


def test_gatherings_do_not_mix():
    hub = hub_with(0, 1, 2)
    for number in range(3):
        hub.receive(number, offer("a", number), now=0.0)
    for number in range(2):
        assert hub.receive(number, offer("b", number), now=0.0) == []
    assert kinds(hub.receive(2, offer("b", 2), now=0.0)) == [(n, "gathered") for n in range(3)]


def test_who_waits_is_told_for_whom():
    hub = hub_with(0, 2, reminder_s=10.0)
    hub.receive(0, offer("start", "x"), now=0.0)
    hub.receive(2, beat(4, "#1 step"), now=0.0)
    assert "reminder" not in dict(kinds(hub.tick(now=9.0))).values()
    reminders = [(to, m) for to, m in hub.tick(now=10.0) if m["kind"] == "reminder"]
    ((to, message),) = reminders
    assert to == 0
    assert message["missing"] == [1, 2]
    assert [number for number, _ in message["statuses"]] == [2]  # of who has not come nothing is known


@pytest.mark.parametrize(
    ("how", "go"),
    [
        ("died", lambda hub: hub.disconnect(1)),
        ("left", lambda hub: hub.receive(1, {"kind": "left"}, now=1.0)),
        ("raised", lambda hub: hub.receive(1, {"kind": "raised", "text": "ValueError: x"}, now=1.0)),
    ],
)
def test_all_others_hear_who_is_gone_and_how_once(how, go):
    hub = hub_with(0, 1, 2)
    hub.receive(1, beat(7, "#0 step"), now=0.5)
    outbox = go(hub)
    assert [to for to, _ in outbox] == [0, 2]
    assert all((m["kind"], m["member"], m["how"]) == ("gone", 1, how) for _, m in outbox)
    assert outbox[0][1]["status"]["position"] == 7
    assert hub.disconnect(1) == []  # its connection ends afterwards
    assert hub.receive(1, offer("k", 1), now=2.0) == []


def test_who_is_silent_is_gone():
    hub = hub_with(0, 1, silence_s=60.0)
    hub.receive(0, beat(0, "#0 step"), now=50.0)
    assert kinds(hub.tick(now=60.0)) == [(0, "pulse"), (1, "pulse")]
    outbox = hub.tick(now=61.0)
    assert (0, "gone") in kinds(outbox)
    gone = next(m for _, m in outbox if m["kind"] == "gone")
    assert (gone["member"], gone["how"], gone["text"]) == (1, "silent", "61")


def test_a_task_is_one_process_and_comes_once():
    hub = hub_with(0, 1)
    assert "another process is worker 1 already" in hub.join(1, now=1.0)
    hub.disconnect(1)
    assert "started again as a whole" in hub.join(1, now=2.0)


def test_the_end():
    hub = hub_with()
    assert not hub.is_over  # nobody has come yet
    hub.join(0, now=0.0)
    hub.join(2, now=0.0)
    hub.receive(0, {"kind": "left"}, now=1.0)
    assert not hub.is_over
    hub.disconnect(2)
    assert hub.is_over


# --- programs ------------------------------------------------------------------------------------------


def test_the_same_programs_in_the_same_order_are_no_mismatch():
    hub = hub_with(0, 1)
    for position in range(3):
        for number in (0, 1):
            assert hub.receive(number, beat(position, f"#{position} p"), now=0.0) == []


def test_one_that_is_ahead_is_no_mismatch():
    hub = hub_with(0, 1)
    hub.receive(0, beat(5, "#1 evaluate"), now=0.0)
    assert hub.receive(1, beat(4, "#0 train"), now=0.0) == []


def test_different_programs_at_one_position_are_a_mismatch_that_all_hear_of_once():
    hub = hub_with(0, 1, 2)
    hub.receive(0, beat(5, "#1 evaluate"), now=0.0)
    outbox = hub.receive(1, beat(5, "#0 train"), now=0.0)
    assert kinds(outbox) == [(n, "mismatch") for n in range(3)]
    assert [status["program"] for _, status in outbox[0][1]["statuses"]] == ["#1 evaluate", "#0 train"]
    assert hub.receive(2, beat(5, "#0 train"), now=0.0) == []


def test_before_the_first_program_nothing_is_compared():
    hub = hub_with(0, 1)
    nothing = {"kind": "beat", "status": {"position": -1, "program": None, "doing": "starting"}}
    hub.receive(0, nothing, now=0.0)
    assert hub.receive(1, nothing, now=0.0) == []


@pytest.mark.parametrize("is_past_first", [True, False])
def test_a_new_program_of_one_where_another_runs_a_known_one(is_past_first):
    """It waits for the other to agree, and the other for it, in a collective."""
    hub = hub_with(0, 1)
    agreement = offer("program 1", ["digest", "g", 5], position=5)
    if is_past_first:
        hub.receive(1, beat(5, "#0 f"), now=0.0)
        outbox = hub.receive(0, agreement, now=0.0)
    else:
        assert hub.receive(0, agreement, now=0.0) == []
        outbox = hub.receive(1, beat(5, "#0 f"), now=0.0)
    assert kinds(outbox) == [(0, "mismatch"), (1, "mismatch")]
    assert dict(outbox[0][1]["statuses"][0][1])["next"] == [5, "g"]


def test_one_that_has_not_come_to_the_agreement_yet_is_no_mismatch():
    hub = hub_with(0, 1)
    hub.receive(1, beat(4, "#0 f"), now=0.0)
    assert hub.receive(0, offer("program 1", ["d", "g", 5], position=5), now=0.0) == []
