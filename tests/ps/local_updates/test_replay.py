"""A run of groups on a real ``Store`` repeats bit for bit from its log, whatever was late or killed.

The log has for each process of a group: the steps at which it took a push or adopted a version, and for each push the
version that has it. The replay runs the groups in another order, as far as each can go.
"""

import random

import numpy as np
import pytest
from fragment_store import FragmentStore

from replicax._ps.local_updates import exchange_actions as actions
from replicax._ps.local_updates.fragment_rules import ExchangeOptions
from replicax._ps.local_updates.member_rules import MemberRules
from replicax._ps.local_updates.unmerged_progress import UnmergedProgress

SIZE, NUM_GROUPS, EVERY = 300, 3, 4


def trained(w, owner, step):
    """One step of training, whose data are those of the process and the step."""
    noise = np.random.default_rng([owner, step]).normal(size=SIZE).astype(np.float32)
    return w - np.float32(0.05) * np.tanh(w + noise)


class Values:
    """The parameters of one process, with the arithmetic of ``UnmergedProgress``."""

    def __init__(self, owner):
        self.owner, self.step = owner, 0
        self.w = np.zeros(SIZE, np.float32)
        self.progress = UnmergedProgress(self.w)

    def train_to(self, step):
        while self.step < step:
            self.w = trained(self.w, self.owner, self.step)
            self.step += 1

    def take(self, number):
        return self.progress.take(number, self.w)

    def adopt(self, outer, **how):
        self.w = self.progress.adopt(self.w, outer, **how)


class Running:
    """One process of a group in the first run. It writes the log."""

    def __init__(self, member, owner, options, now):
        self.member, self.values = member, Values(owner)
        self.rules = MemberRules(member, NUM_GROUPS, 1, owner, options, now)
        self.log, self.raw, self.landed = [], {}, {}
        self.request, self.outer, self.is_done = None, None, False

    def do(self, some):
        for action in some:
            match action:
                case actions.TakeProgress(_, number):
                    self.raw[number] = self.values.take(number)
                    self.log.append(("take", self.values.step, number, None))
                case actions.AdoptOuter(_, _, version, keeps, returns, drops):
                    how = {"keeps": keeps, "returns": returns, "drops": drops}
                    self.values.adopt(self.outer, **how)
                    self.log.append(("adopt", self.values.step, version, how))
                case actions.NoteLanding(_, number, version):
                    self.landed[number] = version
                case actions.ExchangeDone():
                    self.is_done = True
                case _:
                    self.request = action

    def train(self, now):
        self.values.train_to(self.values.step + 1)
        if self.values.step % EVERY == 0:
            self.do(self.rules.boundary(0, 7 + self.member, now))

    def serve(self, store, tokens, now):
        """Carries out the request in flight."""
        request, self.request = self.request, None
        owner = self.values.owner
        match request:
            case actions.ClaimSlot(_, expected):
                state = store.claim(self.member, owner, expected)
            case actions.SendPush(_, number, after, weight, is_last, stops):
                tokens[owner, number] = weight
                push = self.member, owner, number, after, weight, self.raw[number]
                state = store.push(*push, is_last=is_last, stops=stops)
            case actions.SendClose(_, version, quorum, is_flush):
                state = store.close(version, quorum, is_flush=is_flush)
            case actions.ReadRound() | actions.FetchOuter():
                state, self.outer = store.state, store.read("theta")
        self.do(self.rules.answered(0, "a", state, now))


def run(seed, store):
    """Runs groups whose requests are late, and some of which are killed. Returns all processes and the weights."""
    of_seed, now = random.Random(seed), 0.0
    options = ExchangeOptions(quorum=2, grace_s=4.0, patience_s=50.0)
    live = [Running(member, 10 + member, options, now) for member in range(NUM_GROUPS)]
    everyone, tokens, kills = (
        list(live),
        {},
        {of_seed.randrange(60, 200): of_seed.randrange(3) for _ in range(2)},
    )
    for turn in range(4000):
        now += 0.2
        if turn in kills:
            member = kills[turn]
            live[member] = Running(member, 20 + len(everyone), options, now)
            everyone.append(live[member])
        group = of_seed.choice(live)
        if group.rules.has_begun and of_seed.random() < 0.5 and group.values.step < 40:
            group.train(now)
            if group.values.step == 40:
                group.do(group.rules.finish(now))
        elif group.request is not None and of_seed.random() < 0.7:
            group.serve(store, tokens, now)
        elif not group.is_done:
            group.do(group.rules.tick(now))
        if all(each.is_done for each in live):
            return everyone, tokens
    raise AssertionError("the run does not end")


def replayed(everyone, tokens, history, store):
    """Repeats a run from its log, the groups in another order. Returns the parameters of all processes."""
    again = {each.values.owner: Values(each.values.owner) for each in everyone}
    logs = {each.values.owner: list(each.log) for each in everyone}
    landed = {
        (each.values.owner, number): version for each in everyone for number, version in each.landed.items()
    }
    outer, taken = {0: store.read("theta")}, {}
    members = {each.values.owner: each.member for each in everyone}
    pushed = {}
    for member in range(NUM_GROUPS):
        store.claim(member, 1 + member)
    while True:
        for owner in reversed(again):
            values, log = again[owner], logs[owner]
            while log and not (log[0][0] == "adopt" and log[0][2] not in outer):
                kind, step, number, how = log.pop(0)
                values.train_to(step)
                if kind == "take":
                    taken[owner, number] = values.take(number)
                else:
                    values.adopt(outer[number], **how)
        if not any(logs.values()):
            break
        version = len(outer)
        those = sorted(key for key, entered in landed.items() if entered == version)
        assert those, "nothing more can be repeated"
        assert all(key in taken for key in those), "a push is missing in the log"
        for key in sorted(those, key=lambda key: (members[key[0]], key)):
            after = pushed.get(members[key[0]], 0)
            pushed[members[key[0]]] = after + 1
            store.push(members[key[0]], 1 + members[key[0]], after + 1, after, tokens[key], taken[key])
        store.close(version - 1, 1, is_flush=bool(history[version % 64, 1]))
        outer[version] = store.read("theta")
    return again


@pytest.fixture(scope="module")
def store():
    return FragmentStore(SIZE, NUM_GROUPS, is_compressed=True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.rest) for seed in (1, 2))])
def test_run_with_kills_and_lateness_repeats_bit_for_bit_from_its_log(store, seed):
    theta = np.random.default_rng(seed).normal(size=SIZE)
    everyone, tokens = run(seed, store.begin(theta, rate=0.7, decay=0.5))
    first, history = store.bits, store.read("history")
    assert len(everyone) > NUM_GROUPS
    assert history[:, 0].max() > 5
    again = replayed(everyone, tokens, history, store.begin(theta, rate=0.7, decay=0.5))
    for each in everyone:
        last = each.log[-1][1]
        if each.is_done or each.values.step == last:
            assert again[each.values.owner].w.tobytes() == each.values.w.tobytes()
    for name in ("theta", "momentum"):
        assert store.read(name).tobytes() == first[name]
    assert np.array_equal(store.read("history"), history)
