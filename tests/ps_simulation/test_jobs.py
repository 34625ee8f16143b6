"""A job does each function once, whatever fails, in any order of events: seeds of the simulated world."""

import pytest

from ps_simulation.container_lengths import lengths_of
from ps_simulation.copied_jobs import BothLost, TwoCopies
from ps_simulation.jobs import Jobs, LostServers, PlainWorkers
from ps_simulation.resource_jobs import WithDatasets
from ps_simulation.round_jobs import InRounds, InRoundsWithServers
from ps_simulation.server_task import ps
from ps_simulation.snapshot_jobs import Continued, Rewinds
from replicax._ps.job.report import NUM_EVENTS
from simulation import runs


# The seeds after a range each find a fault that no seed in it finds: one of tools/planted_faults_servers.toml, or one that was real (436).
@pytest.mark.parametrize(
    ("scenario", "seeds"),
    [
        (PlainWorkers, (*range(60), 65, 147)),
        (LostServers, range(0, 30)),
        (WithDatasets, range(0, 40)),
        (InRounds, range(0, 40)),
        (InRoundsWithServers, (*range(20), 78)),
        (Continued, range(60, 100)),
        (Rewinds, (*range(50), 73, 436)),
        (TwoCopies, range(0, 30)),
        (BothLost, (*range(33, 63), 72)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_function_takes_effect_once_whatever_fails(scenario, seeds):
    failed, outcomes = runs.first_failure(scenario, seeds)
    assert failed is None, runs.report(scenario, failed)
    assert outcomes["finished"] > len(seeds) / 4


def test_run_repeats_from_its_seed():
    one, other = (runs.run(TwoCopies, 1, is_traced=True) for _ in range(2))
    assert len(one.trace) > 1000
    assert one.trace == other.trace


MOST_IN_FLIGHT = 3 * 32


class Many:
    """Any number of functions, and no faults."""

    num_wanted = 0

    def __init__(self, seed):
        super().__init__(seed)
        self.capacity = 50
        self.planned = [self.drawn() for _ in range(self.num_wanted)]
        self.function_times = (0.001,)

    def faults(self):
        return []


def lengths_after(kind, num_functions):
    """Returns what the job keeps, and what its servers know of functions, after so many of them."""
    scenario = type(kind.__name__, (Many, kind), {"num_wanted": num_functions, "wild": Jobs.mild})
    done = runs.run(scenario, 3)
    assert done.error is None, done.error
    coordinator = done.world.processes["coordinator"]
    lengths = lengths_of(coordinator.job)
    for server in range(coordinator.scenario.num_servers):
        for each in coordinator.scenario.kept_on(done.world.processes[ps(server)]):
            lengths.update(lengths_of(each))
    return lengths


@pytest.mark.parametrize("kind", [PlainWorkers, InRounds, Rewinds, TwoCopies])
def test_job_and_servers_keep_no_more_after_ten_times_as_many_functions(kind):
    few, many = lengths_after(kind, 100), lengths_after(kind, 1000)
    assert sum(few.values()) > 100
    grown = {where: number for where, number in many.items() if number > few[where] + 2}
    # The record has as many events, each with a few names and numbers: at most one for each answer at a time.
    assert grown.pop("EventRecord._events[][]", 0) <= NUM_EVENTS * 34
    # Windows have gaps for functions that have not ended, or do not concern this server. Gradients that come too late
    # for their round, in dicts, are dropped with the next one.
    for where in ("Window._starts", "Window._stops", "dict", "dict[]", "dict[][]"):
        assert grown.pop(where, 0) <= MOST_IN_FLIGHT
    assert grown == {}
