"""What a group tells the status of all groups."""

import json
import time

from replicax._ps.local_updates.background_exchange import BackgroundExchange, ExchangedFragment
from replicax._ps.local_updates.fragment_rules import ExchangeOptions
from replicax._ps.local_updates.group_status import group_status, show_groups
from replicax._ps.local_updates.member_rules import MemberRules
from replicax._ps.local_updates.round_state import REFUSED, MemberState, RoundState
from replicax._src.cluster.counters import counters
from replicax._src.status.group_table import group_rows_of, groups_of


def state(version, *members, is_stopping=0):
    return RoundState(version, is_stopping, 7, tuple(MemberState(*each) for each in members))


def rows(*rounds, silent=()):
    told = group_status(0, 2, rounds, lambda member: member not in silent, {})
    return group_rows_of({"groups": told})


def test_lag_is_the_rounds_since_the_last_push_of_the_slowest_fragment():
    # owner, pushed, landed, tokens, has_finished
    first = state(9, (1, 9, 9, 64, 0), (2, 6, 5, 0, 0), (3, 2, REFUSED, 0, 0), (0, 0, 0, 0, 0))
    second = state(8, (1, 8, 7, 32, 0), (2, 6, 6, 0, 0), (3, 0, 0, 0, 0), (0, 0, 0, 0, 0))
    assert rows(first, second, silent=(1, 3)) == [
        ("0", "training", "1", "64"),
        ("1", "silent", "4", "0"),
        ("2", "training", "–", "0"),
        ("3", "awaited", "–", "0"),
    ]


def test_group_has_finished_once_it_has_in_all_fragments():
    open_, done = state(3, (1, 3, 3, 0, 0)), state(3, (1, 3, 3, 0, 1))
    assert rows(open_, done)[0][1] == "training"
    assert rows(done, done, silent=(0,))[0][1] == "finished"


def test_status_is_json_and_has_the_versions_of_all_fragments(monkeypatch):
    monkeypatch.setattr(counters, "groups", None)
    rounds = [state(9, (1, 9, 9, 64, 0)), state(8, (1, 8, 7, 32, 0), is_stopping=1)]
    counts = {"tokens": 96, "pushes": 17, "bytes_out": 2048, "bytes_in": 512, "steps": 3}
    show_groups(lambda: group_status(0, 2, rounds, lambda member: True, counts))
    told = json.loads(json.dumps(counters.groups()))
    shown = dict(groups_of({"groups": told}))
    assert shown["group"] == "0 of 1"
    assert (shown["version"], shown["quorum"], shown["rows"], shown["pushes"]) == ("8 to 9", "2", "96", "17")
    assert (shown["sent"], shown["received"], shown["adoptions"]) == ("2.0 kB", "512 B", "0")
    assert shown["stopping"] == "yes"


def test_exchange_tells_what_the_servers_have_answered():
    """Group 1 has come once, 61 s ago."""
    unused = ExchangedFragment(lambda message: message, None)
    exchange = BackgroundExchange(0, 2, [unused], ExchangeOptions(quorum=2, patience_s=60))
    exchange._rules = rules = MemberRules(
        0, 2, 1, 5, ExchangeOptions(2, patience_s=60), time.monotonic() - 61
    )
    assert exchange.status({})["members"] == []
    rules.tick(time.monotonic() - 61)
    rules.answered(0, "instance", state(3, (5, 0, 0, 0, 0), (6, 2, 1, 8, 0)), time.monotonic() - 61)
    told = exchange.status({"tokens": 7})
    assert (told["index"], told["quorum"], told["versions"], told["rows"]) == (0, 2, [3], 7)
    assert [each["state"] for each in told["members"]] == ["training", "silent"]


def test_before_a_server_has_answered_there_are_no_members():
    assert group_status(1, 2, [], lambda member: True, {})["members"] == []
