"""``IntegerStore``: what a simulated parameter server holds: counters, and ``StoreRules``, as the real store has them.

A counter is a tuple of the numbers of the functions that were added to it, in their order, so that a check can say which
one is missing or came twice. Its value is its length. A function adds to a counter and to its ``twin``, which is another
variable: someone who reads two that differ has seen half an update.
"""

from replicax._ps.store.acceptance_rules import Closure, StoreRules
from replicax._src.vocabulary.errors import InvalidArgumentError, MessageError, UnknownProgramError


def twin(key):
    """Returns the key of the counter that changes together with a counter."""
    return f"{key}, again"


def by_hand(server):
    """Returns the key of the counter of a server to which callers add."""
    return f"by hand {server}"


def both(key):
    return [key, twin(key)]


def value_in(counters, key):
    """Returns the value of a counter and of its twin, which must be equal."""
    value, other = counters[key], counters[twin(key)]
    assert value == other, f"half an update of {key}: {value} and {other}"
    return value


class IntegerStore:
    """Counters, programs, held gradients, and the rules of a store.

    Args:
      instance: A name that no other store has.
      owner: The session that it belongs to.
    """

    def __init__(self, instance, owner=None):
        self.rules = StoreRules(instance)
        self._drop_all()
        if owner is not None:
            self.rules.hello(owner)

    @property
    def instance(self):
        return self.rules.instance

    def hello(self, incarnation):
        """Gives the store to this coordinator. Data of another one is dropped."""
        if self.rules.hello(incarnation):
            self._drop_all()

    def leave(self, instance):
        """Drops everything, and belongs to no coordinator."""
        self.rules.leave(instance)
        self._drop_all()

    def answer(self, request):
        """Executes a request; see ``Store.answer``."""
        self.rules.check(request["incarnation"])
        operation = getattr(self, f"_{request['op']}", None)
        if operation is None:
            raise MessageError(f"A parameter server has no operation {request['op']!r}.")
        return operation(request)

    # --- operations ---------------------------------------------------------------------------------

    def _create(self, request):
        number = Closure(*request["number"])
        if self.rules.has_done(number, request["low"]):
            return {"duplicate": True}
        for key in request["keys"]:
            if key not in self.counters:
                self.put(key, self.rules.created(), ())
        self.rules.did(number)
        return {}

    def _find(self, request):
        return {"found": [key for key in request["keys"] if key in self.counters]}

    def _program(self, request):
        self.programs.add(request["digest"])
        return {}

    def _step(self, request):
        closure = None if request["closure"] is None else Closure(*request["closure"])
        gradients, low = request.get("gradients"), request.get("low", 0)
        for digest in (request.get("program"), gradients and gradients["program"]):
            if digest is not None and digest not in self.programs:
                raise UnknownProgramError(f"The parameter server has no program {digest}.", digest)
        for key in request["pull"]:
            self._counter(key)
        self.rules.raise_low(closure, low)
        if gradients is not None and self.rules.holds(closure, gradients["round"]):
            of_round = self.gradients.setdefault(gradients["round"], {})
            of_round.setdefault(closure.number, gradients["keys"])
        is_duplicate = False
        if request.get("program") is not None:
            is_duplicate = self.rules.has_done(closure, low)
            if not is_duplicate:
                number = request["mark"] if closure is None else closure.number
                if closure is None:
                    twice = [key for key in request["keys"] if number in self._counter(key)]
                    assert not twice, f"what a caller has added comes twice: {number} in {twice}"
                self._add([number], request["keys"])
                self.rules.did(closure)
        if request.get("only_apply"):
            return {"duplicate": is_duplicate}
        pulled, known = request["pull"], request.get("known", {})
        versions = {key: (self.instance, self.versions[key]) for key in pulled}
        values = {
            key: self.counters[key] for key in pulled if self.rules.is_new(self.versions[key], known.get(key))
        }
        truth = {key: self.counters[key] for key in pulled}  # for checks
        return {"duplicate": is_duplicate, "versions": versions, "values": values, "truth": truth}

    def _apply(self, request):
        number, low = Closure(*request["round"]).round_closure, request["low"]
        for other in [other for other in self.gradients if other < low]:
            del self.gradients[other]
        if self.rules.has_done(number, low):
            return {"duplicate": True}
        held = self.gradients.pop(number.number, {})
        taken = [closure for closure in request["closures"] if closure in held]
        if taken:
            self._add(taken, held[taken[0]])
        self.rules.did(number)
        return {"duplicate": False}

    # --- contents -----------------------------------------------------------------------------------

    def put(self, key, version, value):
        """Sets a counter that the store did not have."""
        self.counters[key], self.versions[key] = value, version

    def _counter(self, key):
        if key not in self.counters:
            raise InvalidArgumentError(f'There is no shard "{key}" on this parameter server.')
        return self.counters[key]

    def _add(self, numbers, keys):
        for key in keys:
            self._counter(key)
        for key in keys:
            self.put(key, self.rules.changed(self.versions[key]), (*self.counters[key], *numbers))
        self.num_updates += 1

    def _drop_all(self):
        self.counters, self.versions = {}, {}
        self.programs = set()
        self.gradients = {}  # round: closure: its keys
        self.num_updates = 0

    # --- for a snapshot, or another store -----------------------------------------------------------

    def described(self):
        """Returns everything but the counters."""
        return {
            **self.rules.described(),
            "updates": self.num_updates,
            "versions": dict(self.versions),
            "programs": sorted(self.programs),
            "num_held_gradients": sum(map(len, self.gradients.values())),
        }

    def take(self, described, counters, instance):
        """Replaces everything by what was ``described``, with these counters and no program, as another instance."""
        self._drop_all()
        self.rules.take(described, instance)
        self.counters, self.versions = dict(counters), dict(described["versions"])
        self.num_updates = described["updates"]
