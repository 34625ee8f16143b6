"""A function on its way: scheduled, sent, answered, settled; and callers that wait."""

from driven_job import DrivenJob, connected
from replicax._ps.job.actions_out import SendToWorker
from replicax._ps.job.events_in import Closed, FunctionNeeds, Scheduled, VariablesMade
from replicax._src.vocabulary.errors import CancelledError


def test_a_function_is_sent_answered_settled_and_joined():
    driven = connected()
    number = driven.schedule()
    assert driven.sent() == [("closure", number)]
    idle = driven.wait("idle")
    assert idle not in driven.ended
    answer = {"signature": None}
    driven.works(answer)
    settled = driven.settled[number]
    assert (settled.worker, settled.error, settled.answer) == ("worker 0", None, answer)
    assert driven.ended[idle].error is None


def test_functions_wait_for_the_first_worker():
    driven = DrivenJob()
    numbers = [driven.schedule() for _ in range(3)]
    driven.connect()
    assert driven.sent() == [("closure", numbers[0])]
    for _ in numbers:
        driven.works({})
    assert list(driven.settled) == numbers


def test_close_cancels_and_closes():
    driven = connected(2)
    number = driven.schedule()
    idle = driven.wait("idle")
    driven.do(Closed())
    assert "closed before it ended" in str(driven.settled[number].error)
    assert idle in driven.ended
    assert driven.servers.is_closed
    assert driven.job.wake_at is None
    late = driven.schedule()
    assert "closed" in str(driven.settled[late].error)
    assert driven.of(SendToWorker) == []


def test_the_next_job_of_a_session_knows_how_many_variables_were_made():
    driven = DrivenJob(num_made=3)
    assert driven.servers.hooks.num_made == 3
    driven.do(VariablesMade(4))
    assert driven.servers.hooks.num_made == 4


def test_functions_that_are_scheduled_together_run_as_one_after_another():
    driven = connected(2)
    together = [Scheduled(number, "f", "f", FunctionNeeds()) for number in range(5)]
    driven._take(driven.job.receive_scheduled(together, driven.now))
    while len(driven.settled) < 5:
        for worker in ("worker 0", "worker 1"):
            if driven.sent(worker):
                driven.works({}, worker=worker)
    assert all(settle.error is None for settle in driven.settled.values())
    assert driven.job.statistics()["closures"]["finished"] == 5


def test_functions_that_are_scheduled_together_after_a_failure_are_cancelled():
    driven = connected()
    driven.schedule()
    driven.works(ValueError("no luck"))
    together = [Scheduled(number, "f", "f", FunctionNeeds()) for number in (1, 2)]
    driven._take(driven.job.receive_scheduled(together, driven.now))
    assert [type(driven.settled[number].error) for number in (1, 2)] == [CancelledError] * 2
    driven.do(Closed())
    assert driven.job.receive_scheduled([Scheduled(3, "f", "f", FunctionNeeds())], driven.now)
