import pytest

from replicax._ps.job.actions_out import Ask, MakeProgram, Perform
from replicax._ps.job.procedures import Operation, Pause, Procedures, Request, Tracing, Until


@pytest.fixture
def procedures():
    return Procedures()


def asked(procedures):
    actions, procedures.actions[:] = list(procedures.actions), []
    return actions


def test_a_procedure_gets_the_answer_of_its_request(procedures):
    got = []

    def ask():
        got.append((yield Request("ps 0", "status", {"a": 1}, 5.0)))

    procedures.start("x", ask(), 0.0)
    [action] = asked(procedures)
    assert isinstance(action, Ask)
    assert (action.task, action.op, action.header, action.timeout_s) == ("ps 0", "status", {"a": 1}, 5.0)
    procedures.answered(action.request, "here", 0.0)
    assert got == ["here"]
    assert "x" not in procedures


def test_a_procedure_raises_the_error_of_its_request(procedures):
    got = []

    def ask():
        try:
            yield Operation("renew")
        except ValueError as error:
            got.append(error)
        yield Tracing(3, "shapes")

    procedures.start("x", ask(), 0.0)
    [action] = asked(procedures)
    assert isinstance(action, Perform)
    error = ValueError()
    procedures.failed(action.request, error, 0.0)
    assert got == [error]
    [action] = asked(procedures)
    assert isinstance(action, MakeProgram)
    assert (action.function, action.signature) == (3, "shapes")


def test_answers_to_a_stopped_or_replaced_procedure_are_ignored(procedures):
    got = []

    def ask(name):
        got.append((name, (yield Request("ps 0", "status", {}, 5.0))))

    procedures.start("x", ask("first"), 0.0)
    [first] = asked(procedures)
    procedures.start("x", ask("second"), 0.0)
    [second] = asked(procedures)
    procedures.answered(first.request, 1, 0.0)
    assert got == []
    procedures.answered(second.request, 2, 0.0)
    procedures.answered(second.request, 2, 0.0)
    assert got == [("second", 2)]


def test_pauses_end_in_the_order_of_their_times(procedures):
    ended = []

    def pause(seconds):
        yield Pause(seconds)
        ended.append(seconds)

    for seconds in (3.0, 1.0, 2.0):
        procedures.start(seconds, pause(seconds), 10.0)
    assert procedures.wake_at == 11.0
    procedures.stop(1.0)
    assert procedures.wake_at == 12.0
    procedures.wake(11.9)
    assert ended == []
    procedures.wake(13.0)
    assert ended == [2.0, 3.0]
    assert procedures.wake_at is None


def test_a_hurried_pause_ends_once(procedures):
    ended = []

    def pause():
        for _ in range(2):
            yield Pause(5.0)
            ended.append(procedures.wake_at)

    procedures.start("x", pause(), 0.0)
    procedures.hurry("x", 1.0)
    procedures.hurry("x", 1.0)
    assert procedures.wake_at == 1.0
    assert procedures.wake(1.0)
    assert not procedures.wake(1.0)
    assert len(ended) == 1
    assert procedures.wake_at == 6.0
    procedures.wake(5.0)  # the first pause would have ended now
    assert len(ended) == 1


def test_a_condition_is_looked_at_until_it_holds(procedures):
    state, ended = [False], []

    def wait():
        yield Until(lambda: state[0])
        ended.append(True)

    procedures.start("x", wait(), 0.0)
    assert not procedures.wake(0.0)
    state[0] = True
    assert procedures.wake(0.0)
    assert ended == [True]


def test_stopping_runs_the_finally_clauses(procedures):
    ended = []

    def wait(name):
        try:
            yield Pause(1.0)
        finally:
            ended.append(name)

    procedures.start("x", wait("x"), 0.0)
    procedures.start("y", wait("y"), 0.0)
    procedures.stop("x")
    assert ended == ["x"]
    procedures.stop_all()
    assert ended == ["x", "y"]
    procedures.wake(5.0)


def test_an_event_costs_the_same_however_many_procedures_there_are(procedures):
    def rest():
        yield Pause(100.0)

    class Unlooked(dict):
        def __iter__(self):
            raise AssertionError("looped over all procedures")

        items = values = __iter__

    for number in range(10):
        procedures.start(number, rest(), 0.0)
    procedures._running = Unlooked(procedures._running)
    procedures.start("x", rest(), 0.0)
    procedures.wake(1.0)
    assert procedures.wake_at == 100.0
