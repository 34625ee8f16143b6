"""The real ``Store`` beside a small model over the same rules, whose values are integers: equal answers, from seeds.

Half of the scenarios have one server, with snapshots, restarts and rewinds. The other half have two copies of a group:
whatever joins, is dropped or is promoted, they answer as one store does.
"""

import copy
import math
import random

import numpy as np
import pytest

from exported import update_program
from group_network import GROUP, ME, Network
from replicax._ps.store.acceptance_rules import Closure, StoreRules, absent
from replicax._ps.store.keeper_rules import KeeperRules, Progress
from replicax._ps.store.snapshot_keeper import SnapshotKeeper
from replicax._ps.store.snapshot_plan import RecordedShard, ShardSize, write_plan
from replicax._ps.store.snapshot_rules import continued, is_of_epoch, next_number, removable, restore_order
from replicax._ps.store.store import Store
from replicax._ps.store.updates import CompiledUpdate
from replicax._ps.transport.messages import Message
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError, SnapshotError
from replicax.errors import UnavailableError

KEYS = "abc"
NUM_SCENARIOS, NUM_REQUESTS = 200, 16
ZERO = np.zeros((), np.float32)


@pytest.fixture(scope="module")
def programs():
    """For each key, a program that adds to its value."""
    return {key: update_program(lambda x, by: (x + by,), [key], [0], ZERO, ZERO) for key in KEYS}


@pytest.fixture
def compiled_once(monkeypatch):
    found = {}

    def compiled(program, device):
        if program.digest not in found:
            found[program.digest] = CompiledUpdate(program, device)
        return found[program.digest]

    monkeypatch.setattr("replicax._ps.store.store.CompiledUpdate", compiled)


class Model:
    """A store of integers."""

    def __init__(self):
        self.rules = StoreRules("")
        self.rules.hello(ME)
        self.values, self.numbers, self.programs = {}, {}, set()

    def make(self, keys, call, low, if_absent):
        if self.rules.has_done(call, low):
            return {"duplicate": True}, []
        held = dict.fromkeys(self.values, "")
        new = [(key, "") for key in keys]
        for key, is_new in zip(
            keys, absent(new, held, lambda *_: InvalidArgumentError("it exists"), if_absent=if_absent)
        ):
            if is_new:
                self.values[key], self.numbers[key] = 0, self.rules.created()
        self.rules.did(call)
        return {}, []

    def push(self, key, by, call, low, known):
        self._needs(key in self.programs, "UnknownProgramError")
        self._needs(key in self.values, "InvalidArgumentError")
        is_duplicate = self.rules.has_done(call, low)
        if not is_duplicate:
            self._change(key, self.values[key] + by)
            self.rules.did(call)
        return self._read([key], known, is_duplicate)

    def pull(self, keys, known):
        self._needs(all(key in self.values for key in keys), "InvalidArgumentError")
        return self._read(keys, known, False)

    def assign(self, key, value, call, low):
        if self.rules.has_done(call, low):
            return {"duplicate": True}, []
        self._needs(key in self.values, "InvalidArgumentError")
        self._change(key, value)
        self.rules.did(call)
        return {}, []

    def drop(self, key):
        self.values.pop(key, None)
        self.numbers.pop(key, None)
        return {}, []

    def _read(self, keys, known, is_duplicate):
        values = [self.values[key] for key in keys if self.rules.is_new(self.numbers[key], known.get(key))]
        versions = [[self.rules.instance, self.numbers[key]] for key in keys]
        return {"versions": versions, "duplicate": is_duplicate}, values

    def _change(self, key, value):
        self.values[key], self.numbers[key] = value, self.rules.changed(self.numbers[key])

    def _needs(self, is_so, error):
        if not is_so:
            raise Refused(error)


class Refused(Exception):
    """A refusal of the model, with the name of the error."""


def name_of(error):
    return str(error) if isinstance(error, Refused) else type(error).__name__


class Scenario:
    """Requests to the real server and to the model, from one seed."""

    def __init__(self, seed, programs):
        self.random, self.programs = random.Random(seed), programs
        self.model = Model()
        self.known = {}  # the versions that the client has
        self.next_call = self.low = 0
        self.log = []

    def run(self, num, events):
        for _ in range(num):
            getattr(self, self.random.choice(events))()

    def compare(self, request, ask, model):
        self.log.append(request)
        answers = []
        for call in (ask, model):
            try:
                answers.append(call())
            except (ReplicaxError, Refused) as error:
                answers.append((name_of(error), []))
        assert answers[0] == answers[1], f"{self.log}: the store answers {answers[0]}, the model {answers[1]}"
        return answers[0]

    def request(self, op, request, model, arrays=(), **header):
        def ask():
            arrays_in = [np.asarray(each, np.float32) for each in arrays]
            answer = self.ask(Message({"op": op, "incarnation": ME, **header}, arrays_in))
            return dict(answer.header), [int(each) for each in answer.arrays]

        self.model.rules.instance = self.instance
        return self.compare((op, *request), ask, lambda: model(*request))

    def call(self):
        """The number of a new call, or of an earlier one; sometimes lower ones have ended."""
        if self.random.random() < 0.7:
            self.next_call += 1
        if self.random.random() < 0.1:
            self.low = max(self.low, self.next_call - 3)
        return Closure(ME, max(0, self.next_call - self.random.choice([0, 0, 1, 2])))

    # --- requests ---------------------------------------------------------------------------------------------

    def make(self):
        keys = self.random.sample(KEYS, self.random.choice([1, 2]))
        call, if_absent = self.call(), self.random.random() < 0.7
        shards = [{"key": key, "shape": [], "dtype": "float32", "initial": "array"} for key in keys]
        number = {"number": [call.incarnation, call.number], "low": self.low}
        request = (keys, call, self.low, if_absent)
        self.request(
            "create", request, self.model.make, [0] * len(keys), shards=shards, if_absent=if_absent, **number
        )

    def push(self):
        key, by, call = self.random.choice(KEYS), self.random.randrange(1, 9), self.call()
        header = {"closure": [call.incarnation, call.number], "low": self.low, "pull": self._known([key])}
        request = (key, by, call, self.low, dict(self.known))
        answer = self.request(
            "step", request, self.model.push, [by], program=self.programs[key].digest, **header
        )
        self._learn([key], answer)
        if answer[0] == "UnknownProgramError":
            self.send(key)

    def send(self, key):
        program = self.programs[key]
        header = {
            "op": "program",
            "incarnation": ME,
            "digest": program.digest,
            "described": program.described(),
        }
        self.ask(Message(header, [np.frombuffer(program.blob, np.uint8)]))
        self.model.programs.add(key)

    def pull(self):
        keys = self.random.sample(KEYS, self.random.choice([1, 2]))
        request = (keys, dict(self.known))
        answer = self.request("step", request, self.model.pull, pull=self._known(keys), program=None)
        self._learn(keys, answer)

    def assign(self):
        key, value, call = self.random.choice(KEYS), self.random.randrange(100), self.call()
        header = {"keys": [key], "number": [call.incarnation, call.number], "low": self.low}
        self.request("assign", (key, value, call, self.low), self.model.assign, [value], **header)

    def drop(self):
        key = self.random.choice(KEYS)
        self.request("drop", (key,), self.model.drop, keys=[key])

    def _known(self, keys):
        return [[key, self.known.get(key)] for key in keys]

    def _learn(self, keys, answer):
        if isinstance(answer[0], dict) and self.random.random() < 0.8:
            self.known.update(zip(keys, map(tuple, answer[0]["versions"])))


class OneServer(Scenario):
    """A server that keeps snapshots, and is restarted."""

    EVENTS = (
        *["make"] * 3,
        *["push"] * 5,
        *["pull"] * 3,
        "assign",
        "drop",
        *["snapshot"] * 3,
        "restore",
        "restart",
    )

    def __init__(self, seed, programs, folder):
        super().__init__(seed, programs)
        self.folder = folder
        self.files, self.last = (
            {},
            None,
        )  # number: chain, epoch and contents; the number that the next may continue
        self.start()
        self.epoch = 0

    def start(self):
        self.store = Store()
        self.keeper = SnapshotKeeper(self.store, self.folder, math.inf)
        self.store.hello(ME)
        self.keeper_model = KeeperRules(math.inf)
        self.keeper_model.start(0.0, Progress("", 0, 0), self.keeper.restored)
        for each in (self.keeper, self.keeper_model):
            each.begin(ME)

    @property
    def instance(self):
        return self.store.instance

    def ask(self, message):
        return self.store.answer(message)

    def snapshot(self):
        self.epoch = max(1, self.epoch + self.random.choice([1, 1, 1, 0, -1]))
        epoch, kept = self.epoch, self.random.randrange(self.epoch)

        def write():
            return self.keeper.take(epoch, kept)["is_base"]

        def model():
            self.keeper_model.begins(self.keeper_model.requested_snapshot(epoch))
            return self._write(epoch, kept)

        self.compare(("snapshot", epoch, kept), write, model)

    def _write(self, epoch, kept_epoch):
        before = None if self.last is None else self.files[self.last]
        sizes = [ShardSize(key, "", number, 1, 4, None) for key, number in self.model.numbers.items()]
        recorded = [None if before is None else _recorded(before[2], size.key) for size in sizes]
        plan = write_plan(sizes, recorded, None if before is None else before[0])
        new = sum(4 for size, record in zip(sizes, recorded) if plan.is_base or size.changed(record) is None)
        number = next_number(self.files)
        chain = continued(None if plan.is_base else before[0], number, new)
        self.files[number] = chain, epoch, copy.deepcopy(self.model)
        of_epoch = [each[0] for _, each in sorted(self.files.items()) if kept_epoch and each[1] == kept_epoch]
        kept = of_epoch[-1] if of_epoch else None
        for gone in removable(list(self.files), None if before is None else before[0], chain, kept):
            del self.files[gone]
        self.last = number
        return plan.is_base

    def restore(self):
        epoch = self.random.randrange(1, self.epoch + 2)

        def restored():
            told = self.keeper.restore(epoch)
            return None if told is None else (told["epoch"], sorted(told["keys"]))

        def model():
            self.keeper_model.begins(self.keeper_model.requested_restore(epoch))
            return self._restore(epoch)

        self.compare(("restore", epoch), restored, model)

    def _restore(self, epoch):
        for number in restore_order(self.files):
            if is_of_epoch(self.files[number][1], epoch):
                self.model = copy.deepcopy(self.files[number][2])
                self.model.programs = set()
                self.last = number
                return self.files[number][1], sorted(self.model.values)
        if self.files:
            raise SnapshotError("none is of the epoch")
        return None

    def restart(self):
        self.keeper.end()
        if not self.files:
            self.model, self.last = Model(), None
        self.start()
        told = self.keeper.restored
        restored = lambda: None if told is None else (told["epoch"], sorted(told["keys"]))  # noqa: E731
        self.compare(("restart",), restored, lambda: self._restore(None))
        assert [path.name for path in sorted(self.folder.glob("*.rxps"))] == [
            f"snapshot-{number:010}.rxps" for number in sorted(self.files)
        ]


def _recorded(model, key):
    return RecordedShard("", model.numbers[key], 1, False) if key in model.numbers else None


class TwoCopies(Scenario):
    """A group on two servers, one of which is the primary."""

    EVENTS = (
        *["make"] * 3,
        *["push"] * 5,
        *["pull"] * 3,
        "assign",
        "drop",
        "lose",
        *["join"] * 2,
        "promote",
        "stranger",
    )

    def __init__(self, seed, programs):
        super().__init__(seed, programs)
        self.network, self.epoch, self.primary, self.backup = Network(), 1, 0, 1

    @property
    def instance(self):
        return self.network.servers[self.primary]._copies[GROUP]._state.store.instance

    def ask(self, message):
        header = {**message.header, "group": GROUP}
        return self.network.servers[self.primary].answer(Message(header, message.arrays))

    def view(self, **how):
        self.log.append((self.epoch + 1, self.primary, self.backup))
        self.epoch += 1
        self.network.view(self.epoch, self.primary, self.backup, **how)

    def lose(self):
        if self.backup is not None:
            self.backup = None
            self.view()

    def join(self):
        if self.backup is None:
            self.backup = 1 - self.primary
            self.view(is_joining=True, to=(self.backup, self.primary))
            self.network.until_in_sync(self.primary)

    def promote(self):
        if self.backup is not None:
            self.primary, self.backup = self.backup, None
            self.view(to=(self.primary,))

    def stranger(self):
        header = {"op": "find", "incarnation": ME, "group": GROUP, "keys": ["a"]}
        with pytest.raises(UnavailableError, match="does not serve"):
            self.network.servers[1 - self.primary].answer(Message(header))

    def close(self):
        if self.backup is not None:
            assert self.ask(Message({"op": "checksum", "incarnation": ME})).header["is_on_two"], self.log
        for server in self.network.servers:
            server.close()


def test_one_store_answers_as_the_rules_do(programs, compiled_once, tmp_path):
    for seed in range(NUM_SCENARIOS // 2):
        scenario = OneServer(seed, programs, tmp_path / str(seed))
        scenario.run(NUM_REQUESTS, OneServer.EVENTS)
        scenario.keeper.end()


def test_two_copies_answer_as_one_store(programs, compiled_once):
    for seed in range(NUM_SCENARIOS // 2):
        scenario = TwoCopies(seed, programs)
        scenario.run(NUM_REQUESTS, TwoCopies.EVENTS)
        scenario.close()
