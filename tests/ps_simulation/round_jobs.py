"""Jobs that average gradients in rounds."""

from ps_simulation.coordinator import COORDINATOR
from ps_simulation.jobs import Jobs
from ps_simulation.server_task import ps
from simulation.world import Fault


class InRounds(Jobs):
    """Synchronous rounds: each has the gradients of as many functions as it should, and all compute with the same values."""

    moments = (
        ("settled", 40),
        ("job", 1),
        ("meet_worker", 6),
        ("sent", 40),
        ("apply_round", 10),
        ("renew", 10),
    )

    def draw(self):
        self.num_averaged = self.random.choice([1, 2, 2, 3])
        self.rounds = {}  # number: its functions
        self.values = {}  # function, round: what it has read last
        self.last_round = {}  # function: the round in which it was last sent

    def note_sent(self, coordinator, name, request):
        super().note_sent(coordinator, name, request)
        self.last_round[request.what] = request.header.get("round")

    def note_values(self, process, request, values):
        self.values[request["closure"][1], request["round"]] = dict(values)

    def note_round(self, coordinator, number, closures):
        assert len(set(closures)) == len(closures) == self.num_averaged, f"round {number} has {closures}"
        known = self.rounds.setdefault(number, closures)
        assert known == closures, f"round {number} has {known}, and {closures}"
        counted = {function for before in range(number) for function in self.rounds.get(before, ())}
        for function in closures:
            for key, value in self.values[function, number].items():
                got = {each for each in value if self.functions[each].round_key is not None}
                assert got == counted, (
                    f"function {function} of round {number} reads {got} of {key}, not {counted}"
                )
            assert self.settled.get(function, "nothing") is None, f"function {function} has not finished"
            assert self.last_round[function] == number, f"function {function} is of another round"

    def check_counter(self, server, counted):
        in_rounds = [function for number in sorted(self.rounds) for function in self.rounds[number]]
        of_rounds = [function for function in counted if self.functions[function].round_key is not None]
        assert sorted(of_rounds) == sorted(in_rounds), f"ps {server} has {of_rounds}, and not {in_rounds}"
        statistics = self.coordinator.job.statistics()["closures"]
        assert statistics["rounds"] == len(self.rounds)
        finished = self.due(server)
        late = statistics["gradients_dropped"] + self.coordinator.job.num_waiting_gradients
        assert len(finished) == len(in_rounds) + late, f"{len(finished)} are not {len(in_rounds)} and {late}"


class InRoundsWithServers(InRounds):
    """The same, with faults of servers too, which do not lose their data."""

    kinds_of_faults = ("worker",) * 4 + ("server",) * 12 + ("interrupt",) * 2 + ("close",)

    def faults(self):
        faults = super().faults()
        of_seed = self.random
        if of_seed.random() < 0.4:  # a server is not reached again before the coordinator gives a request up
            on, way = (
                f"apply_round {of_seed.randint(1, 6)}",
                (COORDINATOR, ps(of_seed.randrange(self.num_servers))),
            )
            at = 0.002 * of_seed.random()
            faults.append(Fault(at, "part", way, of_seed.uniform(10.0, 30.0), on=on))
            faults.append(Fault(at, "cut", way, on=on))
        return faults
