"""Processes keep frequent checkpoints on their own disks, and are killed: a restart takes the newest that all have."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from checks import path_of_programs

pytestmark = [pytest.mark.rest, pytest.mark.timeout(300)]
LIMIT_S = 120
PROGRAMS = f"{path_of_programs()}{os.pathsep}{Path(__file__).parents[1]}"


def training(folder, num_steps, layout="", moment="", victim="", at_save="0"):
    """Restores, and says what; then saves after every step, shared after ten steps and locally after two.

    Args:
      folder: Has the shared directory and one of each host.
      num_steps: The number of steps.
      layout: "other" to divide what is copied otherwise, and to copy what is divided; "more" to save another array.
      moment, victim, at_save: The moment at which a process kills itself, its number, and the first save.
    """
    import logging
    import os
    import sys
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np

    import changing_state
    import replicax as rx
    from replicax.testing import report

    warnings = []

    class Warnings(logging.Handler):
        def emit(self, record):
            if (
                "has been waiting" not in record.getMessage()
            ):  # for a process that starts late on a busy machine
                warnings.append(record.getMessage())

    class Position:
        """A state of each process."""

        at = -1

        def get_state(self):
            return [self.at, index]

        def set_state(self, state):
            self.at = state[0] if state[1] == index else "of another process"

    logging.getLogger("replicax").addHandler(Warnings(logging.WARNING))
    strategy = rx.MultiWorkerMirroredStrategy()
    index, position = jax.process_index(), Position()
    if layout == "other":
        changing_state.DIVIDED = {"columns": ("x",), "copied": ("x",)}
    with strategy.scope():
        of_each = rx.Variable(0, synchronization="on_read", aggregation="sum", trainable=False)

    def add():
        of_each.assign_add(1 + jnp.asarray(rx.get_replica_context().replica_id_in_sync_group, int))

    checkpoint = rx.Checkpoint(state=changing_state.placed(0), of_each=of_each)
    if jax.process_count() == 2:
        checkpoint.position = position
    if layout == "more":
        checkpoint.unused = changing_state.placed(0)["rows"]
    step = 0
    manager = rx.CheckpointManager(
        checkpoint,
        f"{folder}/shared",
        step_counter=lambda: step,
        checkpoint_interval=10,
        local_directory=f"{folder}/host-{index}",
        local_every=2,
    )
    path = manager.restore_or_initialize()
    step = checkpoint.state["step"]
    report(
        restored=path and os.path.relpath(path, folder),
        wrong=changing_state.differing(checkpoint.state, step),
        position=position.at,
        of_each=[int(of_each), *map(int, np.ravel(of_each.values))],
        warnings=warnings,
        step=step,
    )
    if str(index) == victim:
        changing_state.dies_at(moment, int(at_save))
    for _ in range(int(num_steps)):
        step += 1
        checkpoint.state = changing_state.placed(step)
        position.at = step
        try:
            strategy.run(add)
            path = manager.save(step)
            manager.wait()
            if path is not None:
                report(saved=step)
        except rx.errors.ClusterFailureError as error:
            report(lost=list(error.tasks))
            sys.exit(3)
    report(done=True)
    time.sleep(600)


def sharded_training(folder, num_steps):
    """Restores variables with sharded state, then saves after each step: first shared, then locally."""
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import jax.numpy as jnp
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    index = jax.process_index
    strategy = rx.MultiWorkerMirroredStrategy(shard_state="all")
    with strategy.scope():
        step = rx.Variable(0)
        own = [
            rx.Variable(np.full((64, 3), 1.0 + index(), np.float32)),  # all take the first worker's
            rx.Variable(lambda: jnp.ones((8, 2))),
            rx.Variable(np.ones(3, np.float32)),
            rx.Variable(jnp.zeros(4), synchronization="ON_READ", aggregation="SUM"),
            keras.Variable(np.full((8, 2), 1.0 + index(), np.float32)),
        ]
        model = keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(64), keras.layers.BatchNormalization()]
        )
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    variables = [*own, *model.variables, *model.optimizer.variables]

    def layouts():
        bindings = map(strategy.bindings.binding_of, variables)
        return [str(binding.value.sharding.spec) for binding in bindings]

    new = layouts()
    manager = rx.CheckpointManager(
        rx.Checkpoint(step=step, own=own, model=model),
        f"{folder}/shared",
        step_counter=step,
        checkpoint_interval=10,
        local_directory=f"{folder}/host-{index()}",
        local_every=1,
    )
    if not int(num_steps):  # as weights that are loaded before
        for variable in (*own[:3], *own[4:], *model.variables):
            variable.assign(np.zeros(variable.shape, variable.dtype))
    path = manager.restore_or_initialize()

    def add():
        step.assign_add(1)
        for variable in own:
            variable.assign(variable + 1)

    report(restored=path and os.path.relpath(path, folder), new=new, after_restore=layouts())
    for _ in range(int(num_steps)):
        strategy.run(add)
        model.fit(np.ones((8, 16)), np.ones((8, 64)), batch_size=4, verbose=0)
        manager.save()
        manager.wait()
    report(values=[np.asarray(variable.value).ravel().tolist() for variable in variables], step=int(step))
    strategy.run(add)
    report(after_step=layouts())
    manager.close()


def run(local_cluster, folder, num_steps, *args, workers=2, is_ending=False):
    """What the processes report; they are killed when they have done their steps, unless they end before."""
    cluster = local_cluster(workers, environment={"PYTHONPATH": PROGRAMS}, timeout_s=LIMIT_S)
    cluster.start(training, [str(folder), str(num_steps), *args])
    tasks = list(cluster.tasks.values())
    for task in tasks:
        if is_ending:
            task.wait(LIMIT_S)
        else:
            task.wait_for_report("done")
    merged = [{name: value for report in task.reports for name, value in report.items()} for task in tasks]
    cluster.close()
    return merged


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a training of 17 steps that was killed: 11 is in the shared directory, 15 and 17 on the hosts."""
    from replicax.testing import LocalCluster

    folder = tmp_path_factory.mktemp("killed")
    run(LocalCluster, folder, 17, "more")
    return folder


@pytest.fixture
def folder(killed, tmp_path):
    return shutil.copytree(killed, tmp_path / "copy")


def local(folder, host, number):
    (path,) = (folder / f"host-{host}").glob(f"*/{host}/ckpt-{number}")
    return path


def tiers_of(reports):
    return [report["restored"] and report["restored"].partition("/")[0] for report in reports]


def expect(reports, tiers, step):
    """All restore the values, states and components of this step."""
    assert tiers_of(reports) == tiers
    for number, report in enumerate(reports):
        assert report["step"] == step
        assert report["wrong"] == []
        if len(reports) == 2:
            assert report["position"] == step
            assert report["of_each"] == [3 * step, (number + 1) * step]
        else:
            assert report["of_each"][0] == 3 * step


HOSTS, SHARED = ["host-0", "host-1"], ["shared", "shared"]


def test_newer_local_checkpoint_is_restored_bit_identically(local_cluster, folder):
    reports = run(local_cluster, folder, 4)
    expect(reports, HOSTS, 17)
    assert [report["warnings"] for report in reports] == [[], []]
    assert (folder / "shared" / "ckpt-18").exists()
    for host in (0, 1):
        assert sorted(path.name for path in local(folder, host, 20).parent.iterdir()) == [
            "ckpt-17",
            "ckpt-20",
        ]


def test_host_without_local_files_makes_all_restore_the_shared_checkpoint(local_cluster, folder):
    shutil.rmtree(folder / "host-1")
    reports = run(local_cluster, folder, 0)
    expect(reports, SHARED, 11)
    assert "worker 1" in reports[0]["warnings"][0]


@pytest.mark.parametrize(
    "what",
    [
        "arrays/state/rows",
        *(pytest.param(what, marks=pytest.mark.long) for what in ("arrays/unused", "manifest.json")),
    ],
)
def test_damage_on_one_host_makes_all_restore_the_one_before(local_cluster, folder, what):
    path = local(folder, 1, 17) / what
    file = next(path.glob("c.*")) if path.is_dir() else path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    expect(run(local_cluster, folder, 0), HOSTS, 15)


def test_another_number_of_processes_restores_the_shared_checkpoint(local_cluster, killed, tmp_path):
    """Checkpoints without states of each process, which no other number of processes can restore."""
    without = tmp_path / "three"
    run(local_cluster, without, 5, workers=3)
    reports = run(local_cluster, without, 0, workers=1)
    assert tiers_of(reports) == ["shared"]
    assert reports[0]["step"] == 1
    assert reports[0]["wrong"] == []
    assert "3 processes" in reports[0]["warnings"][0]


def test_another_layout_restores_the_shared_checkpoint(local_cluster, folder):
    """The parts of the hosts do not have what the devices need now."""
    reports = run(local_cluster, folder, 0, "other")
    expect(reports, SHARED, 11)
    assert "layout" in reports[0]["warnings"][0]


def test_sharded_variables_have_one_layout_and_are_restored_from_the_hosts(local_cluster, tmp_path):
    """The layout is that of new variables, also if values were assigned before the restore."""
    reports = []
    for num_steps in (3, 0):
        cluster = local_cluster(2, environment={"PYTHONPATH": PROGRAMS}, timeout_s=LIMIT_S)
        cluster.start(sharded_training, [str(tmp_path), str(num_steps)])
        results = cluster.wait()
        results.raise_if_failed()
        reports.append([result.report for result in results.values()])
        cluster.close()
    saved, restored = reports
    assert tiers_of(restored) == HOSTS
    for before, after in zip(saved, restored, strict=True):
        assert after["step"] == before["step"] == 3
        assert after["values"] == before["values"] == saved[0]["values"]
        assert set(before["values"][0]) == {4.0}
        layouts = {
            str(each[name]) for each in (before, after) for name in ("new", "after_restore", "after_step")
        }
        assert layouts == {str(before["new"])}
        assert sum("shard" in layout for layout in before["new"]) >= 9


@pytest.mark.parametrize(
    ("moment", "victim"), [pytest.param("half", "1", marks=pytest.mark.long), ("named", "0")]
)
def test_kill_in_the_middle_of_a_local_save(local_cluster, folder, moment, victim):
    """The survivor has named its part, or not: all restore the save before."""
    reports = run(local_cluster, folder, 20, "", moment, victim, "3", is_ending=True)
    assert reports[1 - int(victim)]["lost"] == [f"worker {victim}"]
    expect(run(local_cluster, folder, 0), HOSTS, 20)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_forty_kills(local_cluster, tmp_path):
    """No save that was reported is lost, and all processes restore the same step, whoever is killed and when."""
    random_one, saved, num_local = random.Random(7), 0, 0
    for _ in range(41):
        cluster = local_cluster(2, environment={"PYTHONPATH": PROGRAMS}, timeout_s=LIMIT_S)
        cluster.start(training, [str(tmp_path), "1000000"])
        tasks = list(cluster.tasks.values())
        for task in tasks:
            task.wait_for_report("saved")
        restored = [task.reports[0] for task in tasks]
        time.sleep(random_one.uniform(0, 1))
        victims = random_one.sample(tasks, random_one.randint(1, 2))
        for task in victims:
            task.kill()
        for task in tasks:
            assert task.wait(LIMIT_S).exit_code == 3 or task in victims
        if saved:
            is_local = restored[0]["restored"].startswith("host")
            assert restored[0]["step"] >= saved
            expect(restored, HOSTS if is_local else SHARED, restored[0]["step"])
            num_local += is_local
        saved = max(report["saved"] for task in tasks for report in task.reports if "saved" in report)
        cluster.close()
    print(f"{num_local} of 40 restarts took local checkpoints.")
    assert num_local > 10
