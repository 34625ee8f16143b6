"""All tasks save after the same step, in any order of events: the rules of both sides, without sockets or threads."""

from collections import deque

import hypothesis
import pytest
from hypothesis import strategies as st

from checks import examples
from replicax._src.cluster.save_points import AtPoint, SavePoints
from replicax._src.control.controller import Controller
from replicax._src.control.save_rounds import SaveRounds


class Tasks:
    """Members that run the same steps, each a collective; messages arrive in order, at times that the test chooses."""

    def __init__(self, num_tasks, num_steps):
        self.num_tasks, self.num_steps = num_tasks, num_steps
        self.controller = Controller([f"worker {n}" for n in range(num_tasks)])
        self.points = [SavePoints() for _ in range(num_tasks)]
        self.inside = [False] * num_tasks  # of a step
        self.ended = [None] * num_tasks  # "done", "saved", "died", "failed"
        self.saves = [[] for _ in range(num_tasks)]  # after which steps
        self.up = [deque() for _ in range(num_tasks)]
        self.down = [deque() for _ in range(num_tasks)]
        for number in range(num_tasks):
            assert self.controller.join(number, now=0.0) is None
            self.say(number, {"kind": "watching"})

    def say(self, number, message):
        self.up[number].append(message)

    def send(self, outbox):
        for to, message in outbox:
            self.down[to].append(message)

    # Possible events. Each returns whether it happened.

    def signal(self, number, is_final):
        if self.ended[number] is None:
            self.say(number, {"kind": "signal", "is_final": is_final, "text": "SIGTERM"})
        return True

    def to_controller(self, number):
        if not self.up[number]:
            return False
        self.send(self.controller.receive(number, self.up[number].popleft(), now=0.0))
        return True

    def from_controller(self, number):
        if not self.down[number]:
            return False
        message = self.down[number].popleft()
        if message["kind"] == "gone" and self.ended[number] is None:
            self.ended[number] = "failed"
        elif message["kind"] != "gone" and self.ended[number] is None:
            answer = self.points[number].receive(message)
            if answer is not None:
                self.say(number, answer)
        return True

    def die(self, number):
        if self.ended[number] in (None, "saved"):
            self.ended[number] = "died"
            self.up[number].clear()
            self.send(self.controller.disconnect(number, now=0.0))
        return True

    def go_on(self, number):
        """The main thread of a task."""
        points = self.points[number]
        if self.ended[number] is not None:
            return False
        if self.inside[number]:  # it is in the collective until all have begun that step
            if any(other.started < points.started for other in self.points):
                return False
            self.inside[number] = False
            return True
        if points.started == self.num_steps:
            self.ended[number] = "done"
            status = {"position": points.started, "program": None, "doing": "between"}
            self.say(number, {"kind": "left", "status": status})
            return True
        match points.begin():
            case AtPoint.WAIT:
                return False
            case AtPoint.RUN:
                self.inside[number] = True
            case AtPoint.SAVE:
                self.saves[number].append((points.started, points.is_final))
                if points.is_final:
                    self.ended[number] = "saved"
                else:
                    self.say(number, points.save())
        return True

    def run_to_the_end(self):
        ways = (self.to_controller, self.from_controller, self.go_on)
        while any(way(number) for way in ways for number in range(self.num_tasks)):
            pass


def happenings(num_tasks):
    who = st.integers(0, num_tasks - 1)
    steady = st.tuples(st.sampled_from(["to_controller", "from_controller", "go_on", "go_on", "go_on"]), who)
    signal = st.tuples(st.just("signal"), who, st.booleans())
    return st.lists(st.one_of(steady, steady, steady, signal), max_size=120)


@examples(400, short=150)
@hypothesis.given(
    st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), happenings(n))), st.integers(1, 12)
)
def test_all_save_after_the_same_step_and_none_waits_forever(case, num_steps):
    """Several preemption signals, final or not, from several tasks at any time."""
    num_tasks, happening = case
    tasks = Tasks(num_tasks, num_steps)
    for what, *who in happening:
        getattr(tasks, what)(*who)
    tasks.run_to_the_end()
    # (When all are done, the first to leave may end others that are done too.)
    ended = {end if end != "failed" else "done" for end in tasks.ended}
    assert len(ended) == 1, tasks.ended
    assert ended <= {"done", "saved"}
    assert all(points.started == num_steps for points in tasks.points) or ended == {"saved"}
    assert all(saves == tasks.saves[0] for saves in tasks.saves)
    finals = [is_final for _, is_final in tasks.saves[0]]
    assert not any(finals[:-1])
    signaled = [is_final for what, *_, is_final in happening if what == "signal"]
    assert len(tasks.saves[0]) <= len(signaled)
    assert not any(finals) or any(signaled)


@examples(300, short=100)
@hypothesis.given(
    st.integers(2, 4).flatmap(lambda n: st.tuples(st.just(n), happenings(n), st.integers(0, n - 1))),
    st.integers(0, 60),
)
def test_death_of_one_ends_the_wait_of_all(case, at):
    num_tasks, happening, victim = case
    tasks = Tasks(num_tasks, 1000)
    tasks.signal(0, is_final=True)
    for what, *who in happening[:at]:
        getattr(tasks, what)(*who)
    tasks.die(victim)
    for what, *who in happening[at:]:
        getattr(tasks, what)(*who)
    tasks.run_to_the_end()
    assert all(end in ("died", "failed", "saved") for end in tasks.ended)
    assert len({tuple(s) for s, end in zip(tasks.saves, tasks.ended, strict=True) if end == "saved"}) <= 1


def test_steps_resume_when_a_pause_ends():
    points = SavePoints()
    assert points.begin() is AtPoint.RUN
    assert points.receive({"kind": "pause", "round": 1}) == {"kind": "paused", "round": 1, "started": 1}
    assert points.begin() is AtPoint.WAIT
    points.receive({"kind": "resume", "round": 1})
    assert points.begin() is AtPoint.RUN


def test_a_task_runs_up_to_the_agreed_step_and_saves_before_the_next_one():
    points = SavePoints()
    assert [points.begin() for _ in range(2)] == [AtPoint.RUN] * 2
    points.receive({"kind": "pause", "round": 1})
    points.receive({"kind": "stop", "round": 1, "after": 3, "is_final": False})
    assert [points.begin() for _ in range(3)] == [AtPoint.RUN, AtPoint.SAVE, AtPoint.SAVE]
    assert points.save() == {"kind": "saved", "round": 1}
    assert (points.begin(), points.started) == (AtPoint.RUN, 4)


@pytest.mark.parametrize("begun", [False, True])
def test_count_of_steps_of_a_newcomer_is_that_of_the_others(begun):
    other, newcomer = SavePoints(), SavePoints()
    for date in range(6):
        other.begin(date)
    if begun:  # it has begun the next step, and the newcomer has not
        assert other.begin(6) is AtPoint.RUN
    started = [points.receive({"kind": "pause", "round": 1}, 6)["started"] for points in (other, newcomer)]
    stop = {"kind": "stop", "round": 1, "after": max(started), "is_final": False}
    for points in (other, newcomer):
        points.receive(stop, 6)
    assert newcomer.begin(6) is (AtPoint.RUN if begun else AtPoint.SAVE)
    for points in (other, newcomer):
        date = 7 if begun else 6
        assert points.begin(date) is AtPoint.SAVE


def test_no_task_pauses_before_all_watch():
    """A member that cannot answer would keep all others waiting."""
    tasks = Tasks(2, 5)
    tasks.to_controller(0)
    tasks.signal(0, is_final=True)
    tasks.to_controller(0)
    assert [message["kind"] for message in tasks.down[0]] == ["preempted"]
    tasks.to_controller(1)
    assert [message["kind"] for message in tasks.down[0]] == ["preempted", "pause"]


def test_task_that_stopped_watching_delays_no_other():
    tasks = Tasks(2, 5)
    for number in (0, 1):
        tasks.to_controller(number)
    tasks.signal(0, is_final=True)
    tasks.say(1, {"kind": "closed"})
    tasks.to_controller(0)
    tasks.from_controller(0)
    tasks.from_controller(0)
    assert tasks.points[0].begin() is AtPoint.WAIT
    tasks.to_controller(1)
    tasks.from_controller(0)
    assert tasks.points[0].begin() is AtPoint.RUN


def test_final_signal_overrides_one_that_is_not_final():
    """This also holds while both wait until all watch."""
    rounds = SaveRounds(1)
    for is_final in (True, False):
        rounds.receive(0, {"kind": "signal", "is_final": is_final, "text": "SIGTERM"})
    assert [m["kind"] for _, m in rounds.receive(0, {"kind": "watching"})] == ["pause"]
    ((_, stop),) = rounds.receive(0, {"kind": "paused", "round": 1, "started": 3})
    assert (stop["after"], stop["is_final"]) == (3, True)
