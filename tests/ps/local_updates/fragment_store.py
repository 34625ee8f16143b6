"""``FragmentStore``: one fragment in a real ``Store``, with the requests of groups."""

import numpy as np

from asked_store import ME, ask, send
from replicax._ps.local_updates.fragment_programs import FragmentPrograms, state_of
from replicax._ps.local_updates.int8_blocks import encoded
from replicax._ps.local_updates.round_state import MemberState
from replicax._ps.store.store import Store

NOBODY = MemberState()


class FragmentStore:
    """A store with one fragment of ``size`` values.

    Attributes:
      rate, decay: Those of the outer optimizer.
    """

    def __init__(self, size, num_members, *, is_compressed=False, **update):
        self.programs = FragmentPrograms("p", size, num_members, is_compressed=is_compressed, **update)
        self.is_compressed = is_compressed
        self.rate, self.decay = 1.0, 0.0
        self.store = Store()
        self.store.hello(ME)
        for program in (self.programs.claim, self.programs.push, self.programs.close):
            send(self.store, program)
        described = []
        for name, (key, shape, dtype) in self.programs.shards.items():
            initial = "array"
            if name != "rounds":
                send(self.store, zeros := self.programs.initial(name))
                initial = zeros.digest
            described.append({"key": key, "shape": list(shape), "dtype": dtype.name, "initial": initial})
        ask(self.store, "create", [self.programs.first_rounds(5)], shards=described, if_absent=True)

    def begin(self, theta, *, rate=1.0, decay=0.0):
        """Begins again with these outer parameters. Returns itself."""
        self.rate, self.decay = rate, decay
        values = {name: np.zeros(shape, dtype) for name, (_, shape, dtype) in self.programs.shards.items()}
        values |= {"theta": np.asarray(theta, np.float32), "rounds": self.programs.first_rounds(5)}
        ask(self.store, "assign", [*values.values()], keys=[self.programs.shards[name][0] for name in values])
        return self

    def claim(self, member, owner, expected=NOBODY):
        return self._run(self.programs.claim, self.programs.claim_operands(member, expected, owner))

    def push(self, member, owner, number, after, tokens, values, **flags):
        values = np.asarray(values, np.float32)
        sent = encoded(values) if self.is_compressed else [values]
        operands = self.programs.push_operands(member, owner, number, after, tokens, sent, **flags)
        return self._run(self.programs.push, operands)

    def close(self, version, quorum=1, *, is_flush=False):
        operands = self.programs.close_operands(version, quorum, self.rate, self.decay, is_flush=is_flush)
        return self._run(self.programs.close, operands)

    def read(self, name):
        """Returns a copy of a shard."""
        key = self.programs.shards[name][0]
        (value,) = ask(self.store, "step", closure=None, pull=[[key, None]]).arrays
        return np.array(value)

    @property
    def state(self):
        return state_of(self.read("rounds"))

    @property
    def bits(self):
        """The bytes of all shards."""
        return {name: self.read(name).tobytes() for name in self.programs.shards}

    def _run(self, program, operands):
        """Runs a program. Returns the state of the same moment."""
        pull = [[self.programs.shards["rounds"][0], None]]
        answer = ask(self.store, "step", operands, closure=None, program=program.digest, pull=pull)
        return state_of(np.array(answer.arrays[0]))
