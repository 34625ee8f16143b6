"""Groups in threads of one process exchange through a real ``Store``, and never wait for it."""

import threading

import numpy as np
import pytest

from asked_store import ME
from replicax._ps.local_updates import background_exchange
from replicax._ps.local_updates.background_exchange import BackgroundExchange, ExchangedFragment
from replicax._ps.local_updates.fragment_programs import FragmentPrograms
from replicax._ps.local_updates.fragment_rules import ExchangeOptions
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import InvalidArgumentError, UnavailableError, WaitTimeoutError

SIZE, WAIT_S = 50, 60.0


class Servers:
    """One store, which may be silent."""

    def __init__(self):
        self.store, self.is_silent = Store(), threading.Event()
        self.store.hello(ME)
        self.programs = FragmentPrograms("p", SIZE, 2)

    def ask(self, message):
        if self.is_silent.is_set():
            raise UnavailableError("The server is silent.")
        header = {**message.header, "incarnation": ME}
        answer = self.store.answer(Message(header, [np.array(each) for each in message.arrays]))
        return Message(answer.header, [np.array(each) for each in answer.arrays])

    def exchange(self, member, quorum=2, programs=None, **options):
        fragment = ExchangedFragment(self.ask, programs or self.programs)
        return BackgroundExchange(member, 2, [fragment], ExchangeOptions(quorum, **options), tick_s=0.02)


@pytest.fixture
def servers():
    return Servers()


@pytest.fixture
def groups(servers):
    groups = [servers.exchange(member) for member in range(2)]
    yield groups
    for each in groups:
        each.close()


def finished(groups):
    """Returns the parameters of all groups after ``finish``."""
    results = [None] * len(groups)

    def finish(number):
        results[number] = groups[number].finish(WAIT_S)[0]

    threads = [threading.Thread(target=finish, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return results


def test_groups_begin_with_the_values_of_the_first_and_end_with_the_mean_by_rows(servers, groups):
    first = np.arange(SIZE, dtype=np.float32)
    values = [group.begin([first + 100 * number], WAIT_S)[0] for number, group in enumerate(groups)]
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(values[0], first)
    moved = [groups[0].boundary(0, values[0] + 1, 3), groups[1].boundary(0, values[1] - 3, 1)]
    np.testing.assert_array_equal(moved[0], first + 1)  # nobody has waited for the other
    for result in finished(groups):
        np.testing.assert_allclose(result, first + (3 * 1 - 1 * 3) / 4, atol=1e-6)
    assert groups[0].statistics()["lost_pushes"] == 0


def test_silent_server_is_said_once_and_what_waits_is_merged_later(servers, groups, caplog):
    values = [group.begin([np.zeros(SIZE, np.float32)], WAIT_S)[0] for group in groups]
    servers.is_silent.set()
    for _ in range(5):
        values = [group.boundary(0, each + 1, 2) for group, each in zip(groups, values, strict=True)]
    np.testing.assert_array_equal(values[0], np.full(SIZE, 5))
    servers.is_silent.clear()
    for result in finished(groups):
        np.testing.assert_allclose(result, np.full(SIZE, 5), atol=1e-5)
    assert sum("does not answer" in line for line in caplog.messages) <= 2


def test_push_that_is_not_finite_is_named_and_the_group_ends_with_outer_parameters(servers, groups, caplog):
    values = [group.begin([np.zeros(SIZE, np.float32)], WAIT_S)[0] for group in groups]
    groups[0].boundary(0, values[0] + np.nan, 1)
    groups[1].boundary(0, values[1] + 2, 1)
    for result in finished(groups):
        np.testing.assert_array_equal(result, np.full(SIZE, 2))
    assert "not finite" in caplog.text


def test_groups_whose_fragments_differ_and_servers_that_do_not_answer_are_errors_at_the_start(servers):
    one = servers.exchange(0)
    other = servers.exchange(1, programs=FragmentPrograms("p", SIZE + 1, 2))
    try:
        one.begin([np.zeros(SIZE, np.float32)], WAIT_S)
        with pytest.raises(InvalidArgumentError, match=r"\[50\].*Give all groups the same"):
            other.begin([np.zeros(SIZE + 1, np.float32)], WAIT_S)
        servers.is_silent.set()
        late = servers.exchange(1)
        with pytest.raises(UnavailableError, match="Start the servers"):
            late.begin([np.zeros(SIZE, np.float32)], 0.2)
        late.close()
    finally:
        one.close()
        other.close()


def test_two_processes_with_one_number_are_an_error(servers):
    one, other = servers.exchange(0), servers.exchange(0)
    try:
        one.begin([np.zeros(SIZE, np.float32)], WAIT_S)
        other.begin([np.zeros(SIZE, np.float32)], WAIT_S)
        with pytest.raises(InvalidArgumentError, match="Another process exchanges as group 0"):
            one.finish(WAIT_S)
    finally:
        one.close()
        other.close()


def test_end_names_the_groups_that_it_waits_for(servers, groups, caplog, monkeypatch):
    monkeypatch.setattr(background_exchange, "_FIRST_SAID_S", 0.05)
    for group in groups:
        group.begin([np.zeros(SIZE, np.float32)], WAIT_S)
    with pytest.raises(WaitTimeoutError, match="waits for group 1, which may still train"):
        groups[0].finish(0.2)
    said = [line for line in caplog.messages if "has sent its last progress" in line]
    assert said
    assert "for group 1, which may still train" in said[0]
