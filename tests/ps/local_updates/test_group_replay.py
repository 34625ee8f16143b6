"""``rx.testing.replay_groups`` repeats a run of groups with int8, a slow group and a killed one from its logs."""

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._ps.local_updates.replay_file import ReplayKind, read_replay_file
from replicax.errors import InvalidArgumentError, ReplayDifferenceError

WAIT_S = 60.0
NUM_GROUPS, NUM_VERSIONS = 3, 5


class Killed(Exception):
    pass


@jax.jit
def trained(params, noise):
    return jax.tree.map(lambda w: w - 0.05 * jnp.tanh(w + noise), params)


def train(groups, *, seed=0, pause_s=0.0, dies=False, last=NUM_VERSIONS, draws=np.random):
    """Trains with data of its group. In a run, whose groups share a process here, they do not share ``draws``."""
    draws.seed(100 * seed + groups.index)
    params = groups.attach({"a": jnp.full(300, float(groups.index)), "b": jnp.zeros((5, 2))})
    while not groups.should_stop:
        params = groups.step(trained(params, np.float32(draws.normal())), tokens=3 + groups.index)
        if dies and groups.version >= 2:
            raise Killed
        if groups.index == 0 and groups.version >= last:
            groups.stop()
        time.sleep(pause_s)
    groups.finish(WAIT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The logs of a run of three groups: one is slow, one is killed and starts again."""
    folder = tmp_path_factory.mktemp("run")
    with rx.Server({"ps": ["localhost:0"]}, "ps", 0) as server, pytest.MonkeyPatch.context() as environ:
        environ.setenv("REPLICAX_SYNCERS", server.target.removeprefix("grpc://"))

        def group(index):
            environ.setenv("REPLICAX_GROUP", f"{index}/{NUM_GROUPS}")
            log = folder / f"group-{index}" / "replay.log"
            options = {"every": 4, "fragments": 2, "compression": "int8", "quorum": 2, "grace_s": 0.02}
            return rx.experimental.LocalUpdates(**options, log=log)

        def run(made, **how):
            train(made, draws=np.random.RandomState(), **how)

        first = [group(0), group(1), group(2)]
        threads = [
            threading.Thread(target=run, args=(first[0],), kwargs={"pause_s": 0.01}, daemon=True),
            threading.Thread(target=run, args=(first[1],), kwargs={"pause_s": 0.03}, daemon=True),
        ]
        for thread in threads:
            thread.start()
        with pytest.raises(Killed):
            run(first[2], pause_s=0.01, dies=True)
        first[2].close()
        run(group(2), pause_s=0.01)
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
    return folder


def test_run_with_int8_a_slow_group_and_a_killed_one_is_equal(folder):
    report = rx.testing.replay_groups(folder, train)
    assert report.processes == 4
    assert report.versions > 2 * NUM_VERSIONS
    assert report.pushes > 4 * NUM_VERSIONS
    assert report.adoptions > 4 * NUM_VERSIONS
    assert "bit for bit" in str(report)


@pytest.mark.rest
def test_order_of_the_groups_changes_nothing(folder):
    orders = [(2, 1, 0), (0, 1, 2)]
    logs = [[folder / f"group-{index}" / "replay.log" for index in order] for order in orders]
    one, other = (rx.testing.replay_groups(each, train) for each in logs)
    assert one == other


@pytest.mark.rest
def test_checksum_that_differs_is_named(folder, tmp_path):
    paths = [folder / f"group-{index}" / "replay.log" for index in range(NUM_GROUPS)]
    (part,) = read_replay_file(paths[1])
    adopted = [each for each in part.records if each.kind is ReplayKind.ADOPTED and each.version]
    wanted = adopted[len(adopted) // 2]
    damaged = tmp_path / "replay.log"
    checksum = wanted.checksum.to_bytes(4, "little")
    assert paths[1].read_bytes().count(checksum) == 1
    flipped = (wanted.checksum ^ 1).to_bytes(4, "little")
    damaged.write_bytes(paths[1].read_bytes().replace(checksum, flipped))
    what = (
        f"outer parameters of version {wanted.version} of fragment {wanted.fragment}: their checksum is "
        f"{wanted.checksum:08x}, and the log of group 1 has {wanted.checksum ^ 1:08x}"
    )
    with pytest.raises(ReplayDifferenceError, match=what):
        rx.testing.replay_groups([paths[0], damaged, paths[2]], train)


@pytest.mark.rest
def test_other_data_and_other_loops_are_named_with_the_first_round_that_differs(folder):
    with pytest.raises(
        ReplayDifferenceError, match=r"round 1 of fragment 0: push 1 of group \d has the checksum"
    ):
        rx.testing.replay_groups(folder, functools.partial(train, seed=1))
    with pytest.raises(ReplayDifferenceError, match=r"group 0 calls groups.finish after step \d+, unlike"):
        rx.testing.replay_groups(folder, functools.partial(train, last=2))
    with pytest.raises(ReplayDifferenceError, match="train returned for group 0 after 0 steps"):
        rx.testing.replay_groups(folder, lambda groups: None)


def test_logs_of_some_groups_and_folders_without_logs_are_refused(folder, tmp_path):
    paths = [folder / f"group-{index}" / "replay.log" for index in range(NUM_GROUPS)]
    with pytest.raises(InvalidArgumentError, match=r"Give the logs of all groups"):
        rx.testing.replay_groups(paths[:2], train)
    with pytest.raises(InvalidArgumentError, match=r"has no group-0/replay.log"):
        rx.testing.replay_groups(tmp_path, train)
