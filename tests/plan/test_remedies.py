"""The remedies that are tried to make a program fit, with a program whose memory is a formula."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._plan.remedies import Attempt, Search, notes_of_whole_arguments
from replicax._src.devices.hardware import hardware_of
from replicax._src.devices.plan import Memory, Plan, PlannedArray
from replicax._src.vocabulary.options import ShardState

LIMIT = hardware_of("v5e:2x4").chip.memory_bytes


@dataclass
class Program:
    """Bytes of each device: variables, half of them an optimizer's, and rows, with temporaries of ten times the rows."""

    variables: int
    row: int
    rows: int = 64
    fixed: int = 0
    hardware: object = hardware_of("v5e:2x4")
    num_compiled: int = 0

    def state(self, shards, state):
        of_optimizer = self.variables // 2
        rest = self.variables - of_optimizer
        if state is None:
            return self.variables
        return of_optimizer // shards + (rest // shards if state is ShardState.ALL else rest)

    def attempt(self, change, below):
        replicas = change.hardware.num_devices
        rows = -(-change.global_batch // replicas)
        arguments = self.state(replicas, change.shard_state) + rows * self.row
        peak = None
        if arguments < below and arguments <= LIMIT:
            self.num_compiled += 1
            peak = arguments + 10 * rows * self.row + self.fixed
        return Attempt(replicas, rows, change.shard_state and replicas, arguments, peak, LIMIT)

    def plan(self):
        arguments = self.variables + self.rows * self.row
        peak = arguments + 10 * self.rows * self.row + self.fixed
        memory = Memory(arguments, 0, 0, 0, peak, LIMIT)
        whole = PlannedArray("variable", "w", (1,), "float32", self.variables, (None,))
        rows = PlannedArray("argument", "x", (1,), "float32", self.rows * self.row, ("replica",))
        replicas = self.hardware.num_devices
        return Plan(
            "step",
            self.hardware,
            replicas,
            self.rows,
            memory,
            [whole, rows],
            {},
            [],
            [],
            [],
            0,
            {"compiling": 1},
        )

    def remedies(self, *, may_divide=True, time_left=lambda: 100.0):
        return list(Search(self.plan(), self.attempt, may_divide=may_divide, time_left=time_left).remedies())


def test_rows_are_halved_until_it_fits_and_the_same_batch_is_planned_on_more_devices():
    program = Program(variables=LIMIT // 2, row=LIMIT // 11 // 40)  # 64 rows are 1.6 of the limit, 16 are 0.4
    fewer, more = program.remedies(may_divide=False)
    assert (fewer.rows, fewer.global_batch, fewer.topology, fewer.fits) == (16, 8 * 16, "v5e:2x4", True)
    assert (more.rows, more.global_batch, more.topology, more.fits) == (16, 8 * 64, "v5e:4x8", True)
    assert program.num_compiled == 2  # 32 rows are too many whatever the temporaries are


def test_halving_ends_if_temporaries_do_not_shrink():
    program = Program(variables=LIMIT // 2, row=LIMIT // 100_000, fixed=LIMIT)
    remedies = program.remedies(may_divide=False)
    assert len(remedies) == 1
    assert not remedies[0].fits


def test_large_state_is_sharded_and_only_possible_changes_are_compiled():
    program = Program(variables=3 * LIMIT, row=1)
    optimizer, everything = program.remedies()
    assert (optimizer.shard_state, optimizer.fits, optimizer.is_compiled) == ("optimizer", False, False)
    assert (everything.shard_state, everything.shard_size, everything.fits) == ("all", 8, True)
    assert program.num_compiled == 1


def test_large_shards_are_split_over_more_devices():
    program = Program(variables=20 * LIMIT, row=1)
    optimizer, everything, more = program.remedies()
    assert (optimizer.fits, everything.fits) == (False, False)
    assert (more.topology, more.shard_size, more.rows, more.fits) == ("v5e:4x8", 32, 64, True)


def test_step_without_state_is_not_compiled_again_with_shards():
    program = Program(variables=0, row=LIMIT // 11 // 40, rows=1, fixed=2 * LIMIT)
    assert program.remedies() == []
    assert program.num_compiled == 0


def test_without_time_nothing_is_compiled_and_a_note_says_so():
    program = Program(variables=LIMIT // 2, row=LIMIT // 11 // 40)
    remedies = program.remedies(time_left=lambda: 0.5)  # less than the plan took
    assert program.num_compiled == 0
    assert {(remedy.fits, remedy.is_compiled) for remedy in remedies} == {(None, False)}


@given(
    variables=st.floats(0.01, 40), row=st.floats(1e-6, 0.1), rows=st.integers(1, 300), fixed=st.floats(0, 1.5)
)
def test_remedies_that_fit_do_fit(variables, row, rows, fixed):
    program = Program(int(variables * LIMIT), int(row * LIMIT), rows, int(fixed * LIMIT))
    if program.plan().fits:
        return
    remedies = program.remedies()
    assert program.num_compiled <= 3 * 8
    for remedy in remedies:
        state = remedy.shard_state and ShardState.parse(remedy.shard_state)
        replicas = hardware_of(remedy.topology).num_devices
        needed = program.state(replicas, state) + remedy.rows * program.row * 11 + program.fixed
        assert remedy.fits == (needed <= LIMIT)
        assert remedy.peak <= needed


@pytest.mark.parametrize(
    ("name", "num_devices", "larger"),
    [
        ("v5e:2x4", 9, "v5e:4x4"),
        ("v5e:16x16", 257, "2xv5e:16x16"),
        ("v5p:4x4x4", 65, "v5p:4x4x8"),
        ("h100:1x4", 5, "h100:1x8"),
        ("h100:2x8", 100, "h100:13x8"),
        ("cpu:8", 9, None),
    ],
)
def test_more_devices_of_the_same_kind(name, num_devices, larger):
    found = hardware_of(name).at_least(num_devices)
    assert (found and found.name) == larger


def test_note_says_why_functional_state_is_not_sharded():
    plan = Program(LIMIT // 4, 1).plan()
    assert not list(notes_of_whole_arguments(plan))
    whole = PlannedArray("argument", "args[0]['w']", (1,), "bfloat16", 8 << 30, (None,))
    plan = replace(plan, arrays=[*plan.arrays, whole, replace(whole, name="args[1]", device_bytes=1 << 30)])
    assert not list(notes_of_whole_arguments(plan))  # fits, or fewer rows would do
    plan = replace(plan, arrays=[*plan.arrays, replace(whole, device_bytes=9 << 30)])
    (told,) = notes_of_whole_arguments(plan)
    assert "18.0 GiB of a device are replicated arguments" in told
    assert "args[0]['w'] with 9.0 GiB" in told
    assert "2.2 GiB of them on each of 8 replicas" in told
    (told,) = notes_of_whole_arguments(replace(plan, num_replicas=1))
    assert 'shard_state="all" would shard them over replicas, but there is one replica here' in told
    (told,) = notes_of_whole_arguments(replace(plan, num_logical_devices=2))
    assert "2.2 GiB of them on each of 8 replicas" in told
