"""The rules of the control channel, without sockets or clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.cluster.controller import Controller
from replicax._src.cluster.failures import of_gone, of_timeout

NAMES = ["worker 0", "worker 1", "worker 2"]


def controller_with(*present, **options):
    controller = Controller(NAMES, **options)
    for number in present:
        assert controller.join(number, now=0.0) is None
    return controller


def offer(key, value, position=None):
    """An offer; with a position also the member's status, as if it had run this program until now."""
    if position is None:
        return {"kind": "offer", "key": key, "value": value}
    status = heartbeat(position - 1, "#0 f" if position else None, "between")["status"]
    purpose = {"program": value[1]} if isinstance(value, list) else {"what": f"to agree on {value}"}
    return {**offer(key, value), "position": position, "purpose": purpose, "status": status}


def heartbeat(position, program, doing="in", **more):
    return {"kind": "heartbeat", "status": {"position": position, "program": program, "doing": doing, **more}}


def left(position, **more):
    return {**heartbeat(position, "#0 step", "between"), "kind": "left", **more}


def kinds(outbox):
    return [(to, message["kind"]) for to, message in outbox]


@given(st.permutations(range(3)), st.lists(st.integers(), min_size=3, max_size=3))
def test_all_members_get_all_values_after_the_last_offer(order, values):
    controller = controller_with(0, 1, 2)
    for number in order[:-1]:
        assert controller.receive(number, offer("k", values[number]), now=1.0) == []
    outbox = controller.receive(order[-1], offer("k", values[order[-1]]), now=1.0)
    assert sorted(to for to, _ in outbox) == [0, 1, 2]
    assert all(message == {"kind": "gathered", "key": "k", "values": values} for _, message in outbox)


def test_all_gathers_do_not_mix():
    controller = controller_with(0, 1, 2)
    for number in range(3):
        controller.receive(number, offer("a", number), now=0.0)
    for number in range(2):
        assert controller.receive(number, offer("b", number), now=0.0) == []
    assert kinds(controller.receive(2, offer("b", 2), now=0.0)) == [(n, "gathered") for n in range(3)]


def test_waiting_member_is_told_the_missing_ones():
    controller = controller_with(0, 2)
    controller.receive(0, offer("start", "x"), now=0.0)
    controller.receive(2, heartbeat(4, "#1 step"), now=0.0)
    reminders = [(to, m) for to, m in controller.tick(now=10.0) if m["kind"] == "reminder"]
    ((to, message),) = reminders
    assert to == 0
    assert [number for number, _ in message["missing"]] == [1, 2]
    of_one, of_two = [status for _, status in message["missing"]]
    assert of_one is None  # of who has not come nothing is known
    assert of_two["program"] == "#1 step"
    assert message["twins"] == []
    assert "already worker 2" in controller.join(2, now=11.0).text
    controller.note_twin(0)
    (message,) = [m for _, m in controller.tick(now=12.0) if m["kind"] == "reminder"]
    assert message["twins"] == [0, 2]


@pytest.mark.parametrize(
    ("how", "go"),
    [
        ("died", lambda controller: controller.disconnect(1, now=1.0)),
        ("left", lambda controller: controller.receive(1, left(7), now=1.0)),
        (
            "raised",
            lambda controller: controller.receive(1, left(7, kind="raised", text="ValueError: x"), now=1.0),
        ),
        (
            "gave_up",
            lambda controller: controller.receive(1, left(7, kind="gave_up", text="no worker 2"), now=1.0),
        ),
    ],
)
def test_all_others_hear_once_which_member_is_lost_and_how(how, go):
    controller = controller_with(0, 1, 2)
    controller.receive(1, heartbeat(7, "#0 step"), now=0.5)
    outbox = go(controller)
    assert [to for to, _ in outbox] == [0, 2]
    assert all((m["kind"], m["member"], m["how"]) == ("gone", 1, how) for _, m in outbox)
    assert outbox[0][1]["status"]["position"] == 7
    assert controller.disconnect(1, now=1.0) == []  # its connection ends afterwards
    assert controller.receive(1, offer("k", 1), now=2.0) == []


def test_reason_of_a_member_that_gave_up_is_passed_on_and_its_end_is_not_a_normal_one():
    """It waits for worker 2, which has not come, and then leaves."""
    controller = controller_with(0, 1)
    controller.receive(0, offer("start", "x"), now=1.0)
    outbox = controller.receive(0, left(-1, kind="gave_up", text="worker 2 has not come"), now=12.0)
    ((to, message),) = outbox
    assert (to, message["how"], message["text"]) == (1, "gave_up", "worker 2 has not come")
    error = of_gone(NAMES, 0, message["how"], message["text"], message["status"])
    assert "worker 0 gave up" in str(error)
    assert "worker 2 has not come" in str(error)
    assert controller.receive(0, left(-1), now=12.1) == []
    refusal = controller.join(2, now=13.0)
    assert refusal.is_temporary
    assert "worker 0 has been here before, and gave up waiting" in refusal.text


def test_leaving_member_reports_its_position():
    """Its last heartbeat may be a second old."""
    controller = controller_with(0, 1)
    for number in (0, 1):
        controller.receive(number, offer("program 0", ["digest", "step", 3], position=3), now=0.0)
    controller.receive(1, heartbeat(3, "#0 step"), now=0.0)
    ((_, message),) = controller.receive(1, left(500), now=0.9)
    assert (message["status"]["position"], message["status"]["doing"]) == (500, "between")
    assert "next" not in message["status"]  # it has come to what was agreed
    controller = controller_with(0, 1)
    controller.receive(0, heartbeat(5, "#1 other"), now=0.0)
    assert kinds(controller.receive(1, left(5), now=0.0))[:2] == [(0, "mismatch"), (1, "mismatch")]


def test_silent_member_is_lost():
    controller = controller_with(0, 1, silence_s=60.0)
    controller.receive(0, heartbeat(0, "#0 step"), now=50.0)
    assert kinds(controller.tick(now=60.0)) == [(0, "pulse"), (1, "pulse")]
    outbox = controller.tick(now=61.0)
    assert (0, "gone") in kinds(outbox)
    gone = next(m for _, m in outbox if m["kind"] == "gone")
    assert (gone["member"], gone["how"], gone["text"]) == (1, "silent", "61")


def test_task_is_one_process_and_joins_once():
    controller = controller_with(0, 1)
    refusal = controller.join(1, now=1.0)
    assert "another process is already worker 1" in refusal.text
    assert not refusal.is_temporary
    assert not controller.is_broken
    controller.disconnect(1, now=1.0)
    for number in (1, 2):  # worker 2 has not been here, and could only wait for nothing
        refusal = controller.join(number, now=2.0)
        assert "worker 1 has been here before" in refusal.text
        assert refusal.is_temporary
    assert controller.is_broken


def test_the_end():
    controller = controller_with()
    assert not controller.is_over  # nobody has come yet
    controller.join(0, now=0.0)
    controller.join(2, now=0.0)
    controller.receive(0, left(0), now=1.0)
    assert not controller.is_over
    controller.disconnect(2, now=1.0)
    assert controller.is_over


# --- programs ------------------------------------------------------------------------------------------


def test_the_same_programs_in_the_same_order_are_no_mismatch():
    controller = controller_with(0, 1)
    for position in range(3):
        for number in (0, 1):
            assert controller.receive(number, heartbeat(position, f"#{position} p"), now=0.0) == []


def test_member_that_is_ahead_is_no_mismatch():
    controller = controller_with(0, 1)
    controller.receive(0, heartbeat(5, "#1 evaluate"), now=0.0)
    assert controller.receive(1, heartbeat(4, "#0 train"), now=0.0) == []


def test_different_programs_at_one_position_are_reported_once_to_all():
    controller = controller_with(0, 1, 2)
    controller.receive(0, heartbeat(5, "#1 evaluate"), now=0.0)
    outbox = controller.receive(1, heartbeat(5, "#0 train"), now=0.0)
    assert kinds(outbox) == [(n, "mismatch") for n in range(3)]
    assert [status["program"] for _, status in outbox[0][1]["statuses"]] == ["#1 evaluate", "#0 train"]
    assert controller.receive(2, heartbeat(5, "#0 train"), now=0.0) == []


def test_before_the_first_program_nothing_is_compared():
    controller = controller_with(0, 1)
    nothing = {"kind": "heartbeat", "status": {"position": -1, "program": None, "doing": "starting"}}
    controller.receive(0, nothing, now=0.0)
    assert controller.receive(1, nothing, now=0.0) == []


@pytest.mark.parametrize("is_past_first", [True, False])
def test_new_program_of_one_member_against_a_known_one_is_a_mismatch(is_past_first):
    """Each waits for the other: one to agree, the other in a collective."""
    controller = controller_with(0, 1)
    agreement = offer("program 1", ["digest", "g", 5], position=5)
    if is_past_first:
        controller.receive(1, heartbeat(5, "#0 f"), now=0.0)
        outbox = controller.receive(0, agreement, now=0.0)
    else:
        assert controller.receive(0, agreement, now=0.0) == []
        outbox = controller.receive(1, heartbeat(5, "#0 f"), now=0.0)
    assert kinds(outbox) == [(0, "mismatch"), (1, "mismatch")]
    assert dict(outbox[0][1]["statuses"][0][1])["next"] == [5, {"program": "g"}]


def test_members_that_wait_at_different_positions_before_one_program():
    controller = controller_with(0, 1, 2)
    assert controller.receive(0, offer("comparing 0", "x", position=4), now=0.0) == []
    assert controller.receive(1, offer("other", "y"), now=0.0) == []  # of another thread
    outbox = controller.receive(2, offer("program 3", ["d", "step"], position=4), now=0.0)
    assert kinds(outbox) == [(n, "mismatch") for n in range(3)]
    told = dict(outbox[0][1]["statuses"])
    assert [told[n]["next"][1] for n in (0, 2)] == [{"what": "to agree on x"}, {"program": "step"}]


def test_member_that_has_not_reached_the_agreement_is_no_mismatch():
    controller = controller_with(0, 1)
    controller.receive(1, heartbeat(4, "#0 f"), now=0.0)
    assert controller.receive(0, offer("program 1", ["d", "g", 5], position=5), now=0.0) == []


def test_positions_without_a_heartbeat_are_compared_too():
    """A heartbeat is sent when the program changes, so the programs between two heartbeats are known."""
    controller = controller_with(0, 1)
    for number in (0, 1):
        assert controller.receive(number, heartbeat(0, "#0 f"), now=0.0) == []
    assert controller.receive(0, heartbeat(7, "#1 g"), now=1.0) == []
    assert controller.receive(0, heartbeat(8, "#0 f"), now=1.0) == []
    assert controller.receive(1, heartbeat(6, "#0 f"), now=1.0) == []
    outbox = controller.receive(1, heartbeat(20, "#0 f"), now=2.0)  # f at 7 too
    assert kinds(outbox) == [(0, "mismatch"), (1, "mismatch")]
    at = [(number, status["position"], status["program"]) for number, status in outbox[0][1]["statuses"]]
    assert at == [(0, 7, "#1 g"), (1, 7, "#0 f")]


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=12), st.data())
def test_equal_runs_match_and_one_difference_is_a_mismatch(programs, data):
    """The result does not depend on the order of heartbeats."""
    changed = data.draw(st.one_of(st.none(), st.integers(0, len(programs) - 1)))
    other = ["c" if position == changed else program for position, program in enumerate(programs)]
    controller, todo, found = controller_with(0, 1), {}, []
    for number, its in enumerate((programs, other)):
        is_told = [its[p] != its[p - 1] or p == 0 or p == len(its) - 1 for p in range(len(its))]
        todo[number] = [heartbeat(p, program) for p, program in enumerate(its) if is_told[p]]
    while any(todo.values()):
        number = data.draw(st.sampled_from([n for n in todo if todo[n]]))
        found += controller.receive(number, todo[number].pop(0), now=0.0)
    assert kinds(found) == ([] if changed is None else [(0, "mismatch"), (1, "mismatch")])
    if changed is not None:
        assert {status["position"] for _, status in found[0][1]["statuses"]} == {changed}


def test_overtaken_heartbeat_is_ignored():
    controller = controller_with(0, 1)
    for number in (0, 1):
        controller.receive(number, heartbeat(4, "#0 f"), now=0.0)
        controller.receive(number, heartbeat(5, "#1 g"), now=0.0)
    assert controller.receive(0, heartbeat(4, "#0 f", "between"), now=0.0) == []
    assert controller.receive(0, heartbeat(6, "#1 g"), now=0.0) == []
    assert controller.receive(1, heartbeat(6, "#1 g"), now=0.0) == []


def test_compared_positions_are_forgotten():
    controller = controller_with(0, 1)
    for position in range(1000):
        for number in (0, 1):
            assert controller.receive(number, heartbeat(position, f"#{position % 2} f"), now=0.0) == []
    assert all(len(member.runs) <= 2 for member in controller._members if member.is_here)


# --- stalls --------------------------------------------------------------------------------------------


def controller_of_one_that_waits(**options):
    """Worker 0 waits in program 3 since 100.0; worker 1 has been behind since 98.0, and sends heartbeats."""
    controller = controller_with(0, 1, **options)
    for number in (0, 1):
        controller.receive(number, heartbeat(2, "#0 f"), now=97.0)
    controller.receive(1, heartbeat(2, "#0 f", "between", at="train.py:7 in load"), now=98.0)
    controller.receive(0, heartbeat(3, "#0 f"), now=100.0)
    return controller


def told_at(controller, now, position=2):
    """The messages at a time at which both send heartbeats."""
    controller.receive(0, heartbeat(3, "#0 f"), now=now)
    controller.receive(1, heartbeat(position, "#0 f", "between", at="train.py:7 in load"), now=now)
    return [(to, message) for to, message in controller.tick(now) if message["kind"] != "pulse"]


def test_member_that_waits_in_a_program_is_told_at_growing_intervals():
    controller = controller_of_one_that_waits(stall_s=60.0, timeout_s=600.0)
    told = [
        now - 100 for now in range(101, 690) for to, m in told_at(controller, now) if m["kind"] == "stalled"
    ]
    assert told == [60, 120, 240, 480]
    controller = controller_of_one_that_waits()
    assert told_at(controller, 159.0) == []
    ((to, message),) = told_at(controller, 160.0)
    assert (to, message["waited_s"], message["limit_s"]) == (0, 60, 600)
    assert message["waiting"][0] == 0
    ((late, status),) = message["named"]
    assert (late, status["for_s"], status["at"]) == (1, 62, "train.py:7 in load")
    assert "silent_s" not in status


def test_after_the_timeout_all_members_are_told_once():
    controller = controller_of_one_that_waits(timeout_s=20.0)
    assert told_at(controller, 119.0) == []
    outbox = told_at(controller, 120.0)
    assert kinds(outbox) == [(0, "timeout"), (1, "timeout")]
    assert [number for number, _ in outbox[0][1]["named"]] == [1]
    assert told_at(controller, 121.0) == []


def test_late_member_gets_a_full_wait_the_next_time():
    controller = controller_of_one_that_waits()
    assert [m["kind"] for _, m in told_at(controller, 170.0)] == ["stalled"]
    controller.receive(1, heartbeat(3, "#0 f"), now=171.0)
    controller.receive(0, heartbeat(4, "#0 f"), now=172.0)
    controller.receive(1, heartbeat(3, "#0 f", "between"), now=172.0)
    assert "stalled" not in dict(kinds(controller.tick(now=220.0))).values()
    assert (0, "stalled") in kinds(controller.tick(now=232.0))


def told_of_stuck(controller, now):
    """All but the pulses, when the program that all have reached does not end."""
    return [(to, message) for to, message in controller.tick(now) if message["kind"] != "pulse"]


def stuck(**of_member_1):
    """All members run their third program from the start on."""
    controller = controller_with(0, 1, 2, silence_s=10_000.0, stuck_s=1800.0)
    for number in (0, 1, 2):
        controller.receive(number, heartbeat(3, "#0 f", **(of_member_1 if number == 1 else {})), now=0.0)
    return controller


def test_program_that_all_have_reached_has_a_limit_of_its_own():
    """It may compile, or loop over many steps: it is no failure after ``timeout_s``."""
    controller = stuck()
    assert told_of_stuck(controller, 899.0) == []
    told = told_of_stuck(controller, 900.0)
    assert kinds(told) == [(number, "stalled") for number in range(3)]
    assert [(m["waited_s"], m["limit_s"], m["is_stuck"]) for _, m in told] == [(900, 1800, True)] * 3
    assert told_of_stuck(controller, 1799.0) == []
    told = told_of_stuck(controller, 1800.0)
    assert kinds(told) == [(number, "timeout") for number in range(3)]
    assert [number for number, _ in told[0][1]["named"]] == [0, 1, 2], "any of them may be the cause"
    assert told_of_stuck(controller, 1900.0) == []


def test_program_is_stuck_from_when_the_last_member_has_come():
    """The others waited for it before. Their next heartbeats come after that of the late one."""
    controller = controller_with(0, 1, silence_s=10_000.0, timeout_s=5000.0, stuck_s=1800.0)
    controller.receive(0, heartbeat(3, "#0 f"), now=0.0)
    controller.receive(1, heartbeat(2, "#0 f", "between"), now=0.0)
    assert [m["waited_s"] for _, m in told_of_stuck(controller, 2400.0)] == [2400], "it waits, and is told so"
    controller.receive(1, heartbeat(4, "#0 f"), now=2400.5)
    assert told_of_stuck(controller, 2401.0) == []
    assert (0, 900) in [(to, m["waited_s"]) for to, m in told_of_stuck(controller, 3300.0)]
    assert "timeout" not in dict(kinds(told_of_stuck(controller, 4199.0))).values()
    assert (0, "timeout") in kinds(told_of_stuck(controller, 4200.0))


def test_member_in_a_callback_is_the_one_that_is_stuck():
    ((_, message), *_) = told_of_stuck(stuck(callback="train.py:7 in read"), 1800.0)
    ((number, status),) = message["named"]
    assert (number, status["callback"]) == (1, "train.py:7 in read")
    error = str(of_timeout(NAMES, message))
    assert (
        "which all tasks have reached, and which does not end: worker 1 is in its program number 3" in error
    )
    assert "running the callback train.py:7 in read" in error
    assert "REPLICAX_STUCK_TIMEOUT_S" in error


def test_member_that_has_finished_the_program_is_not_stuck():
    controller = stuck()
    controller.receive(2, heartbeat(3, "#0 f", "between"), now=1.0)
    ((_, message), *_) = told_of_stuck(controller, 1800.0)
    assert [number for number, _ in message["named"]] == [0, 1]


def test_figures_go_to_the_member_that_watches():
    controller = controller_with(0, 1, stall_s=60.0)
    told = {**heartbeat(3, "#0 step"), "figures": {"steps": 7}}
    controller.receive(1, told, now=0.0)
    assert "figures" not in dict(kinds(controller.tick(now=0.0))).values()
    controller.receive(0, {"kind": "watch"}, now=0.0)

    def shown(now):
        ((to, message),) = [pair for pair in controller.tick(now) if pair[1]["kind"] == "figures"]
        assert to == 0
        return message["tasks"]

    assert shown(1.0) == [
        {"task": "worker 0", "state": "starting", "function": None},
        {"task": "worker 1", "state": "running", "function": "step", "steps": 7},
        {"task": "worker 2", "state": "awaited"},
    ]
    controller.receive(0, heartbeat(3, "#0 step"), now=1.0)
    assert [task["state"] for task in shown(7.0)] == ["silent", "silent", "awaited"]
    controller.receive(1, heartbeat(3, "#0 step"), now=65.0)
    controller.disconnect(0, now=65.0)
    controller.receive(1, {"kind": "watch"}, now=65.0)
    ((_, message),) = [pair for pair in controller.tick(66.0) if pair[1]["kind"] == "figures"]
    assert message["tasks"][0] == {"task": "worker 0", "state": "lost"}
    assert message["tasks"][1]["state"] == "stalled"


def test_watcher_gets_figures_of_one_moment():
    controller = controller_with(0, 1, 2)
    controller.receive(0, {"kind": "watch"}, now=0.0)
    for moment, members in ((5, (0, 1, 2)), (6, (0, 2))):
        for number in members:
            told = {**heartbeat(3, "#0 step"), "figures": {"steps": 150 * moment + number, "moment": moment}}
            controller.receive(number, told, now=float(moment))
    ((_, message),) = [pair for pair in controller.tick(6.0) if pair[1]["kind"] == "figures"]
    assert [task["steps"] for task in message["tasks"]] == [750, 751, 752]


def test_no_member_waits_between_programs():
    """The chief writes a checkpoint, for example, and the others are at its position."""
    controller = controller_with(0, 1, silence_s=10_000.0)
    for number in (0, 1):
        controller.receive(number, heartbeat(2, "#0 f", "between"), now=0.0)
    assert kinds(controller.tick(now=5000.0)) == [(0, "pulse"), (1, "pulse")]


def test_missing_heartbeats_are_reported_too():
    controller = controller_of_one_that_waits(stall_s=10.0, silence_s=60.0)
    controller.receive(0, heartbeat(3, "#0 f"), now=110.0)
    ((_, message),) = [pair for pair in controller.tick(now=110.0) if pair[1]["kind"] == "stalled"]
    assert message["named"][0][1]["silent_s"] == 12


def test_lost_member_is_not_waited_for():
    controller = controller_of_one_that_waits(stall_s=10.0)
    controller.disconnect(1, now=105.0)
    assert kinds(controller.tick(now=150.0)) == [(0, "pulse")]


def test_failure_before_joining_is_told_to_present_and_later_members():
    controller = controller_with(0)
    assert [(to, m["how"], m["text"]) for to, m in controller.fail(1, "code 3")] == [(0, "failed", "code 3")]
    refusal = controller.join(2, now=1.0)
    assert not refusal.is_temporary
    assert "worker 1 ended before all had joined: code 3" in refusal.text
    assert controller.join(1, now=1.0).is_temporary  # it was started again: the next run is waited for


def test_failure_of_a_joined_task_is_not_reported_by_others():
    controller = controller_with(0, 1)
    assert controller.fail(1, "code 3") == []
    assert controller.join(2, now=1.0) is None
