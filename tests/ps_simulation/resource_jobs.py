"""Jobs whose functions take datasets that each worker makes, and are traced for what a worker meets."""

from ps_simulation.jobs import Jobs
from replicax._ps.job.events_in import ResourceAdded, ResourceDropped

DATASETS = ("dataset 0", "dataset 1")
BROKEN = "dataset of some"


class WithDatasets(Jobs):
    """Each worker makes datasets; one of them cannot be made on some workers."""

    def drawn(self):
        function = super().drawn()
        of_seed = self.random
        if of_seed.random() < 0.6:
            function.resources = (of_seed.choice(DATASETS),)
            if of_seed.random() < 0.5:
                function.signature = of_seed.choice(["short", "long"])
        elif self.kinds is self.wild and of_seed.random() < 0.1:
            function.resources = (BROKEN,)
        return function

    def caller(self, coordinator):
        for name in (*DATASETS, BROKEN):
            coordinator.give(ResourceAdded(name, "dataset", f"make {name}"))
        yield from self.tried(coordinator.wait("resource", DATASETS[0]))
        yield from super().caller(coordinator)

    def ended(self, coordinator):
        for name in DATASETS:
            coordinator.give(ResourceDropped(name))
        yield from super().ended(coordinator)

    def resource_fails(self, name, index):
        return name == BROKEN and index == 0

    def check_errors(self):
        broken = {number for number, each in enumerate(self.functions) if each.resources == (BROKEN,)}
        settled = self.settled
        self.settled = {number: error for number, error in settled.items() if number not in broken}
        super().check_errors()
        self.settled = settled
