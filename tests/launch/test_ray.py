"""``rx.ray`` without Ray: the environment of a start, the cause of a failure, Ray's signal; and a stand-in for its trainer.

``tests/engines/test_ray.py`` runs it on a real Ray cluster.
"""

import dataclasses
import importlib
import json
import os
import pickle
import sys
import threading
import types

import pytest

import replicax as rx
from checks import message
from replicax._launch.ray import server_actors
from replicax._launch.ray.starts import cause_of, environment_of_start
from replicax._src.cluster.failures import PeerFailureError
from replicax._src.cluster.spec import Task
from replicax._src.packaging.extras import missing_packages

ADDRESSES = ["10.0.0.1:15001", "10.0.0.2:15002"]
needs_no_ray = pytest.mark.skipif(not missing_packages("ray"), reason="Ray is installed")


@needs_no_ray
def test_each_use_says_how_to_get_ray():
    uses = {
        "ReplicaxConfig": rx.ray.ReplicaxConfig,
        "fit": lambda: rx.ray.fit(None),
        "parameter_servers": rx.ray.parameter_servers().__enter__,
        "report": lambda: rx.ray.report({}),
    }
    assert list(uses) == rx.ray.__all__
    for name, use in uses.items():
        says = (
            f'rx.ray.{name} needs ray, which is not installed. Run: pip install "ray[train]" (the extra ray).'
        )
        message(rx.errors.MissingExtraError, use, says)


def test_environment_of_a_start():
    told = environment_of_start(
        {"worker": ADDRESSES},
        Task("worker", 1),
        {},
        token="secret",
        num_restarts=3,
        num_devices=2,
        resources={},
    )
    assert json.loads(told.pop("TF_CONFIG")) == {
        "cluster": {"worker": ADDRESSES},
        "task": {"type": "worker", "index": 1},
    }
    assert told == {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "PJRT_NPROC": "16",
        "REPLICAX_DEVICES_PER_WORKER": "2",
        "REPLICAX_RESTART_COUNT": "3",
        "REPLICAX_TOKEN": "secret",
    }


def test_variables_of_the_user_have_priority():
    given = {"JAX_PLATFORMS": "cuda", "REPLICAX_TOKEN_FILE": "/secret", "KERAS_BACKEND": "torch"}
    given["REPLICAX_STATUS_ADDRESS"] = "127.0.0.1:1"
    told = environment_of_start(
        {"worker": ADDRESSES},
        Task("worker", 0),
        given,
        token="s",
        status_address="0.0.0.0:8080",
        resources={"CPU": 1},
    )
    assert set(told) == {"TF_CONFIG", "REPLICAX_RESTART_COUNT"}


@pytest.mark.parametrize("resources", [None, {"CPU": 1, "GPU": 1}, {"TPU": 4}], ids=["unknown", "GPU", "TPU"])
def test_accelerators_are_left_to_jax(resources):
    told = environment_of_start({"worker": ADDRESSES}, Task("worker", 0), {}, token="s", resources=resources)
    assert "JAX_PLATFORMS" not in told


class ActorError(Exception):
    """Stands for an error of Ray."""

    __module__ = "ray.exceptions"


def test_a_workers_own_error_is_the_cause():
    peer, died, own = PeerFailureError("worker 1 died"), ActorError("died"), ValueError("a mistake")
    assert cause_of({0: peer, 1: died, 2: own}) == (2, own)
    assert cause_of({0: peer, 1: died}) == (1, died)
    assert cause_of({0: peer, 1: PeerFailureError("worker 0 left")}) == (0, peer)


# --- a stand-in for Ray Train -----------------------------------------------------------------------------


class Group:
    """Workers that are all this process; it keeps the environment that each was given."""

    def __init__(self, monkeypatch):
        self._monkeypatch, self.environments = monkeypatch, []

    def execute(self, fn):
        return [f"10.0.0.{number}:{fn().rpartition(':')[2]}" for number in range(2)]

    def execute_single_async(self, index, fn, *args):
        environment = {}
        with self._monkeypatch.context() as patch:
            patch.setattr(os, "environ", environment)
            fn(*args)
        self.environments.append(environment)

    def get_resources_per_worker(self):
        return {"CPU": 1}


class RayActorError(Exception):
    def __init__(self, error_msg="", preempted=False):
        self.error_msg, self.preempted = error_msg, preempted


class WorkerGroupError(Exception):
    def __init__(self, worker_failures):
        self.worker_failures = worker_failures


@dataclasses.dataclass
class BackendConfig:
    pass


@pytest.fixture
def training(monkeypatch):
    """The module of ``rx.ray.fit`` on a stand-in for Ray."""
    reported = []

    class Checkpoint:
        from_directory = staticmethod(lambda path: f"checkpoint {path}")

    parts = {
        "ray": {"get": list, "util": types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.9")},
        "ray.exceptions": {"RayActorError": RayActorError},
        "ray.train": {
            "WorkerGroupError": WorkerGroupError,
            "Checkpoint": Checkpoint,
            "report": lambda metrics, checkpoint: reported.append((metrics, checkpoint)),
            "get_context": lambda: types.SimpleNamespace(get_world_rank=lambda: parts["rank"]),
        },
        "ray.train.backend": {"Backend": object, "BackendConfig": BackendConfig},
    }
    for name, names in list(parts.items()):
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    name = "replicax._launch.ray.training"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    module.stand_in = types.SimpleNamespace(parts=parts, reported=reported)
    yield module
    for name in [name for name in sys.modules if name.startswith("replicax._launch.ray.")]:
        del sys.modules[name]


def test_each_start_is_a_cluster_of_its_own(training, monkeypatch):
    config = training.ReplicaxConfig()
    backend = config.backend_cls()
    group = Group(monkeypatch)
    for _ in range(2):
        backend.on_start(group, config)
    told = group.environments
    assert [each["REPLICAX_RESTART_COUNT"] for each in told] == ["0", "0", "1", "1"]
    assert told[0]["REPLICAX_TOKEN"] == told[1]["REPLICAX_TOKEN"] != told[2]["REPLICAX_TOKEN"]
    configs = [json.loads(each["TF_CONFIG"]) for each in told]
    assert [config["task"]["index"] for config in configs] == [0, 1, 0, 1]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert [address.rpartition(":")[0] for address in configs[0]["cluster"]["worker"]] == [
        "10.0.0.0",
        "10.0.0.1",
    ]


def test_workers_get_the_status_address_and_the_token_of_the_driver(training, monkeypatch):
    group = Group(monkeypatch)
    with monkeypatch.context() as driver:
        driver.setenv("REPLICAX_TOKEN", "a-secret")
        driver.setenv("REPLICAX_STATUS_ADDRESS", "0.0.0.0:8080")
        config = pickle.loads(pickle.dumps(training.ReplicaxConfig()))
    assert "a-secret" not in repr(config)
    config.backend_cls().on_start(group, config)
    shown = [(each["REPLICAX_TOKEN"], each["REPLICAX_STATUS_ADDRESS"]) for each in group.environments]
    assert shown == [("a-secret", "0.0.0.0:8080")] * 2


def test_an_invalid_number_of_devices(training):
    message(rx.errors.InvalidArgumentError, lambda: training.ReplicaxConfig(0), "devices_per_worker", "0")


def test_preempted_worker_ends_with_the_error_that_ray_does_not_count(training):
    context = training.ReplicaxConfig().train_func_context
    with pytest.raises(RayActorError) as raised, context():
        sys.exit(42)
    assert raised.value.preempted
    with pytest.raises(SystemExit), context():
        sys.exit(1)
    with context():
        pass


def test_fit_raises_the_cause(training):
    own = ValueError("a mistake of worker 1")
    failed = WorkerGroupError({0: PeerFailureError("worker 1 raised an error"), 1: own})

    def fit():
        raise failed

    with pytest.raises(ValueError, match="a mistake of worker 1") as raised:
        training.fit(types.SimpleNamespace(fit=fit))
    assert raised.value.__cause__ is failed
    assert "Worker 1" in raised.value.__notes__[0]
    assert training.fit(types.SimpleNamespace(fit=lambda: "result")) == "result"


def test_worker_0_reports_the_checkpoint(training):
    stand_in = training.stand_in
    manager = types.SimpleNamespace(latest_checkpoint="/shared/ckpt-5")
    for stand_in.parts["rank"] in (0, 1):
        training.report({"loss": 0.5}, manager)
    training.report({"loss": 0.4})
    assert stand_in.reported == [
        ({"loss": 0.5}, "checkpoint /shared/ckpt-5"),
        ({"loss": 0.5}, None),
        ({"loss": 0.4}, None),
    ]


# --- the signal of Ray Train ------------------------------------------------------------------------------


@pytest.fixture
def in_ray(monkeypatch):
    """Makes this process look like worker 1 of a training in Ray. Returns what Ray says about preemption."""
    state = types.SimpleNamespace(preemption_info=None)
    context = types.SimpleNamespace(get_world_rank=lambda: 1, preemption_context=state)
    module = types.ModuleType("ray.train.v2._internal.execution.context")
    module.get_train_context = lambda: context
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module, state


def trained(directory, state, ranks):
    """Trains in a thread until the steps end; Ray takes nodes away before step 3. Returns the exit code and the steps."""
    found = []

    def train():
        with rx.OneDeviceStrategy("cpu:0").scope():
            v = rx.Variable(0.0)
        with rx.experimental.PreemptionCheckpointHandler(None, rx.Checkpoint(v=v), directory) as handler:
            try:
                for number in range(handler.total_run_calls, 60):
                    if number == 3:
                        state.preemption_info = types.SimpleNamespace(preempted_ranks=ranks)
                    if number > 3:
                        threading.Event().wait(0.05)
                    handler.run(lambda: v.assign_add(1.0))
                found.append((0, handler.total_run_calls))
            except SystemExit as end:
                found.append((end.code, handler.total_run_calls))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(120)
    return found[0]


@pytest.mark.timeout(120)
def test_handler_saves_when_ray_takes_the_node_away(tmp_path, in_ray):
    _, state = in_ray
    code, steps = trained(tmp_path, state, [1])
    assert code == 42
    assert 3 < steps < 60
    state.preemption_info = None
    assert trained(tmp_path, state, [0]) == (
        0,
        60,
    )  # it resumed, and the node of another worker is not its own


def test_processes_that_are_no_workers_watch_sigterm(in_ray, monkeypatch):
    module, state = in_ray
    from replicax._src.preemption.ray_train import watcher_in_ray

    del state.preemption_info  # another version of Ray
    assert watcher_in_ray() is None

    def no_context():
        raise RuntimeError("TrainContext has not been initialized.")

    module.get_train_context = no_context
    assert watcher_in_ray() is None


def test_a_process_that_ends_by_itself_is_started_again_a_bounded_number_of_times(monkeypatch, caplog):
    task, starts = Task("ps", 0), []
    keeper = server_actors._Keeper({task: None}, {"ps": ["a:1"]}, None)
    monkeypatch.setattr(keeper, "_start_again", lambda task, state: starts.append(state))
    for _ in range(20):
        keeper._look_after(task, "exited with code 2")
    assert len(starts) == 5
    (record,) = caplog.records
    assert "ps 0 is not started again: its process exited with code 2" in record.getMessage()
    keeper._look_after(task, "new")  # Ray has started the actor again
    assert starts[-1] == "new"
