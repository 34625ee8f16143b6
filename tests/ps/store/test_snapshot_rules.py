"""Which files a chain of snapshots has, which are kept, and what the next one writes: by numbers and sizes only."""

import random

import pytest

from replicax._ps.store import snapshot_plan, snapshot_rules
from replicax._ps.store.snapshot_plan import RecordedShard, ShardSize, WriteMode, write_plan
from replicax._ps.store.snapshot_rules import (
    continued,
    extends,
    is_of_epoch,
    is_whole,
    next_number,
    removable,
    restore_order,
)

# --- the chain ----------------------------------------------------------------------------------------------------


def test_chain_grows_until_it_is_too_long_or_too_large():
    base = continued(None, 3, 100)
    assert base == [(3, 100)]
    chain = continued(base, 4, 30)
    assert chain == [(3, 100), (4, 30)]
    assert extends(chain, 20, 100)
    assert not extends(chain, 21, 100)
    assert not extends([(n, 0) for n in range(snapshot_rules.MAX_FILES)], 0, 100)


def test_snapshot_with_a_missing_or_cut_file_is_not_continued():
    chain = [(3, 100), (4, 30), (5, 0)]
    sizes = {3: 120, 4: 50, 5: 20}
    assert is_whole(chain, {3, 4}, sizes)
    assert not is_whole(chain, {3, 4}, {**sizes, 4: 29})
    assert not is_whole(chain, {3, 4}, {3: 120, 5: 20})
    assert is_whole(chain, {3}, {3: 120, 5: 20})  # nothing of the other file is used
    assert not is_whole(chain, {3}, {3: 120})  # its own file


def test_two_chains_are_kept_and_what_was_rolled_back_is_not():
    first, second = [(1, 9), (2, 1), (3, 1)], [(1, 9), (2, 1), (3, 1), (4, 1)]
    assert removable([1, 2, 3, 4], first, second) == []
    base = [(5, 9)]
    assert removable([1, 2, 3, 4, 5], second, base) == []
    assert removable([1, 2, 3, 4, 5, 6], base, [(5, 9), (6, 1)]) == []
    assert removable([1, 2, 3, 4, 5, 6, 7], [(5, 9), (6, 1)], [(7, 9)]) == [1, 2, 3, 4]
    assert removable([1, 2, 3, 4, 5], [(1, 9), (2, 1)], [(1, 9), (2, 1), (5, 1)]) == [3, 4]  # went back to 2
    assert removable([1, 2, 3, 4, 5], [(1, 9), (2, 1)], [(5, 9)]) == [3, 4]
    assert removable([1, 2, 3], None, [(3, 9)]) == []  # a new process that has restored none


def test_last_epoch_of_all_servers_is_kept_beside_any_number_of_others():
    kept, numbers = [(1, 9), (2, 1)], [1, 2, 3]
    for number in range(4, 9):
        numbers.append(number)
        gone = removable(numbers, [(number - 1, 9)], [(number, 9)], kept)
        numbers = [each for each in numbers if each not in gone]
        assert numbers == [1, 2, number - 1, number]
    assert removable(numbers, [(8, 9)], [(8, 9), (9, 1)], [(8, 9)]) == []
    assert removable([*numbers, 9], [(8, 9)], [(9, 9)], [(8, 9)]) == [1, 2, 7]


def test_newest_is_restored_first_and_only_of_its_epoch():
    assert restore_order([3, 10, 4]) == [10, 4, 3]
    assert [is_of_epoch(4, epoch) for epoch in (4, 5, None)] == [True, False, True]
    assert (next_number([]), next_number([3, 10, 4])) == (1, 11)


@pytest.mark.parametrize("seed", range(200))
def test_every_kept_snapshot_can_be_restored(seed, monkeypatch):
    """A folder in memory: writes, restarts and rewinds in any order. The newest snapshot, and the one that the next
    continues, have all their files, and so has the last that all servers have."""
    monkeypatch.setattr(snapshot_rules, "MAX_FILES", 3)
    world = random.Random(seed)
    files, last = {}, None  # the chain of each file; the chain that the next one may continue
    kept = None  # the chain of the last epoch that all servers have
    for _ in range(30):
        what = world.choice(["write"] * 6 + ["restart", "rewind"])
        if what == "restart":
            last = files[restore_order(files)[0]] if files else None
        elif what == "rewind" and files:
            last = kept = files[world.choice(sorted(files))]
        elif what == "write":
            number, before = next_number(files), last
            changes = world.choice([10, 60, 100])
            is_next = before is not None and extends(before, changes, 100)
            last = files[number] = continued(before if is_next else None, number, changes if is_next else 100)
            for gone in removable(list(files), before, last, kept):
                del files[gone]
            assert number in files
            if world.random() < 0.3:
                kept = last
        for number in {*restore_order(files)[:1], *(chain[-1][0] for chain in (last, kept) if chain)}:
            chain = files[number]
            assert {each for each, _ in chain} <= files.keys(), f"snapshot {number} lacks files"
        if last is not None and len(last) > 1:
            assert sum(size for _, size in last) <= snapshot_rules.GROWTH * 100


# --- what is written ----------------------------------------------------------------------------------------------


def shard(key="w", number=2, size=100, changed=None, spec="f32[25]", per_unit=1):
    return ShardSize(key, spec, number, per_unit, size, changed)


def record(number=1, spec="f32[25]", per_unit=1, is_in_parts=False):
    return RecordedShard(spec, number, per_unit, is_in_parts)


BASE = [(1, 100)]


def test_shard_is_written_in_full_or_its_changes_or_nothing():
    assert shard().changed(None) is None
    assert shard(changed=0).changed(record(spec="f32[24]")) is None
    assert shard(number=1).changed(record()) == 0
    assert shard(changed=None).changed(record()) is None  # any row may have changed
    assert shard(changed=50).changed(record()) == 50
    assert shard(changed=51).changed(record()) is None
    assert shard(changed=10, per_unit=2).changed(record()) == 10
    assert shard(changed=10, per_unit=2).changed(record(is_in_parts=True)) is None


def test_small_changes_are_copied_first_and_others_are_viewed(monkeypatch):
    monkeypatch.setattr(snapshot_plan, "MAX_COPIED_BYTES", 30)
    shards = [shard("a", changed=25), shard("b", changed=10), shard("c", changed=0), shard("d", number=1)]
    plan = write_plan(shards, [record()] * 4, [(1, 400)])
    assert not plan.is_base
    assert plan.written == [WriteMode.ROWS, WriteMode.COPIED_ROWS, WriteMode.NOTHING, WriteMode.NOTHING]
    one = write_plan([shard(), shard("b", number=1)], [record()] * 2, [(1, 200)])
    assert (one.is_base, one.written) == (False, [WriteMode.ALL, WriteMode.NOTHING])


def test_base_has_all_of_every_shard():
    shards = [shard("a", changed=10), shard("b", number=1)]
    for before, chain in [([None, None], None), ([record()] * 2, [(1, 200), (2, 100)])]:
        plan = write_plan(shards, before, chain)
        assert (plan.is_base, plan.written) == (True, [WriteMode.ALL] * 2)
