"""Replacements without processes: one thread trains as all live workers do, and gives its state at each boundary; then
it trains as the replacement of a worker does, which gets one of these states."""

import contextlib
import copy
import json
import re

import numpy as np

from replicax._src.checkpoint import agreement, boundary_keeper
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.control.standing import Moment, Topic
from replicax._src.preemption import handler
from surviving_members import Members, strategy_of


class Admission:
    """``cluster/admission.py`` of one worker.

    Args:
      gift: The state that this replacement gets; None for a live worker.
      is_asked: True if replacements wait at each boundary.
    """

    def __init__(self, gift=None, *, is_asked=True):
        self.is_newcomer, self.is_asked = gift is not None, is_asked
        self.gift, self.gifts = gift, []
        self.versions = []
        self.survivors = None

    def admit(self, take):
        description, arrays = take()
        self.gifts.append((json.dumps(description), [np.array(array) for array in arrays]))
        self.versions.append(self.survivors.version)

    def counts_before(self, version):
        """The counts of the manager before it saves after the step with this number."""
        earlier = [gift for gift, at in zip(self.gifts, self.versions, strict=True) if at < version]
        return json.loads(earlier[-1][0])["counts"]

    def enter(self):
        assert self.is_newcomer
        self.is_newcomer = False
        text, arrays = self.gift
        return json.loads(text), copy.deepcopy(arrays)


class Survivors(Members):
    """Counts the steps with rounds, and computes all replicas here."""

    version = 0
    admission = None

    def run(self, step, what):
        if step.reductions:
            assert not self.admission.is_newcomer, "a step before it has entered"
            self.version += 1
            self.admission.is_solo = False
        return super().run(step, what)


class Peers:
    """``Peers`` of a live worker, or of a replacement."""

    def __init__(self, survivors, admission, number, num_tasks):
        self.names, self.number = tuple(f"worker {i}" for i in range(num_tasks)), number
        self.agreed, self.tolerates_failures, self.min_workers = [], True, 1
        self.admission, self.survivors = admission, survivors
        self.last_entry = None
        self.keys = []
        self._counts = {}

    def __len__(self):
        return len(self.names)

    @property
    def is_solo(self):
        return self.admission.is_solo

    @property
    def members(self):
        return (self.number,)

    @property
    def is_leader(self):
        return not self.is_solo

    def moment(self):
        return Moment(self.survivors.version, self.is_solo)

    def gather(self, topic, value, what="", **_):
        version = self.survivors.version
        names = re.sub(r"_\d+", "", str([name for name, _ in value])) if topic == "values" else ""
        key = (version, topic + names, self._counts.setdefault((version, topic), 0))
        self._counts[version, topic] += 1
        self.keys.append(key)
        if topic == "checkpoint counts":
            return GatheredValues(
                [[False, self.counts_of_others(version)], value], [0, self.number], self.names, self.number
            )
        return GatheredValues([json.loads(json.dumps(value))], [self.number], self.names, self.number)

    def gather_once(self, key, value, what="", **_):
        return GatheredValues([json.loads(json.dumps(value))], [self.number], self.names, self.number)

    def agree(self, name, text):
        self.agreed.append((name, text))

    def serve(self):
        pass

    def check(self):
        pass

    def new_topic(self, name):
        return Topic(name, self.moment())

    def send_about_saving(self, message):
        pass

    def listen_for_saving(self, listener):
        return lambda: None

    @contextlib.contextmanager
    def reading(self, topic):
        yield

    def note_reads(self, number):
        pass

    @contextlib.contextmanager
    def stepping(self, name):
        yield


def strategy_as(monkeypatch, admission, *, number, num_tasks, version=0):
    """Returns a strategy of a live worker, or of a replacement, which has entered with this version."""
    survivors = Survivors(num_tasks)
    survivors.version, survivors.admission = version, admission
    admission.survivors, admission.is_solo = survivors, admission.is_newcomer
    peers = Peers(survivors, admission, number, num_tasks)
    strategy = strategy_of(survivors, monkeypatch, peers=peers)
    for module in (agreement, boundary_keeper, handler):
        monkeypatch.setattr(module, "joined_peers", lambda: peers)
    monkeypatch.setattr(agreement, "_checked", {})
    monkeypatch.setattr(agreement, "_given", {})
    return strategy, peers
