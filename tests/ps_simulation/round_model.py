"""``RoundModel``: one fragment on its server, with integers for arrays: what the update programs of local updates do.

A group's parameters are a number in which each row of data has a digit: 1 if its progress is in. So a row that came
twice, or is missing, stays visible.
"""

import dataclasses
import math
from dataclasses import dataclass, field

from replicax._ps.local_updates.round_state import REFUSED, MemberState, RoundState

BASE = 8
NOT_FINITE = None


def rows_in(value):
    """Returns the rows whose progress is in a value. Each must be there once or not at all."""
    assert value >= 0, "a row was taken away that is not there"
    digits = oct(value)[:1:-1]
    assert not set(digits) - set("01"), f"rows are there twice or not whole: {oct(value)}"
    return {row for row, digit in enumerate(digits) if digit == "1"}


def progress_of(row):
    """Returns what a row adds to the parameters."""
    return BASE**row


def float_of(owner, number):
    """Returns a push in floating point."""
    return math.sin(owner + 100.1 * number)


def stepped(theta, momentum, slots, tokens, *, is_flush):
    """Returns outer parameters and their momentum after a round."""
    mean = 0.0
    for slot, weight in zip(slots, tokens, strict=True):
        mean += weight * slot
    mean /= sum(tokens)
    if is_flush:
        return theta - mean, momentum
    momentum = 0.5 * momentum + mean
    return theta - 0.7 * (mean + 0.5 * momentum), momentum


def replayed(model):
    """Returns the outer parameters in floating point, from the pushes of each round in another order."""
    theta = momentum = 0.0
    for (is_flush, _), pushes in zip(model.history, model.rounds, strict=False):
        slots, tokens = [0.0] * len(model.slots), [0] * len(model.slots)
        for member, owner, number, weight in sorted(pushes, key=lambda each: each[:3]):
            slots[member] += float_of(owner, number)
            tokens[member] += weight
        theta, momentum = stepped(theta, momentum, slots, tokens, is_flush=is_flush)
    return theta


@dataclass
class RoundModel:
    """The shards of a fragment.

    Attributes:
      theta: The outer parameters.
      slots: What each member has pushed in the open round.
      members: The other numbers of each member.
      history: For each round that has closed: if it was a flush, and the tokens of all members.
      rounds: For checks: the pushes of each round in the order of their arrival, the open one last, as (member, owner,
        number, tokens).
      theta_float, momentum: Outer parameters with a momentum, in floating point, where the order of sums shows.
      slots_float: As ``slots``.
    """

    theta: int
    slots: list
    members: list
    slots_float: list
    birth: int
    theta_float: float = 0.0
    momentum: float = 0.0
    version: int = 0
    is_stopping: int = 0
    history: list = field(default_factory=list)
    rounds: list = field(default_factory=lambda: [[]])

    @classmethod
    def new(cls, theta, num_members, birth):
        return cls(theta, [0] * num_members, [MemberState()] * num_members, [0.0] * num_members, birth)

    def copied(self):
        lists = ("slots", "members", "slots_float", "history")
        copies = {name: list(getattr(self, name)) for name in lists}
        return dataclasses.replace(self, **copies, rounds=[*self.rounds[:-1], list(self.rounds[-1])])

    @property
    def state(self):
        return RoundState(self.version, self.is_stopping, self.birth, tuple(self.members))

    def claim(self, member, expected, owner):
        before = self.members[member]
        if (before.owner, before.pushed) == (expected.owner, expected.pushed):
            self.members[member] = before._replace(owner=owner, pushed=0, landed=0, has_finished=0)

    def push(self, member, owner, number, after, tokens, is_last, stops, value):
        before = self.members[member]
        if (before.owner, before.pushed) != (owner, after):
            return
        changed = before._replace(pushed=number, has_finished=int(is_last), landed=REFUSED)
        if value is not NOT_FINITE:
            self.slots[member] += value
            self.slots_float[member] += float_of(owner, number)
            self.rounds[-1].append((member, owner, number, tokens))
            changed = changed._replace(landed=self.version, tokens=before.tokens + tokens)
        self.members[member] = changed
        self.is_stopping |= int(stops)

    def close(self, version, quorum, is_flush):
        """Adds all slots to the outer parameters. (The programs add their mean.) Returns True if the round closes."""
        if version != self.version or len(self.state.contributors) < quorum:
            return False
        self.theta -= sum(self.slots)
        self.history.append((bool(is_flush), tuple(member.tokens for member in self.members)))
        self.rounds.append([])
        tokens = [member.tokens for member in self.members]
        self.theta_float, self.momentum = stepped(
            self.theta_float, self.momentum, self.slots_float, tokens, is_flush=is_flush
        )
        self.slots, self.slots_float = [0] * len(self.slots), [0.0] * len(self.slots)
        self.members = [member._replace(tokens=0) for member in self.members]
        self.version += 1
        return True
