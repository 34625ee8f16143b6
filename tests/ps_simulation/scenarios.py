"""The scenarios of parameter servers that `make fuzz-simulation` runs, by their names."""

from ps_simulation.copied_jobs import BothLost, TwoCopies
from ps_simulation.copies import Copies
from ps_simulation.jobs import LostServers, PlainWorkers
from ps_simulation.local_groups import LocalGroups
from ps_simulation.logged_groups import LoggedGroups
from ps_simulation.resource_jobs import WithDatasets
from ps_simulation.round_jobs import InRounds, InRoundsWithServers
from ps_simulation.snapshot_jobs import Continued, Rewinds

ALL = {
    each.__name__: each
    for each in (
        Copies,
        PlainWorkers,
        LostServers,
        WithDatasets,
        InRounds,
        InRoundsWithServers,
        Continued,
        Rewinds,
        TwoCopies,
        BothLost,
        LocalGroups,
        LoggedGroups,
    )
}
