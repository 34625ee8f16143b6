"""The two forms of ``ParameterServerStrategy``, side by side, on servers of this process."""

import logging

import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._ps.client.server_contents import ServerContents
from replicax._ps.client.session import Session
from replicax._ps.client.shared_arrays import SharedArrays
from replicax._ps.client.tasks import Share
from replicax._ps.store.store import Store
from replicax._ps.strategy.coordinator_form import CoordinatorForm
from replicax._ps.strategy.form_steps import number_of_copies
from replicax._ps.strategy.parameter_server import ParameterServerStrategy
from replicax._ps.strategy.worker_form import WorkerForm
from replicax._ps.worker.resources import WORKER_INDEX
from replicax._ps.worker.unbuilt import UnbuiltDataset
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import SimpleClusterResolver
from replicax._src.cluster.spec import ClusterSpec, Task
from replicax._src.vocabulary.errors import ContextError, DeviceError, InvalidArgumentError, VariableError
from store_connections import server_clients

TASKS = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}


def clients():
    store = Store()
    store.hello("a session")
    return server_clients([store], "a session")


def coordinator_form(num_devices=1):
    return CoordinatorForm(Session(clients()), num_devices)


def worker_form(task=Task("worker", 1), num_devices=1, **options):  # noqa: B008
    servers, spec = clients(), ClusterSpec(TASKS)
    share = Share(["chief 0", "worker 0", "worker 1"], str(task))
    session = Session(servers, shared=SharedArrays(ServerContents(servers), share, 0.1))
    resolver = SimpleClusterResolver(spec, task_type=task.type, task_id=task.index)
    return WorkerForm(session, Membership(spec, task), resolver, num_devices, **options)


FORMS = {"coordinator": coordinator_form, "worker": worker_form}


@pytest.fixture(params=FORMS)
def strategy(request):
    with ParameterServerStrategy._of_form(FORMS[request.param]()) as strategy:
        yield strategy


def is_worker(strategy):
    return isinstance(strategy.form, WorkerForm)


def test_both_forms_are_the_one_public_class(strategy):
    assert type(strategy) is rx.ParameterServerStrategy
    assert strategy.session is strategy.form.session
    assert strategy.num_replicas_in_sync == 1


def test_what_a_strategy_says_of_itself(strategy):
    told = repr(strategy), strategy._repr_html_()
    if is_worker(strategy):
        assert told[0] == "<ParameterServerStrategy in worker 1, of 1 parameter servers>"
        assert "worker 1" in told[1]
    else:
        assert told[0] == "<ParameterServerStrategy of 0 workers and 1 parameter servers>"
        assert "the coordinator" in told[1]


def test_only_the_chief_of_the_workers_writes_checkpoints_and_initializes():
    for form, is_chief, between_graph in (
        (coordinator_form(), True, False),
        (worker_form(), False, True),
        (worker_form(Task("chief", 0)), True, True),
    ):
        strategy = ParameterServerStrategy._of_form(form)
        assert strategy.is_chief == strategy.extended.experimental_should_init == is_chief
        assert strategy.extended.experimental_between_graph == between_graph


def test_datasets_are_built_where_they_are_read(strategy):
    data = rx.data.from_arrays(np.arange(4)).batch(2)
    whole = strategy.experimental_distribute_dataset(data)
    part = strategy.distribute_datasets_from_function(
        lambda context: data.shard(3, context.input_pipeline_id)
    )
    if is_worker(strategy):
        assert [batch.tolist() for batch in whole] == [[0, 1], [2, 3]]
        assert [
            batch.tolist() for batch in part
        ] == []  # worker 1 is the third of three, and there are two batches
    else:
        assert isinstance(whole, UnbuiltDataset)
        assert isinstance(part, UnbuiltDataset)


def test_reduce_without_an_axis(strategy):
    with strategy.scope():
        if is_worker(strategy):  # as in TensorFlow 1
            assert float(strategy.reduce("SUM", np.float32(3))) == 3
        else:
            message(InvalidArgumentError, lambda: strategy.reduce("SUM", np.float32(3)), "needs an axis")


def test_a_coordinator_says_that_it_computes_itself(strategy, caplog):
    caplog.set_level(logging.WARNING, "replicax")
    name = f"step_of_{type(strategy.form).__name__}"

    def step():
        return np.float32(2)

    step.__qualname__ = name
    assert float(strategy.run(step)) == 2
    assert (f"strategy.run of {name} was called outside" in caplog.text) is not is_worker(strategy)


def test_a_worker_has_its_index_and_a_coordinator_has_none(strategy):
    if is_worker(strategy):
        assert strategy.form.own_value("step", WORKER_INDEX).next() == [2]  # after the chief and worker 0
    else:
        message(ContextError, lambda: strategy.form.own_value("step", WORKER_INDEX), "step uses a worker's")
    message(ContextError, lambda: strategy.form.own_value("step", "a dataset"), "(a dataset)")


def test_only_a_coordinator_schedules():
    strategy = ParameterServerStrategy._of_form(worker_form())
    message(
        InvalidArgumentError,
        lambda: rx.coordinator.ClusterCoordinator(strategy),
        "every worker runs this program: call strategy.run",
    )
    with strategy.scope():
        message(VariableError, lambda: rx.experimental.PerWorkerVariable(0), "in worker 1, of 1 parameter")


def test_devices_of_a_coordinators_workers_are_elsewhere():
    assert coordinator_form(64).topology().num_replicas == 64
    message(DeviceError, worker_form(num_devices=64).topology, "Workers have 64 devices")


@pytest.mark.parametrize("warns", [True, False])
def test_a_worker_names_unused_devices_unless_somebody_chose_their_number(warns, caplog):
    caplog.set_level(logging.WARNING, "replicax")
    form = worker_form(warns_of_devices=warns)
    form.announce(ParameterServerStrategy._of_form(form))
    assert ("worker 1 has 8 devices, and 1 of them is used" in caplog.text) is warns


def test_replication_is_one_or_two(monkeypatch):
    assert (number_of_copies(None), number_of_copies(2)) == (1, 2)
    monkeypatch.setenv("REPLICAX_REPLICATION", "2")
    assert (number_of_copies(None), number_of_copies(1)) == (2, 1)
    message(InvalidArgumentError, lambda: number_of_copies(3), "got 3")
    message(InvalidArgumentError, lambda: number_of_copies(True), "got True")


def test_a_form_refuses_a_partitioner_that_is_no_function():
    for form in (coordinator_form(), worker_form()):
        message(InvalidArgumentError, lambda form=form: ParameterServerStrategy._of_form(form, 3), "got 3")
