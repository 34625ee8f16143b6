"""One member is compared with what all have in common: as if with each other member, at the cost of one comparison."""

import cProfile
import pstats

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._src.control.agreed_sequence import AgreedSequence
from replicax._src.control.controller import Controller
from replicax._src.control.dates import first_at

NUM_MEMBERS = 4


def status(position, program, doing="in", **more):
    return {"position": position, "program": program, "doing": doing, **more}


heartbeats = st.builds(
    lambda position, program, doing, reads, reading, has_threads, is_solo: (
        {"kind": "heartbeat", "status": status(position, program, doing)}
        | {"more": {"reads": reads, "reading": reading, "has_threads": has_threads, "is_solo": is_solo}}
    ),
    st.integers(-1, 4).map(lambda position: position if position < 4 else first_at(1)),
    st.sampled_from([None, "#0 f", "#0 f", "#0 f", "#1 g"]),
    st.sampled_from(["in", "between"]),
    st.integers(0, 2),
    st.none() | st.tuples(st.integers(-1, 2), st.integers(0, 2), st.sampled_from(["", "a", "b"])),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([False, False, False, True]),
)
offers = st.builds(
    lambda key, position, purpose, since: {
        "kind": "offer",
        "key": key,
        "value": 0,
        "epoch": 0,
        "since": since,
        "position": position,
        "purpose": purpose,
        "status": status(max(-1, (position or 0) - 1), "#0 f", "between"),
    },
    st.sampled_from("kl"),
    st.none() | st.integers(0, 3),
    st.sampled_from([{"program": "#0 f"}, {"what": "to agree"}]),
    st.sampled_from([0, 0, 1]),
)
events = st.lists(
    st.tuples(
        st.integers(0, NUM_MEMBERS - 1),
        heartbeats | offers | st.sampled_from(["tick", "disconnect", "enter", "drop"]),
    ),
    max_size=25,
)


def outboxes(all_events, *, compares_all, is_tolerant, monkeypatch):
    with monkeypatch.context() as patch:
        if compares_all:
            patch.setattr(AgreedSequence, "may_differ", lambda self, number: True)
            patch.setattr(AgreedSequence, "may_be_apart", lambda self, number, all_gathers: True)
        controller = Controller([f"worker {n}" for n in range(NUM_MEMBERS)], stall_s=2.0, timeout_s=9.0)
        for number in range(NUM_MEMBERS):
            assert controller.join(number, 0.0, 1 if is_tolerant else None) is None
        result, now = [], 0.0
        for number, event in all_events:
            now += 0.5
            if event == "tick":
                result.append(controller.tick(now))
            elif event == "disconnect":
                result.append(controller.disconnect(number, now))
            elif event == "enter":  # as when an epoch is formed
                controller._all_gathers.clear()
                for member in controller._members:
                    member.next = None
                controller._members[number].enter(0, now)
                controller._agreed.forget()
            elif event == "drop":
                controller._agreed.drop()
            else:
                message = dict(event)
                more = {name: value for name, value in message.pop("more", {}).items() if value}
                message["status"] = {**message["status"], **more}
                result.append(controller.receive(number, message, now))
        return result


@pytest.mark.parametrize("is_tolerant", [False, True])
def test_same_mismatches_as_if_each_were_compared_with_each(is_tolerant):
    monkeypatch = pytest.MonkeyPatch()

    @given(events)
    @settings(max_examples=150, deadline=None)
    def check(all_events):
        options = {"is_tolerant": is_tolerant, "monkeypatch": monkeypatch}
        assert outboxes(all_events, compares_all=False, **options) == outboxes(
            all_events, compares_all=True, **options
        )

    check()


def num_calls(call):
    profile = cProfile.Profile()
    profile.runcall(call)
    return sum(num for _, num, *_ in pstats.Stats(profile).stats.values())  # type: ignore[attr-defined]


def calls_of_one_second(num_members):
    controller = Controller([f"worker {n}" for n in range(num_members)])
    for number in range(num_members):
        controller.join(number, 0.0)

    def second(at):
        for number in range(num_members):
            is_reading = number % 3 == 0
            reading = {"reading": [10 * at, 10 * at, "a dataset"]} if is_reading else {}
            told = status(
                10 * at, "#0 f", "between" if is_reading else "in", reads=10 * at + (not is_reading)
            )
            controller.receive(number, {"kind": "heartbeat", "status": {**told, **reading}}, float(at))

    def all_gather():
        offer = {"kind": "offer", "key": "k", "value": 0, "position": 21, "purpose": {"what": "to agree"}}
        for number in range(num_members):
            controller.receive(number, {**offer, "status": status(20, "#0 f", "between", reads=21)}, 3.0)

    second(1)
    return [
        num_calls(call) / num_members
        for call in (
            lambda: second(2),
            lambda: controller.tick(2.0),
            all_gather,
            lambda: controller.tick(3.0),
        )
    ]


def test_calls_for_a_member_do_not_grow_with_their_number():
    few, many = calls_of_one_second(20), calls_of_one_second(160)
    for one, other in zip(few, many, strict=True):
        assert other < 1.2 * one
