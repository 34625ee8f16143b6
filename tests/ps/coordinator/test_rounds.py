"""The rules of rounds (which gradients are averaged), and rounds in a cluster in memory."""

import logging
import random

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from driven_job import queued
from in_memory_servers import in_memory_strategy
from replicax._ps.job.closures import ClosureQueue
from replicax._src.variables.partitioners import FixedShardsPartitioner
from replicax.coordinator import ClusterCoordinator
from replicax.errors import InvalidArgumentError, UnsupportedError

JOIN_S = 30.0

pytestmark = pytest.mark.timeout(60)


def queue_of(num_averaged, workers="ab", num=8, keys="k"):
    queue = ClosureQueue(replicas_to_aggregate=num_averaged)
    for worker in workers:
        queue.back(worker)
    for n in range(num):
        queued(queue, "step", n, None, keys[n % len(keys)])
    return queue


def taken(queue, workers):
    """The numbers that each worker can have now."""
    found = {}
    for worker in workers:
        closure = queue.take(worker)
        found[worker] = None if closure is None else closure.number
    return found


def end(queue, worker):
    assert queue.finished(worker, queue.oldest(worker))


def test_round_ends_after_n_closures_and_applies_their_mean():
    queue = queue_of(2, num=4)
    assert taken(queue, "a") == {"a": 0}
    assert taken(queue, "ab") == {"a": None, "b": 1}  # what is left is for who has nothing
    assert taken(queue, "ab") == {"a": None, "b": None}
    end(queue, "a")
    assert queue.complete_round is None
    assert not queue.may_take("a")
    end(queue, "b")
    complete = queue.complete_round
    assert sorted(complete.ended) == [0, 1]
    assert not queue.may_take("a")  # the values are old until it has been applied
    assert not queue.is_quiet
    queue.rounds.applied(complete)
    assert queue.is_quiet
    assert taken(queue, "ab") == {"a": 2, "b": 3}
    assert queue.oldest("a").round == complete.number + 1
    end(queue, "a"), end(queue, "b")
    assert not queue.is_idle  # nothing is queued or in flight, and something is to happen
    queue.rounds.applied(queue.complete_round)
    assert queue.is_idle


def test_fewer_workers_than_gradients_compute_several():
    queue = queue_of(3, "a")
    assert [taken(queue, "a")["a"] for _ in range(4)] == [0, 1, 2, None]


def test_additional_workers_are_backups_and_late_gradients_are_dropped():
    queue = queue_of(2, "abc")
    assert taken(queue, "ab") == {"a": 0, "b": 1}
    end(queue, "a")
    assert not queue.may_take("a")  # it has had one of this round, and enough are under way
    assert taken(queue, "c") == {"c": 2}
    end(queue, "c")
    assert queue.complete_round.ended == [0, 2]
    queue.rounds.applied(queue.complete_round)
    assert taken(queue, "abc") == {"a": 3, "b": None, "c": 4}  # behind an old one nothing new is queued
    end(queue, "b")
    assert (queue.rounds.num_dropped, queue.rounds.num_applied) == (1, 1)
    assert taken(queue, "b") == {"b": 5}  # a backup of the second round


def test_a_lost_worker_does_not_hang_its_round_and_its_closure_counts_once():
    queue = queue_of(2)
    taken(queue, "ab")
    lost = queue.oldest("b")
    queue.lost("b", [lost])
    assert taken(queue, "a") == {"a": 1}  # in the same round
    assert lost.round == 0
    assert not queue.finished("b", lost)
    end(queue, "a"), end(queue, "a")
    assert queue.complete_round.ended == [0, 1]


def test_functions_that_update_other_variables_have_separate_rounds():
    queue = queue_of(2, keys=["d", "g"])
    assert taken(queue, "ab") == {"a": 0, "b": 1}
    rounds = {queue.oldest("a").round, queue.oldest("b").round}
    assert rounds == {0, 1}
    end(queue, "a"), end(queue, "b")
    assert taken(queue, "ab") == {"a": 2, "b": 3}
    assert {queue.oldest("a").round, queue.oldest("b").round} == rounds
    end(queue, "a"), end(queue, "b")
    assert queue.complete_round.ended == [0, 2]
    queue.rounds.applied(queue.complete_round)
    assert queue.complete_round.ended == [1, 3]


def test_function_without_gradients_belongs_to_no_round():
    queue = queue_of(1, "a", num=3, keys=["k", None, None])
    assert [taken(queue, "a")["a"] for _ in range(4)] == [0, 1, 2, None]
    end(queue, "a")
    assert queue.complete_round.ended == [0]
    end(queue, "a"), end(queue, "a")
    assert (queue.rounds.num_dropped, queue.rounds.num_waiting) == (0, 0)


def test_failures_are_not_counted_and_a_break_ends_all_rounds():
    queue = queue_of(2)
    taken(queue, "ab")
    end(queue, "a")
    queue.failed("b", queue.oldest("b"), ValueError())
    assert queue.rounds.num_waiting == 1
    queue.collect()
    queued(queue, "step", None, None, "k")
    assert queue.take("b").round == 0  # the one that ended waits for this one
    queue.broke(ValueError())
    assert queue.is_idle
    queue.mended()
    queued(queue, "step", None, None, "k")
    assert queue.take("a").round == 1
    assert queue.rounds.low == 1


@pytest.mark.parametrize("seed", range(20))
def test_each_round_has_n_closures_and_each_closure_one_round(seed):
    chance = random.Random(seed)
    num_averaged, num = chance.randint(1, 4), 60
    workers = "abcd"[: chance.randint(1, 4)]
    keys = chance.choice([["k"], ["k", "l", None]])
    queue = queue_of(num_averaged, workers, num, keys)
    applied = []
    for _ in range(100_000):
        if queue.is_idle:
            break
        worker = chance.choice(workers)
        oldest = queue.oldest(worker)
        if queue.complete_round is not None and chance.random() < 0.5:
            applied.append(queue.complete_round)
            queue.rounds.applied(queue.complete_round)
        elif chance.random() < 0.05:
            queue.lost(worker)
            queue.back(worker)
        elif chance.random() < 0.05 and oldest is not None:
            queue.returned(worker, oldest)
        elif chance.random() < 0.5 and oldest is not None:
            end(queue, worker)
        else:
            queue.take(worker)
    assert queue.is_idle
    assert all(len(each.ended) == num_averaged for each in applied)
    assert applied
    counted = [closure for each in applied for closure in each.ended]
    assert len(set(counted)) == len(counted)
    num_gradients = sum(keys[n % len(keys)] is not None for n in range(num))
    assert len(counted) + queue.rounds.num_dropped + queue.rounds.num_waiting == num_gradients
    if len(workers) <= num_averaged:
        assert not queue.rounds.num_dropped  # nobody is a backup, and who was lost computes anew


# --- on servers of this process -------------------------------------------------------------------------


@pytest.fixture
def strategy():
    with in_memory_strategy(workers=2, ps=2) as strategy:
        yield strategy


class Job:
    """A variable that decreases by the mean of the functions' arguments, one that counts them, and their coordinator."""

    def __init__(self, strategy, optimizer=None, **options):
        self.strategy = strategy
        with strategy.scope():
            self.w = keras.Variable(np.zeros(3, np.float32))
            self.other = keras.Variable(np.zeros(40, np.float32))  # on the other server
            self.count = rx.Variable(np.int32(0))
            self.optimizer = keras.optimizers.SGD(1.0) if optimizer is None else optimizer()
            self.optimizer.build([self.w, self.other])
        self.coordinator = ClusterCoordinator(strategy, **options)

    def step(self, gradient):
        def replica_fn(gradient):
            values = self.w.value[0], self.other.value[0]
            self.count.assign_add(1)
            self.optimizer.apply([jnp.full(3, gradient), jnp.full(40, gradient)], [self.w, self.other])
            return values

        return self.strategy.run(replica_fn, args=(gradient,))

    def train(self, gradients):
        values = [self.coordinator.schedule(self.step, (np.float32(g),)) for g in gradients]
        self.coordinator.join(JOIN_S)
        return [tuple(map(float, each)) for each in self.coordinator.fetch(values)]

    def counts(self):
        closures = self.coordinator.statistics()["closures"]
        return closures["rounds"], closures["gradients_dropped"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.coordinator.close()


@pytest.mark.parametrize("num_averaged", [2, 3])
def test_closures_of_a_round_use_the_same_values_and_make_one_step(strategy, num_averaged, caplog):
    with Job(strategy, replicas_to_aggregate=num_averaged) as job:
        gradients = list(range(num_averaged * 10))
        values = job.train(gradients)
        assert job.w._value.shards[0].ps != job.other._value.shards[0].ps
        means = [np.mean(gradients[n : n + num_averaged]) for n in range(0, len(gradients), num_averaged)]
        held = -np.cumsum([0.0, *means])
        assert values == [(held[n // num_averaged],) * 2 for n in range(len(gradients))]
        assert np.asarray(job.w.value).tolist() == [held[-1]] * 3
        assert int(job.optimizer.iterations.value) == 10
        assert int(job.count) == len(gradients)  # what is no optimizer's is done by each
        assert job.counts() == (10, 0)
        assert not caplog.records


def test_values_pulled_by_other_functions_are_not_used_in_the_next_round(strategy):
    with Job(strategy, replicas_to_aggregate=2) as job:

        def look():  # what it pushes brings values for the next function
            job.count.assign_add(1)
            return job.w.value[0] + job.other.value[0]

        values = []
        for _ in range(10):
            values += [job.coordinator.schedule(job.step, (np.float32(1),)) for _ in range(2)]
            for _ in range(2):
                job.coordinator.schedule(look)
        job.coordinator.join(JOIN_S)
        assert [float(w) for w, _ in job.coordinator.fetch(values)] == [-float(n // 2) for n in range(20)]


def test_nothing_stale_is_pulled(strategy):
    with Job(strategy, replicas_to_aggregate=2) as job:
        stores = strategy.session._tasks.stores
        job.train([1] * 2)
        before = [store.statistics()["shards_sent"] for store in stores]
        job.train([1] * 20)
        assert [store.statistics()["shards_sent"] for store in stores] == [num + 20 for num in before]


def test_gradients_of_an_incomplete_round_wait_for_the_next_functions(strategy, caplog):
    def of_gradients():
        return [record for record in caplog.records if "are not applied yet" in record.getMessage()]

    with Job(strategy, replicas_to_aggregate=2) as job:
        job.train([1, 1, 5])
        assert float(job.w.value[0]) == -1
        assert int(job.count) == 3
        (record,) = of_gradients()
        assert record.levelno == logging.WARNING
        assert "replicas_to_aggregate is 2" in record.getMessage()
        assert job.train([3]) == [(-1.0, -1.0)]
        assert float(job.w.value[0]) == -5
        job.train([1])
        assert len(of_gradients()) == 1


def test_round_continues_after_a_failure(strategy):
    with Job(strategy, replicas_to_aggregate=2) as job:
        iterator = iter(job.coordinator.create_per_worker_dataset([np.int32(0)]))
        take = lambda iterator: next(iterator)  # noqa: E731
        job.train([2])

        def take_three():
            for _ in range(3):
                job.coordinator.schedule(take, (iterator,))  # which raises once one has failed
            job.coordinator.join(JOIN_S)

        with pytest.raises(rx.errors.OutOfRangeError):
            take_three()
        job.train([4])
        assert float(job.w.value[0]) == -3


@pytest.mark.parametrize("partitioner", [None, FixedShardsPartitioner(2)], ids=["whole", "in shards"])
def test_coupling_of_variables_uses_each_gradient(partitioner):
    def clipping():
        return keras.optimizers.Adagrad(0.5, initial_accumulator_value=0.0, epsilon=0.0, global_clipnorm=2.0)

    with (
        in_memory_strategy(2, 2, partitioner) as strategy,
        Job(strategy, clipping, replicas_to_aggregate=2) as job,
    ):
        norms = [np.sqrt(43) * gradient for gradient in (0.1, 5.0)]
        clipped = [gradient * min(1.0, 2.0 / norm) for gradient, norm in zip((0.1, 5.0), norms, strict=True)]
        job.train([0.1, 5.0])
        sums = [v for v in job.optimizer.variables if tuple(v.shape) == (40,)]
        np.testing.assert_allclose(sums[0].value, np.full(40, np.mean(clipped) ** 2), rtol=1e-5)
        np.testing.assert_allclose(job.w.value, np.full(3, -0.5), rtol=1e-5)


def test_repeated_variables_are_averaged_by_position(strategy):
    with strategy.scope():
        variables = [keras.Variable(np.zeros(2, np.float32)) for _ in range(3)]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)

    def one(x):
        first, second = jnp.full(2, x), jnp.full(2, 10 * x)
        optimizer.apply([first, first, second], variables)

    def other(x):
        first, second = jnp.full(2, x), jnp.full(2, 10 * x)
        optimizer.apply([first, second, second], variables)

    with ClusterCoordinator(strategy, replicas_to_aggregate=2) as coordinator:
        coordinator.schedule(one, (np.float32(1),))
        coordinator.schedule(other, (np.float32(1),))
        coordinator.join(JOIN_S)
    assert [float(variable.value[0]) for variable in variables] == [-1.0, -5.5, -10.0]


def test_a_gradient_that_is_not_finite_skips_its_round(strategy):
    def scaling():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)

    with Job(strategy, scaling, replicas_to_aggregate=2) as job:
        job.train([4, 8, np.inf, 4, 4, 6])
        assert float(job.w.value[0]) == -(1 + 2) / 2 - (2 + 3) / 2  # the scale is 2 in the last round
        assert float(job.optimizer.dynamic_scale.value) == 2.0
        assert job.counts() == (3, 0)


def test_round_without_room_for_all_rows_says_what_helps():
    with in_memory_strategy(2, 2, FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            tables = [keras.Variable(np.zeros((50, 4), np.float32)) for _ in range(2)]
            optimizer = keras.optimizers.SGD(1.0)

        def step(*ids):
            with rx.GradientTape() as tape:
                loss = sum(
                    jnp.sum(rx.nn.embedding_lookup(table, i)) for table, i in zip(tables, ids, strict=True)
                )
            optimizer.apply(tape.gradient(loss, tables), tables)

        many, few = np.arange(10), np.arange(2)
        with ClusterCoordinator(strategy, replicas_to_aggregate=2) as coordinator:
            coordinator.schedule(step, (many, few))
            coordinator.schedule(step, (few, many))
            message(InvalidArgumentError, lambda: coordinator.join(JOIN_S), "elements of the same shapes")
            for _ in range(2):
                coordinator.schedule(step, (many, few))
            coordinator.join(JOIN_S)
        assert [float(np.asarray(table)[:, 0].sum()) for table in tables] == [-10.0, -2.0]


@pytest.mark.parametrize("number", [0, 2.0, True])
def test_replicas_to_aggregate_is_an_integer(strategy, number):
    message(
        InvalidArgumentError,
        lambda: ClusterCoordinator(strategy, replicas_to_aggregate=number),
        "at least 1",
        repr(number),
    )


def test_one_mode_at_a_time(strategy):
    message(
        InvalidArgumentError,
        lambda: ClusterCoordinator(strategy, max_staleness=1, replicas_to_aggregate=2),
        "max_staleness=1",
        "replicas_to_aggregate=2",
        "Give only one of them",
    )


def test_assignment_after_an_optimizer_raises(strategy):
    with Job(strategy, replicas_to_aggregate=2) as job:

        def clipped():
            job.optimizer.apply([jnp.ones(3), jnp.ones(40)], [job.w, job.other])
            job.w.assign(jnp.zeros(3))

        message(
            UnsupportedError,
            lambda: job.coordinator.schedule(clipped),
            "test_rounds.py",
            "after an optimizer in the same function",
            "Assign in another scheduled function",
        )


def test_without_rounds_an_update_uses_one_function(strategy):
    with Job(strategy) as job:
        job.train([1, 2, 3])
        assert float(job.w.value[0]) == -6
        assert job.counts() == (0, 0)
    with Job(strategy, replicas_to_aggregate=3) as job:
        job.train([1, 2, 3])
        assert float(job.w.value[0]) == -2
