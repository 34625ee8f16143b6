"""The rules of the control channel, without sockets or clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.cluster.failures import gone_error, timeout_error
from replicax._src.control.controller import Controller
from replicax._src.control.dates import first_at

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
    error = gone_error(NAMES, 0, message["how"], message["text"], message["status"])
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
    error = str(timeout_error(NAMES, message))
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


# --- live members continue after a failure ------------------------------------------------------------


def tolerant(*present, **options):
    """A controller whose first epoch is formed, if all members are present."""
    controller = Controller(NAMES, **options)
    for number in present:
        assert controller.join(number, now=0.0, min_workers=1) is None
        controller.receive(number, {"kind": "report", "epoch": 0, "version": 0}, now=0.0)
    return controller


def report_of(epoch, version=0):
    return {"kind": "report", "epoch": epoch, "version": version}


def test_death_ends_the_epoch_and_nobody_is_told_that_a_member_is_gone():
    controller = tolerant(0, 1, 2)
    assert controller.epoch == 1
    assert kinds(controller.disconnect(1, now=1.0)) == [(0, "end"), (2, "end")]
    controller.receive(0, report_of(1), now=1.0)
    outbox = controller.receive(2, report_of(1), now=1.0)
    assert kinds(outbox) == [(0, "form"), (2, "form")]
    assert outbox[0][1]["gone"] == [[1, "died", ""]]
    assert not controller.is_broken


def test_all_gathers_of_the_start_complete_over_all_tasks():
    controller = Controller(NAMES)
    for number in range(3):
        assert controller.join(number, now=0.0, min_workers=1) is None
    for number in range(2):
        assert controller.receive(number, {**offer("k", number), "epoch": 0}, now=0.0) == []
    gathered = {"kind": "gathered", "key": "k", "values": [0, 1, 2], "members": [0, 1, 2]}
    assert controller.receive(2, {**offer("k", 2), "epoch": 0}, now=0.0) == [(n, gathered) for n in range(3)]
    controller.disconnect(1, now=1.0)
    assert controller.receive(0, {**offer("l", 0), "epoch": 0}, now=1.0) == [], "the run has ended"


def test_all_gathers_complete_over_the_members_of_an_epoch():
    controller = tolerant(0, 1, 2)
    for number in range(2):
        assert controller.receive(number, {**offer("k", number), "epoch": 1}, now=1.0) == []
    controller.disconnect(1, now=1.0)
    assert controller.receive(2, {**offer("k", 2), "epoch": 1}, now=1.0) == [], "that epoch has ended"
    controller.receive(0, report_of(1), now=1.0)
    controller.receive(2, report_of(1), now=1.0)
    late = {**offer("k", "old"), "epoch": 1}  # another thread has not heard of the next epoch yet
    assert controller.receive(0, late, now=1.0) == []
    assert controller.receive(2, {**offer("k", 2), "epoch": 2}, now=1.0) == []
    outbox = controller.receive(0, {**offer("k", 0), "epoch": 2}, now=1.0)
    gathered = {"kind": "gathered", "key": "k", "values": [0, 2], "members": [0, 2]}
    assert outbox == [(0, gathered), (2, gathered)]


def in_program(controller, number, position, program, now=1.0, **more):
    status = {"position": position, "program": program, "doing": "in"}
    return controller.receive(number, {"kind": "heartbeat", "status": status}, now=now, **more)


def test_programs_of_the_dead_and_of_newcomers_are_not_compared():
    controller = tolerant(0, 1, 2, stall_s=5.0, stuck_s=10.0)
    for number in range(3):
        in_program(controller, number, 4, "1 step")
    in_program(controller, 2, 5, "2 evaluate")
    controller.disconnect(2, now=1.0)
    for number in range(2):
        controller.receive(number, report_of(1), now=1.0)
    assert in_program(controller, 0, 5, "1 step") == []
    assert controller.join(2, now=1.0, min_workers=1) is None
    controller.receive(2, report_of(0, None), now=1.0, incarnation=1)
    assert in_program(controller, 2, 4, "3 restore", incarnation=1) == []
    for number in range(2):
        in_program(controller, number, 6, "1 step", now=20.0)
    assert {kind for _, kind in kinds(controller.tick(20.0))} == {"pulse"}, "a newcomer may take long"
    controller.receive(0, {**report_of(2, 6), "is_open": True}, now=20.0)
    assert (2, "form") in kinds(controller.receive(1, report_of(2, 6), now=20.0))
    assert in_program(controller, 2, 6, "1 step", now=20.0, incarnation=1) == []


def with_newcomer(version=6, **options):
    """Worker 2 has died and its replacement has entered at a version, in epoch 3."""
    controller = tolerant(0, 1, 2, **options)
    controller.disconnect(2, now=1.0)
    for number in range(2):
        controller.receive(number, report_of(1, version), now=1.0)
    assert controller.join(2, now=1.0, min_workers=1) is None
    controller.receive(2, report_of(0, None), now=1.0, incarnation=1)
    for number in range(2):
        controller.receive(number, {**report_of(2, version), "is_open": True}, now=1.0)
    assert controller.epoch == 3
    return controller


def test_replacement_is_shown_as_entering_until_it_has_entered():
    controller = tolerant(0, 1, 2)
    for number in range(2):
        in_program(controller, number, 4, "1 step")
    controller.receive(0, {"kind": "watch"}, now=1.0)

    def states():
        ((_, message),) = [pair for pair in controller.tick(2.0) if pair[1]["kind"] == "figures"]
        return [task["state"] for task in message["tasks"]]

    controller.disconnect(2, now=1.0)
    for number in range(2):
        controller.receive(number, report_of(1, 6), now=1.0)
    assert states() == ["running", "running", "lost"]
    assert controller.join(2, now=1.0, min_workers=1) is None
    in_program(controller, 2, 0, "1 restore", incarnation=1)
    assert states() == ["running", "running", "entering"]
    controller.receive(2, report_of(0, None), now=1.0, incarnation=1)
    for number in range(2):
        controller.receive(number, {**report_of(2, 6), "is_open": True}, now=1.0)
    assert states()[:2] == ["running", "running"]
    assert states()[2] in ("starting", "running")


def offer_at(date, key="k", value=0, **more):
    return {**offer(key, value), "epoch": 3, "since": date, **more}


@pytest.mark.parametrize(("date", "takes_part"), [(0, False), (6, False), (7, True), (9, True)])
def test_all_gather_completes_over_those_that_take_part_since_its_date(date, takes_part):
    controller = with_newcomer(6)
    members = [0, 1, 2] if takes_part else [0, 1]
    assert controller.receive(0, offer_at(date), now=2.0) == []
    missing = [m["missing"] for _, m in controller.tick(2.0) if m["kind"] == "reminder"]
    assert [[number for number, _ in each] for each in missing] == [members[1:]]
    if takes_part:
        assert controller.receive(1, offer_at(date), now=2.0) == []
    outbox = controller.receive(members[-1], offer_at(date), now=2.0, incarnation=int(takes_part))
    gathered = {"kind": "gathered", "key": "k", "values": [0] * len(members), "members": members}
    assert outbox == [(number, gathered) for number in members]


def test_offer_of_a_newcomer_for_an_earlier_date_does_not_count():
    controller = with_newcomer(6)
    controller.receive(0, offer_at(6), now=2.0)
    assert controller.receive(2, offer_at(6), now=2.0, incarnation=1) == []
    assert kinds(controller.receive(1, offer_at(6), now=2.0)) == [(0, "gathered"), (1, "gathered")]


def test_newcomer_is_compared_from_the_first_program_on_that_it_runs_with_the_others():
    controller = with_newcomer(6)
    newcomer = {"now": 2.0, "incarnation": 1}
    for number in range(2):
        in_program(controller, number, first_at(6), "step a", now=2.0)
        in_program(controller, number, first_at(6) + 1, "step b", now=2.0)
    alone = {"position": first_at(6) + 1, "program": "step c", "doing": "in", "is_solo": True, "reads": 9}
    assert controller.receive(2, {"kind": "heartbeat", "status": alone}, **newcomer) == []
    assert in_program(controller, 2, first_at(6) + 1, "step b", **newcomer) == []  # it has committed it
    for number in range(2):
        in_program(controller, number, first_at(7), "step a", now=2.0)
    outbox = in_program(controller, 2, first_at(7), "step c", **newcomer)
    assert kinds(outbox) == [(number, "mismatch") for number in range(3)]


def test_newcomer_passes_all_gathers_of_earlier_dates():
    controller = with_newcomer(6)
    status = {"position": first_at(7) - 1, "program": "step a", "doing": "between"}
    waits = offer_at(6, position=first_at(7), purpose={"what": "to read"}, status=status)
    assert controller.receive(0, waits, now=2.0) == []
    assert in_program(controller, 2, first_at(7), "step a", now=2.0, incarnation=1) == []
    assert controller.receive(1, waits, now=2.0) != []


def test_newcomer_waits_while_the_others_are_in_an_all_gather_of_an_earlier_date():
    controller = with_newcomer(6)
    status = {"position": first_at(7) - 1, "program": "step a", "doing": "between"}
    order = {"position": first_at(7), "purpose": {"what": "to read"}, "status": status}
    in_program(controller, 2, first_at(7) - 1, "step a", now=2.0, incarnation=1)
    assert controller.receive(0, offer_at(6, "old", **order), now=2.0) == []
    assert controller.receive(2, offer_at(7, "new", **order), now=2.0, incarnation=1) == []
    assert kinds(controller.receive(1, offer_at(6, "old", **order), now=2.0)) == [
        (0, "gathered"),
        (1, "gathered"),
    ]
    assert controller.receive(0, offer_at(7, "new", **order), now=2.0) == []
    assert controller.receive(1, offer_at(7, "other", **order), now=2.0)[0][1]["kind"] == "mismatch"


@pytest.mark.parametrize(("topic", "is_mismatch"), [("", False), ("data 1.0", False), ("data 2.0", True)])
def test_datasets_that_a_newcomer_has_opened_alone_have_no_name_to_compare(topic, is_mismatch):
    controller = with_newcomer(6)
    for number, name in ((0, "data 1.0"), (2, topic)):
        reading = {"reading": [first_at(8) - 1, first_at(8), name], "reads": first_at(8)}
        status = {"position": first_at(7), "program": "step a", "doing": "between", **reading}
        how = {"incarnation": int(number == 2)}
        outbox = controller.receive(number, {"kind": "heartbeat", "status": status}, now=2.0, **how)
    assert bool(outbox) == is_mismatch


def solo_heartbeat(controller, now, doing="between"):
    status = {"position": first_at(6), "program": "step a", "doing": doing, "is_solo": True}
    return controller.receive(2, {"kind": "heartbeat", "status": status}, now=now, incarnation=1)


def wait_in_step(controller, now):
    for number in range(2):
        in_program(controller, number, first_at(6), "step a", now=now)
    return controller.tick(now)


def test_newcomer_that_does_not_come_to_its_first_step_is_named_and_then_given_up():
    controller = with_newcomer(6, stall_s=5.0, timeout_s=20.0, silence_s=100.0)
    wait_in_step(controller, 2.0)
    solo_heartbeat(controller, 9.0)
    stalled = [m for _, m in controller.tick(9.0) if m["kind"] == "stalled"]
    assert [number for number, _ in stalled[0]["named"]] == [2]
    assert "timeout" not in {kind for _, kind in kinds(controller.tick(20.9))}, "it entered at 1.0"
    outbox = controller.tick(22.1)
    assert [(to, kind) for to, kind in kinds(outbox) if kind != "pulse"] == [
        (2, "given_up"),
        (0, "end"),
        (1, "end"),
    ]
    controller.receive(0, report_of(3, 6), now=23.0)
    forms = [m for _, m in controller.receive(1, report_of(3, 6), now=23.0) if m["kind"] == "form"]
    assert forms[0]["gone"] == [[2, "late", "20"]]


def test_newcomer_in_its_first_step_is_not_late():
    controller = with_newcomer(6, stall_s=5.0, timeout_s=20.0, silence_s=100.0)
    solo_heartbeat(controller, 3.0, "in")
    assert "given_up" not in {kind for _, kind in kinds(wait_in_step(controller, 30.0))}
    assert "given_up" not in {kind for _, kind in kinds(controller.tick(60.0))}


def test_member_that_is_late_beside_a_newcomer_ends_the_run():
    controller = with_newcomer(6, stall_s=5.0, timeout_s=20.0, silence_s=100.0)
    in_program(controller, 0, first_at(6), "step a", now=2.0)
    assert (0, "timeout") in kinds(controller.tick(30.0))


def test_another_process_may_join_in_the_place_of_a_dead_one_and_the_dead_one_is_not_heard():
    controller = tolerant(0, 1, 2)
    controller.disconnect(1, now=1.0)
    assert controller.join(1, now=2.0, min_workers=1) is None
    assert controller.incarnation(1) == 1
    assert controller.receive(1, {"kind": "raised", "text": "", "status": {}}, now=3.0) == []
    assert controller.disconnect(1, now=3.0) == []
    waits = {"kind": "waits", "members": [1]}
    assert controller.receive(1, report_of(0, None), now=3.0, incarnation=1) == [(0, waits), (2, waits)]


def test_process_that_joins_before_its_predecessor_counts_as_gone_tries_again():
    controller = tolerant(0, 1, 2)
    assert controller.join(1, now=2.0, min_workers=1).is_temporary


def test_silent_member_is_told_that_it_was_given_up():
    controller = tolerant(0, 1, 2, silence_s=10.0)
    for number in (0, 2):
        controller.receive(number, heartbeat(0, "step"), now=9.0)
    outbox = controller.tick(now=11.0)
    assert (1, {"kind": "given_up"}) in outbox
    assert (0, {"kind": "end", "epoch": 1}) in outbox
    assert controller.is_silent(1)


def test_members_that_have_reported_are_told_which_reports_are_missing():
    controller = tolerant(0, 1, 2)
    controller.receive(0, report_of(1), now=1.0)
    (reminder,) = [m for to, m in controller.tick(now=2.0) if to == 0 and m["kind"] == "reminder"]
    assert [number for number, _ in reminder["missing"]] == [1, 2]


def test_members_that_have_reported_are_told_which_tasks_have_not_come():
    controller = tolerant(0, 1)
    (reminder,) = [m for to, m in controller.tick(now=2.0) if to == 0 and m["kind"] == "reminder"]
    assert reminder["missing"] == [[2, None]]


def test_task_of_another_mode_is_refused_and_both_are_named():
    controller = Controller(NAMES)
    assert controller.join(0, now=0.0, min_workers=2) is None
    assert "worker 0 runs with fault tolerance and min_workers=2, and worker 1 with no fault" in text_of(
        controller.join(1, now=0.0)
    )
    controller = Controller(NAMES)
    assert controller.join(0, now=0.0) is None
    assert "no fault tolerance" in text_of(controller.join(1, now=0.0, min_workers=1))


def text_of(refusal):
    assert refusal is not None
    assert not refusal.is_temporary
    return refusal.text


def test_nobody_joins_a_run_that_is_over_or_lost():
    controller = tolerant(0, 1, 2)
    for number in range(3):
        controller.receive(number, {"kind": "finished", "epoch": 1, "version": 4}, now=1.0)
    assert controller.is_broken
    controller.receive(2, left(4), now=1.0)
    assert controller.join(2, now=2.0, min_workers=1).is_temporary


def test_signal_of_a_member_that_dies_still_makes_the_others_save():
    controller = tolerant(0, 1, 2)
    for number in range(3):
        controller.receive(number, {"kind": "watching"}, now=1.0)
    signal = {"kind": "signal", "is_final": True, "text": "SIGTERM"}
    assert (0, {"kind": "pause", "round": 1}) in controller.receive(1, signal, now=1.0)
    controller.receive(0, {"kind": "paused", "round": 1, "started": 5}, now=1.0)
    controller.disconnect(1, now=1.0)
    controller.receive(2, {"kind": "paused", "round": 1, "started": 6}, now=1.0)
    controller.receive(0, report_of(1), now=1.0)
    outbox = controller.receive(2, report_of(1), now=1.0)
    stop = {"kind": "stop", "round": 1, "after": 6, "is_final": True}
    assert outbox[-2:] == [(0, stop), (2, stop)]


def test_nobody_enters_while_the_members_agree_on_a_save():
    controller = tolerant(0, 1, 2)
    controller.disconnect(2, now=1.0)
    for number in range(2):
        controller.receive(number, report_of(1), now=1.0)
        controller.receive(number, {"kind": "watching"}, now=1.0)
    controller.join(2, now=1.0, min_workers=1)
    controller.receive(2, report_of(0, None), now=1.0, incarnation=1)
    controller.receive(0, {"kind": "signal", "is_final": False, "text": "SIGTERM"}, now=1.0)
    members = []
    for epoch in (2, 3):
        controller.receive(0, {**report_of(epoch), "is_open": True}, now=1.0)
        outbox = controller.receive(1, report_of(epoch), now=1.0)
        members += [message["members"] for to, message in outbox if message["kind"] == "form" and to == 0]
        for kind in ("paused", "saved"):
            for number in range(2):
                controller.receive(number, {"kind": kind, "round": 1, "started": 5}, now=1.0)
    assert members == [[0, 1], [0, 1, 2]]
