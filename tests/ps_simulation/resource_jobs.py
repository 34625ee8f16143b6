"""Jobs whose functions take datasets that each worker makes, and are traced for what a worker meets."""

import re

from ps_simulation.jobs import Jobs
from ps_simulation.worker_task import worker
from replicax._ps.job.events_in import ResourceAdded, ResourceDropped
from replicax._ps.job.resource_rules import MAX_DEATHS
from replicax._src.vocabulary.errors import CancelledError
from simulation.world import Fault

DATASETS = ("dataset 0", "dataset 1")
BROKEN = "dataset of some"
DEADLY = "dataset that kills"
MOST_KILLED = 3 * MAX_DEATHS
FAILS_ON = re.compile(r"cannot be made on ((worker \d+) process \d+)")


class WithDatasets(Jobs):
    """Each worker makes datasets; one of them cannot be made on some workers."""

    most_kept_of_task = 30  # requests to make datasets, to a worker that is back

    def drawn(self):
        function = super().drawn()
        of_seed = self.random
        if of_seed.random() < 0.6:
            function.resources = (of_seed.choice(DATASETS),)
            if of_seed.random() < 0.5:
                function.signature = of_seed.choice(["short", "long"])
        elif self.kinds is self.wild and of_seed.random() < 0.5:
            function.resources = (of_seed.choice([BROKEN, self.deadly]),)
        return function

    def draw(self):
        self.deadly = self.random.choice([BROKEN, BROKEN, DEADLY])
        self.num_made = 0  # how often the first worker was to make the broken dataset
        self.num_killed = 0

    @property
    def join_s(self):
        """A dataset that kills workers is left out after some of them, and each new worker first makes all datasets."""
        num_makings = MAX_DEATHS + 1 if self.deadly == DEADLY else 0
        return super().join_s + num_makings * len((*DATASETS, BROKEN, DEADLY)) * self.making_s

    def caller(self, coordinator):
        for name in dict.fromkeys((*DATASETS, BROKEN, self.deadly)):
            coordinator.give(ResourceAdded(name, "dataset", f"make {name}"))
        yield from self.tried(coordinator.wait("resource", DATASETS[0]))
        yield from super().caller(coordinator)

    def ended(self, coordinator):
        for name in DATASETS:
            coordinator.give(ResourceDropped(name))
        yield from super().ended(coordinator)

    def resource_fails(self, name, index):
        """Each second process of a worker fails."""
        if name != BROKEN or index != 0:
            return False
        self.num_made += 1
        if self.num_made % 2:
            self.world.moment("not made")
        return self.num_made % 2 == 1

    def faults(self):
        faults, of_seed = super().faults(), self.random
        if self.kinds is self.wild:
            for number in range(1, 4):
                at = of_seed.uniform(0.0, 0.5)
                faults.append(
                    Fault(at, "restart", (worker(0),), 0.1 * of_seed.random(), on=f"not made {number}")
                )
        return faults

    def resource_kills(self, name):
        self.num_killed += name == DEADLY
        assert self.num_killed < MOST_KILLED, f"{name} has killed {self.num_killed} workers"
        return name == DEADLY

    def note_settled(self, coordinator, action):
        super().note_settled(coordinator, action)
        if isinstance(action.error, CancelledError):  # it names the failure of another function, before
            return
        if (found := FAILS_ON.search(str(action.error))) is not None:
            instance = coordinator.instance_of(found[2])
            assert instance in (None, found[1]), f"an error of {found[1]} counts for {instance}"

    def check_errors(self):
        unusable = (BROKEN,), (DEADLY,)
        broken = {number for number, each in enumerate(self.functions) if each.resources in unusable}
        settled = self.settled
        self.settled = {number: error for number, error in settled.items() if number not in broken}
        super().check_errors()
        self.settled = settled
