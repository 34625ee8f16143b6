"""``WaitRules``: how long a task waits for others, how often it looks, and what it says; without a clock."""

import pytest

from checks import message
from replicax._ps.client.wait_rules import Awaited, LookAgain, WaitRules
from replicax._src.vocabulary.errors import UnavailableError

PS = Awaited("ps 0 (a:1) and ps 1 (b:1)", "They do not answer.", "ps 0")


def test_pauses_grow_to_a_limit():
    rules = WaitRules("The chief", 100.0, 5.0)
    pauses = [rules.missing(PS, 5.0).pause_s for _ in range(8)]
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.4, 0.4, 0.4])


def test_it_says_every_ten_seconds_what_it_waits_for():
    rules = WaitRules("The chief", 100.0, 5.0)
    said = {now: rules.missing(PS, float(now)).text for now in range(5, 40)}
    assert [now for now, text in said.items() if text] == [16, 27, 38]
    assert said[16] == "The chief has waited 11 s for ps 0 (a:1) and ps 1 (b:1): They do not answer."


def test_the_wait_ends_after_its_limit():
    rules = WaitRules("worker 1", 30.0, 5.0)
    assert isinstance(rules.missing(PS, 35.0), LookAgain)
    text = message(UnavailableError, lambda: rules.missing(PS, 35.1), "worker 1 waited 30 s for ps 0 (a:1)")
    assert "REPLICAX_START_TIMEOUT_S" in text
    with pytest.raises(UnavailableError) as error:
        rules.missing(Awaited("chief 0", "It has not started.", "chief 0"), 36.0)
    assert error.value.task == "chief 0"
