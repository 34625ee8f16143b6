"""``RequestRules``: when a client of parameter servers connects, sends again and gives up, one event at a time."""

import functools
import math

import numpy as np
import pytest

from checks import message
from replicax._ps.client.request_rules import (
    EndRequest,
    OpenConnection,
    PauseUntil,
    RequestRules,
    SendRequest,
)
from replicax._ps.client.server_requests import Ask, answered_of
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import (
    InvalidArgumentError,
    MessageError,
    StaleCoordinatorError,
    UnauthenticatedError,
    UnavailableError,
    UnknownProgramError,
)

GONE = UnavailableError("gone", "ps 0")
STALE = StaleCoordinatorError("ps 0 serves another coordinator")
UNKNOWN = UnknownProgramError("no program p", "p")


class Client:
    """Carries out nothing: it holds the last action, and each method is its outcome.

    Attributes:
      late: Outcomes of all actions before the last one, by name. The rules must ignore them.
    """

    def __init__(self, *, group=False, returns=False, programs=("p", "q")):
        self.rules = RequestRules("ps 0", set(programs))
        self.rules.returns = returns
        if group:
            self.rules.replicated()
        self.action, self.now, self.late = None, 0.0, []

    def took(self, event, *arguments):
        before, self.action = self.action, event(*arguments)
        if before is not None and not isinstance(before, EndRequest):
            number = before.number
            self.late += [
                lambda: self.rules.connected(number),
                lambda: self.rules.answered(number),
                lambda: self.rules.broke(number, GONE, self.now),
                lambda: self.rules.time_passed(number, math.inf),
            ]
        return self.action

    def asks(self, deadline=60.0, may_repeat=True):
        return self.took(self.rules.asked, self.now + deadline, may_repeat)

    def connected(self):
        return self.took(self.rules.connected, self.action.number)

    def answered(self):
        return self.took(self.rules.answered, self.action.number)

    def broke(self, error=GONE):
        return self.took(self.rules.broke, self.action.number, error, self.now)

    def waits(self, pause_s):
        """Checks the pause, and lets it pass."""
        assert isinstance(self.action, PauseUntil)
        assert self.action.until == pytest.approx(self.now + pause_s)
        self.now = self.action.until
        return self.took(self.rules.time_passed, self.action.number, self.now)

    def connects_to(self, server):
        assert isinstance(self.action, OpenConnection)
        assert self.action.server == server
        return self.connected()

    def sends(self, program=None):
        assert isinstance(self.action, SendRequest)
        assert self.action.program == program
        return self

    def settles(self, error=None, *, disconnects=False):
        assert self.action == EndRequest(error, disconnects)
        return self


@pytest.fixture
def client():
    made = Client()
    made.asks()
    made.connects_to(0)
    made.sends()
    yield made
    for outcome in made.late:  # whatever came before, it changes nothing now
        assert outcome() is None


@pytest.fixture
def pair():
    """A client of a group, whose first server is the primary."""
    made = Client(group=True)
    made.asks()
    made.connects_to(0)
    made.sends()
    yield made
    for outcome in made.late:
        assert outcome() is None


# --- one server -------------------------------------------------------------------------------------------


def test_an_answer_settles_the_request_and_the_connection_stays(client):
    client.answered()
    client.settles()
    client.asks()
    client.sends()


def test_an_answer_that_comes_twice_is_one_answer(client):
    number = client.action.number
    client.answered()
    assert client.rules.answered(number) is None
    client.asks()
    assert client.rules.answered(number) is None  # it is no answer to the next request
    client.answered()
    client.settles()


def test_an_answer_after_the_reconnection_is_not_the_answer(client):
    first = client.action.number
    client.broke()
    assert client.rules.answered(first) is None  # during the pause
    client.waits(0.0)
    assert client.rules.answered(first) is None  # while it connects
    client.connects_to(0)
    client.sends()
    assert client.rules.answered(first) is None
    assert client.rules.broke(first, GONE, client.now) is None  # the old connection ends at last
    client.answered()
    client.settles()


def test_each_send_has_a_number_of_its_own(client):
    numbers = [client.action.number]
    for pause_s in (0.0, 0.2, 1.0):
        client.broke()
        client.waits(pause_s)
        client.connects_to(0)
        numbers.append(client.action.number)
    assert numbers == sorted(set(numbers))


def test_a_server_that_does_not_come_back_is_given_up_after_three_pauses(client):
    for pause_s in (0.0, 0.2, 1.0):
        client.broke()
        client.waits(pause_s)
        assert isinstance(client.action, OpenConnection)
    client.broke()
    client.settles(GONE, disconnects=True)


def test_a_failed_connection_counts_like_a_lost_answer():
    client = Client()
    client.asks()
    client.broke()  # it is not connected
    client.waits(0.0)
    client.connects_to(0)
    client.broke()  # it is not sent, or the answer is lost
    client.waits(0.2)
    client.connects_to(0)
    client.answered()
    client.settles()


def test_the_pauses_begin_again_with_the_next_request(client):
    for pause_s in (0.0, 0.2):
        client.broke()
        client.waits(pause_s)
        client.connects_to(0)
    client.answered()
    client.asks()
    client.broke()
    client.waits(0.0)


def test_a_server_that_returns_is_waited_for_until_the_deadline():
    client = Client(returns=True)
    client.asks(deadline=10.0)
    for pause_s in (0.0, 0.2, *[1.0] * 9):
        client.broke()
        client.waits(pause_s)
    assert client.now == pytest.approx(9.2)
    client.broke()  # at 10.2 it would be too late
    client.settles(GONE, disconnects=True)


def test_a_request_that_may_not_be_repeated_is_sent_once(client):
    client.answered()
    client.asks(may_repeat=False)
    client.sends()
    client.broke()
    client.settles(GONE, disconnects=True)
    client.asks()  # the next one connects again
    client.connects_to(0)
    client.sends()


def test_a_pause_that_ends_at_the_deadline_is_not_made():
    client = Client()
    client.asks(deadline=0.2)
    client.broke()
    client.waits(0.0)
    client.broke()
    client.settles(GONE, disconnects=True)


def test_a_clock_that_wakes_early_waits_for_the_rest(client):
    client.broke()
    client.waits(0.0)
    client.broke()
    pause = client.action
    assert client.rules.time_passed(pause.number, pause.until - 0.1) == pause
    assert isinstance(client.rules.time_passed(pause.number, pause.until), OpenConnection)


def test_a_lost_server_is_named(client):
    client.answered()
    client.asks(may_repeat=False)
    client.broke(UnavailableError("connection reset"))
    error = client.action.error
    assert (str(error), error.task) == ("ps 0: connection reset", "ps 0")


def test_a_stale_coordinator_is_not_sent_again(client):
    client.broke(STALE)
    client.settles(STALE)


@pytest.mark.parametrize("error", [MessageError("damaged"), UnauthenticatedError("who are you?")])
def test_an_error_of_the_connection_closes_it(client, error):
    client.broke(error)
    client.settles(error, disconnects=True)
    client.asks()
    client.connects_to(0)


def test_an_error_of_the_operation_keeps_the_connection(client):
    error = InvalidArgumentError("no shard w")
    client.broke(error)
    client.settles(error)
    client.asks()
    client.sends()


# --- programs that a restarted server lacks ---------------------------------------------------------------


def test_a_restarted_server_gets_the_program_and_then_the_request(client):
    client.broke(UNKNOWN)
    client.sends(program="p")
    client.answered()
    client.sends()
    client.answered()
    client.settles()


def test_several_programs_are_sent_one_after_another(client):
    for digest in "pq":
        client.broke(UnknownProgramError("unknown", digest))
        client.sends(program=digest)
        client.answered()
        client.sends()
    client.answered()
    client.settles()


def test_a_program_that_a_server_does_not_keep_is_an_error(client):
    client.broke(UNKNOWN)
    client.answered()
    client.broke(UNKNOWN)
    client.settles(UNKNOWN)
    client.asks()  # the next request sends it again
    client.broke(UNKNOWN)
    client.sends(program="p")


def test_a_program_that_the_client_does_not_have_is_an_error(client):
    error = UnknownProgramError("unknown", "another")
    client.broke(error)
    client.settles(error)


def test_a_program_is_sent_again_even_if_the_request_may_not_be(client):
    """A server that lacks a program has done nothing of the request. The pauses of the program are its own."""
    client.answered()
    client.asks(may_repeat=False)
    client.broke(UNKNOWN)
    client.sends(program="p")
    client.broke()
    client.waits(0.0)
    client.connects_to(0)
    client.sends(program="p")
    client.answered()
    client.sends()
    client.broke()
    client.settles(GONE, disconnects=True)


def test_the_failures_of_a_program_are_not_those_of_its_request(client):
    client.broke()
    client.waits(0.0)
    client.connects_to(0)
    client.broke(UNKNOWN)
    for pause_s in (0.0, 0.2):
        client.broke()
        client.waits(pause_s)
        client.connects_to(0)
    client.answered()
    client.sends()
    client.broke()
    client.waits(0.2)  # the second failure of the request


def test_a_lost_program_ends_the_request(client):
    client.broke(UNKNOWN)
    for pause_s in (0.0, 0.2, 1.0):
        client.broke()
        client.waits(pause_s)
    client.broke()
    client.settles(GONE, disconnects=True)


def test_an_answer_to_a_program_is_none_to_the_request(client):
    client.broke(UNKNOWN)
    number = client.action.number
    client.answered()
    assert client.rules.answered(number) is None
    client.sends()


# --- a group on two servers -------------------------------------------------------------------------------


def test_the_other_server_is_asked_in_turn(pair):
    pair.broke()
    pair.waits(0.0)
    for server in (1, 0, 1):
        assert pair.action.server == server
        pair.broke()
        pair.waits(0.1)
    pair.connects_to(0)
    pair.answered()
    pair.settles()
    pair.asks()
    pair.sends()  # and stays with the server that has answered


def test_a_new_primary_is_asked_from_the_next_request_on(pair):
    pair.answered()
    assert pair.rules.primary_named(1, epoch=2)
    pair.asks()
    pair.connects_to(1)
    pair.sends()


def test_a_request_that_waits_for_the_former_primary_goes_to_the_new_one(pair):
    assert pair.rules.primary_named(1, epoch=2)  # the caller closes the connection
    pair.broke()
    pair.waits(0.0)
    pair.connects_to(1)
    pair.sends()


def test_the_same_primary_keeps_its_connection(pair):
    assert not pair.rules.primary_named(0, epoch=2)
    pair.answered()
    pair.asks()
    pair.sends()


def test_an_older_epoch_names_no_primary(pair):
    assert pair.rules.primary_named(1, epoch=5)
    pair.broke()
    pair.waits(0.0)
    pair.connects_to(1)
    assert not pair.rules.primary_named(0, epoch=4)
    pair.answered()
    pair.asks()
    pair.sends()


def test_a_repeated_epoch_says_the_same_again(pair):
    """The turn may have gone to the other server in the meantime."""
    pair.rules.primary_named(0, epoch=2)
    pair.broke()
    assert not pair.rules.primary_named(0, epoch=2)  # no connection is there
    pair.waits(0.0)
    pair.connects_to(0)


def test_a_primary_named_while_connecting_gets_the_request():
    client = Client(group=True)
    client.asks()
    assert not client.rules.primary_named(1, epoch=2)  # there is no connection to close
    client.connects_to(0)
    client.connects_to(1)
    client.sends()


def test_a_server_that_serves_another_coordinator_is_skipped(pair):
    pair.broke(STALE)
    pair.waits(0.0)
    pair.connects_to(1)
    pair.answered()
    pair.settles()


def test_two_servers_that_serve_another_coordinator_end_the_request(pair):
    pair.broke(STALE)
    pair.waits(0.0)
    pair.connects_to(1)
    pair.broke()  # silent
    pair.waits(0.1)
    pair.connects_to(0)
    pair.broke(STALE)  # the same one again
    pair.waits(0.1)
    pair.connects_to(1)
    pair.broke(STALE)
    pair.settles(STALE)


def test_a_group_is_asked_until_the_deadline():
    client = Client(group=True)
    client.asks(deadline=5.0)
    num_tries = 0
    while not isinstance(client.action, EndRequest):
        num_tries += 1
        client.broke()
        if isinstance(client.action, PauseUntil):
            client.waits(0.1 if num_tries > 1 else 0.0)
    client.settles(GONE, disconnects=True)
    assert 50 <= num_tries <= 52


def test_a_group_with_one_stale_server_is_unavailable_at_the_deadline(pair):
    pair.now = 59.95
    pair.broke()
    pair.waits(0.0)
    pair.connects_to(1)
    pair.broke(STALE)
    error, disconnects = pair.action
    assert isinstance(error, UnavailableError)  # a StaleCoordinatorError would end the job
    assert str(STALE) in str(error)
    assert disconnects


# --- the end ----------------------------------------------------------------------------------------------


def test_a_closed_client_does_not_send_again(client):
    client.rules.closed()
    client.broke()
    client.settles(GONE, disconnects=True)
    client.asks()
    message(
        UnavailableError, functools.partial(_raise, client.action.error), "client of ps 0 has been closed"
    )


def test_a_client_closed_during_a_pause_or_a_connection():
    for closes_in_pause in (True, False):
        client = Client()
        client.asks()
        client.broke()
        if closes_in_pause:
            client.rules.closed()
            client.took(client.rules.time_passed, client.action.number, math.inf)
        else:
            client.waits(0.0)
            client.rules.closed()
            client.connected()
        assert "has been closed" in str(client.action.error)
        assert client.action.disconnects


def test_a_request_that_was_interrupted_is_over(client):
    number = client.action.number
    client.rules.disconnected()
    assert client.rules.answered(number) is None
    assert client.rules.broke(number, GONE, 0.0) is None
    client.asks()
    client.connects_to(0)
    client.sends()


def test_a_version_of_an_older_instance_is_not_current():
    """A server that restarted counts again. Its versions name another instance, so its value is new."""
    ask = Ask(pull=[("w", ("old", 3)), ("v", ("new", 1))])
    values = answered_of(
        ask, Message({"versions": [["new", 3], ["new", 1]], "duplicate": False}, [np.float32(5)])
    ).values
    assert values == {"w": (("new", 3), 5), "v": (("new", 1), None)}


def _raise(error):
    raise error
