"""A step as local programs is the step of one device. Neither assignments of replicas nor failures change a bit."""

import concurrent.futures
import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import examples
from local_processes import Cut, Exchanges, Team, assert_same_bits, combined, one_device, run_step
from replicax import errors
from replicax._src.devices import memory
from replicax._src.lowering.batch import DatasetBatch, WorkerRows
from replicax._src.lowering.held_state import HeldState
from replicax._src.lowering.local_programs import LocalStep
from replicax._src.lowering.round_buffers import RoundLayout

WIDTH, CLASSES, RATE = 6, 3, 0.1


def loss_of(weights, x, y, scale):
    """Two normalised layers, so that the step has several rounds; a maximum and a count of rows beside the loss."""
    first, second = weights
    hidden = x @ first * scale
    hidden = (hidden - jnp.mean(hidden, 0)) * jax.lax.rsqrt(jnp.var(hidden, 0) + 1e-3)
    logits = jnp.tanh(hidden) @ second
    loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))
    return loss, {"largest": jnp.max(logits), "hits": jnp.sum(jnp.argmax(logits, 1) == y)}


def training(state, batch):
    """A step with a clipped gradient, random numbers, a counter, a mean of the rows, and state that never changes."""
    weights, (count, key, mean), (fixed,) = state
    x, y = batch["x"], batch["y"]
    key, used = jax.random.split(key)
    x = jnp.where(jax.random.bernoulli(used, 0.8, x.shape), x, 0)
    (loss, logs), grads = jax.value_and_grad(loss_of, has_aux=True)(weights, x, y, batch["scale"])
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
    grads = [g * jnp.minimum(1.0, 0.5 / norm) for g in grads]
    weights = [w - RATE * fixed * g for w, g in zip(weights, grads, strict=True)]
    mean = 0.9 * mean + 0.1 * jnp.mean(batch["x"], 0)
    return {"loss": loss, "norm": norm, **logs}, (weights, [count + 1, key, mean], [fixed])


def new_state():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape).astype("float32") for shape in ((WIDTH, 8), (8, CLASSES))]
    return (
        list(map(jnp.asarray, weights)),
        [jnp.int32(0), jax.random.PRNGKey(1), jnp.zeros(WIDTH)],
        [jnp.float32(1)],
    )


def batch_of(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, WIDTH)).astype("float32"),
        "y": rng.integers(0, CLASSES, rows),
        "scale": np.float32(0.5),
    }


STEPS: dict[int, LocalStep] = {}


def step_for(num_replicas):
    """One step for all tests, so that its programs are compiled once."""
    return STEPS.setdefault(num_replicas, LocalStep(training, "training", one_device(), num_replicas))


def team_of(num_replicas, assignment=None):
    assignment = assignment or [[replica] for replica in range(num_replicas)]
    return Team(step_for(num_replicas), new_state, num_replicas, assignment)


def trained(num_replicas, rows, assignment=None, num_steps=5):
    team = team_of(num_replicas, assignment)
    outputs = [team.run(batch_of(rows, seed)) for seed in range(num_steps)]
    for process in range(1, len(team.assignment)):
        assert_same_bits(team.values(process), team.values())
        assert_same_bits([out[process] for out in outputs], [out[0] for out in outputs])
    return team.values(), [out[0] for out in outputs]


@contextlib.contextmanager
def counting_compilations():
    counts = []

    def note(event, duration, **_):
        del duration
        if event == "/jax/core/compile/backend_compile_duration":
            counts.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


CASES = [(1, 96), (2, 97), (3, 97), (5, 3)]
MORE = [pytest.param(*case, marks=pytest.mark.rest) for case in [(2, 96), (3, 96), (4, 96), (4, 97)]]


@pytest.mark.parametrize(("num_replicas", "rows"), [*CASES, *MORE])
def test_steps_are_those_of_one_device(num_replicas, rows):
    values, outputs = trained(num_replicas, rows)
    state, reference = new_state(), jax.jit(training)
    for seed, out in enumerate(outputs):
        expected, state = reference(state, batch_of(rows, seed))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), out, expected)
    expected = jax.tree.leaves(state)
    largest = max(float(jnp.max(jnp.abs(w))) for w in state[0])
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize(("num_replicas", "rows"), [(3, 97), (5, 3)])
def test_no_bit_depends_on_the_assignment_of_replicas(num_replicas, rows):
    alone = trained(num_replicas, rows, [list(range(num_replicas))])
    assert_same_bits(trained(num_replicas, rows), alone)
    odd, even = range(1, num_replicas, 2), range(0, num_replicas, 2)
    assert_same_bits(trained(num_replicas, rows, [list(odd), list(even)]), alone)


def test_adoption_compiles_nothing_and_changes_no_bit():
    expected, _ = trained(3, 97)
    team = team_of(3)
    team.run(batch_of(97, 0))
    with counting_compilations() as compilations:
        team.run(batch_of(97, 1))
        team.assign([[0, 2], [1]])
        team.run(batch_of(97, 2))
        team.assign([[0, 2, 1]])
        for seed in (3, 4):
            team.run(batch_of(97, seed))
    assert compilations == []
    assert_same_bits(team.values(), expected)


NUM_ROUNDS = 5


def test_step_has_the_rounds_that_it_needs():
    rounds = team_of(3).programs(batch_of(97)).rounds
    assert len(rounds) == NUM_ROUNDS
    assert {b.dtype.name for buffers in rounds for b in buffers} == {"float32", "int32"}
    assert {b.reduction for buffers in rounds for b in buffers} == {"sum", "max"}


@pytest.mark.parametrize("cut_before", range(NUM_ROUNDS + 1))
def test_cancelled_step_destroys_nothing_and_can_be_repeated(cut_before):
    expected, _ = trained(3, 97, num_steps=3)
    team = team_of(3)
    team.run(batch_of(97, 0))
    before, arrays = team.values(), team.held[0].values()
    for _ in range(2):
        with pytest.raises(Cut):
            team.run(batch_of(97, 1), cut_before)
        assert not any(array.is_deleted() for array in arrays)
        assert_same_bits(team.values(), before)
    team.assign([[0], [2, 1]])  # the repeated step has other processes
    del arrays
    for seed in (1, 2):
        team.run(batch_of(97, seed))
    assert_same_bits(team.values(), expected)


def test_process_that_is_one_step_behind_updates_its_state_from_the_sums():
    expected, outputs = trained(3, 97, num_steps=1)
    team = team_of(3)
    assert_same_bits(team.run(batch_of(97), behind=[0, 2]), outputs * 3)
    for process in range(3):
        assert_same_bits(team.values(process), expected)


@st.composite
def faults(draw):
    """For each step: the rounds before which it is cut, the processes that lose its sums, and the deaths after it."""
    steps, num_alive = [], 3
    for _ in range(4):
        cuts = draw(st.lists(st.integers(0, NUM_ROUNDS), max_size=2))
        order = draw(st.permutations(range(3)))
        behind = draw(st.sets(st.integers(0, num_alive - 1), max_size=num_alive - 1))
        steps.append((cuts, [list(order[i::num_alive]) for i in range(num_alive)], behind))
        num_alive -= draw(st.integers(0, num_alive - 1)) if num_alive > 1 else 0
    return steps


@examples(60, short=8)
@given(faults())
def test_no_order_of_faults_changes_a_bit(steps):
    expected, _ = trained(3, 97, num_steps=len(steps))
    team = team_of(3)
    for seed, (cuts, assignment, behind) in enumerate(steps):
        team.assign(assignment)
        for cut_before in cuts:
            with pytest.raises(Cut):
                team.run(batch_of(97, seed), cut_before)
        team.run(batch_of(97, seed), behind=behind)
    for process in range(len(team.assignment)):
        assert_same_bits(team.values(process), expected)


def test_batch_may_be_overwritten_as_soon_as_the_step_returns():
    expected, _ = trained(3, 96, num_steps=3)
    team, buffers = team_of(3), batch_of(96)
    for seed in range(3):
        for name, array in batch_of(96, seed).items():
            buffers[name] = np.array(array) if not np.ndim(array) else buffers[name]
            buffers[name][...] = array
        team.run(buffers)
        buffers["x"][...] = np.nan
    assert_same_bits(team.values(), expected)


def test_process_may_have_only_the_rows_of_its_own_replicas():
    expected, _ = trained(3, 97, num_steps=1)
    team, sizes = team_of(3), (33, 33, 31)
    whole = batch_of(97)
    starts = np.cumsum((0, *sizes))

    def rows_of(replica):
        rows = slice(starts[replica], starts[replica + 1])
        return DatasetBatch(
            {
                name: WorkerRows.of(array[rows], sizes) if np.ndim(array) else array
                for name, array in whole.items()
            }
        )

    step = LocalStep(training, "training", one_device(), 3)
    programs = step.programs(team.held[0], rows_of(0))
    exchanges = Exchanges(programs.rounds, 3, 2)

    def run(process, replicas):
        batches, held = list(map(rows_of, replicas)), team.held[process]
        run_step(step, held, batches, replicas, exchanges.of(replicas))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2), [[0, 2], [1]]))
    assert_same_bits(team.values(), expected)
    assert_same_bits(team.values(1), expected)


def test_no_result_shares_the_memory_of_the_sums():
    """The owner of the sums may write into them again, while the state and the outputs still have the sums."""

    def step(state, x):
        del state
        total = jnp.sum(x, 0)
        return total, ([total],)

    local, held = LocalStep(step, "step", one_device(), 2), HeldState(one_device())
    held.hold(([jnp.zeros(4)],))
    buffer = memory.empty((4,), np.float32)

    def combine(round_index, parts):
        buffer[...] = parts[0][0]
        return [buffer]

    x = np.ones((2, 4), "float32")
    out = run_step(local, held, [DatasetBatch(x)], [0], combine)
    jax.block_until_ready(held.values())
    buffer[...] = 9
    np.testing.assert_array_equal(out, np.ones(4))
    np.testing.assert_array_equal(held.values()[0], np.ones(4))


# --- steps that cannot be split ----------------------------------------------------------------------


def sorting(state, batch):
    """The rows cannot be sorted without the other replicas."""
    ((total,),) = state
    return jnp.sum(jnp.sort(batch, 0)[0]), ([total + jnp.sort(batch, 0)[-1]],)


def no_round(round_index, parts):
    raise AssertionError("there is nothing to combine")


def test_step_that_cannot_be_split_runs_on_the_whole_batch_in_every_process(caplog):
    step, held = LocalStep(sorting, "sorting", one_device(), 3), HeldState(one_device())
    held.hold(([jnp.zeros(2)],))
    x = np.random.default_rng(0).normal(size=(7, 2)).astype("float32")
    with caplog.at_level(logging.WARNING, "replicax"):
        programs = step.programs(held, DatasetBatch(x))
    assert programs.rounds == ()
    assert "sorting: every process computes the whole batch" in caplog.text
    assert "test_local_programs.py" in caplog.text
    out = run_step(step, held, [DatasetBatch(x)], [1], no_round)
    x_before = x.copy()
    x[...] = 0
    np.testing.assert_allclose(out, x_before.min(0).sum(), rtol=1e-6)
    np.testing.assert_array_equal(held.values()[0], x_before.max(0))


def test_step_that_cannot_be_split_needs_the_whole_batch_in_every_process():
    step, held = LocalStep(sorting, "sorting", one_device(), 2), HeldState(one_device())
    held.hold(([jnp.zeros(2)],))
    rows = DatasetBatch(WorkerRows.of(np.ones((2, 2), "float32"), (2, 1)))
    with pytest.raises(errors.UnsupportedError, match="each process has only its own rows"):
        step.programs(held, rows)


def test_predictions_are_those_of_the_whole_batch():
    def predicting(state, x):
        return x @ state[0][0], state

    step = LocalStep(predicting, "predicting", one_device(), 3, gives_rows=True)
    held = HeldState(one_device())
    held.hold(([jnp.ones((2, 2))],))
    x = np.arange(10, dtype="float32").reshape(5, 2)
    out = run_step(step, held, [DatasetBatch(x)], [2], no_round, donates=False)
    np.testing.assert_array_equal(out, x @ np.ones((2, 2), "float32"))


# --- programs and buffers ----------------------------------------------------------------------------


def adding(state, batch):
    ((total,),) = state
    return jnp.mean(batch), ([total + jnp.sum(batch, 0)],)


def adding_twice(state, batch):
    return adding(state, batch * 2)


def test_digest_is_that_of_the_programs():
    def digest(step, num_replicas):
        held = HeldState(one_device())
        held.hold(([jnp.zeros(2)],))
        made = LocalStep(step, "adding", one_device(), num_replicas)
        return made.programs(held, DatasetBatch(np.ones((6, 2), "float32"))).digest

    assert digest(adding, 3) == digest(adding, 3)
    assert len({digest(adding, 3), digest(adding_twice, 3), digest(adding, 2)}) == 3


DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "int32", "uint32", "complex64")


@pytest.mark.parametrize("num_each", [1, 3])
def test_arrays_of_all_dtypes_are_added(num_each):
    rng = np.random.default_rng(0)
    dtypes = [dtype for dtype in DTYPES for _ in range(num_each)]
    arrays = [
        [jnp.asarray(rng.integers(0, 9, (3, 1 + i % 2)), dtype) for i, dtype in enumerate(dtypes)]
        for _ in range(3)
    ]
    layout = RoundLayout(["sum"] * len(dtypes), arrays[0])
    assert [b.dtype.name for b in layout.buffers] == ["float32", "int32", "uint32"]
    packed = jax.jit(layout.pack)
    totals = combined(layout.buffers, [list(map(np.asarray, packed(of_one))) for of_one in arrays])

    @jax.jit
    def unpacked(totals):
        got = {}
        for at, total in enumerate(totals):
            got |= layout.unpack(at, total)
        return got

    got = unpacked(totals)
    for i, dtype in enumerate(dtypes):
        assert got[i].dtype == dtype
        np.testing.assert_array_equal(got[i], sum(np.asarray(of_one[i]) for of_one in arrays))


def test_arrays_without_entries_do_not_travel():
    def step(state, x):
        ((total, nothing),) = state
        return (), ([total + jnp.sum(x, 0), nothing + jnp.sum(x[:, :0], 0)],)

    def state():
        return ([jnp.zeros(4), jnp.zeros(0)],)

    team = Team(LocalStep(step, "step", one_device(), 2), state, 2, [[0, 1]])
    x = np.ones((5, 4), "float32")
    assert [[b.size for b in buffers] for buffers in team.programs(x).rounds] == [[4]]
    team.run(x)
    assert_same_bits(team.values(), [np.full(4, 5, "float32"), np.zeros(0, "float32")])


def test_rounds_have_few_buffers_and_large_arrays_travel_alone():
    arrays = [jnp.zeros(10), jnp.zeros((500, 300)), jnp.zeros(4), jnp.zeros(3, bool), jnp.zeros(2, jnp.int32)]
    layout = RoundLayout(["sum", "sum", "sum", "max", "sum"], arrays)
    assert [(b.reduction, b.dtype.name, b.size) for b in layout.buffers] == [
        ("sum", "float32", 14),
        ("sum", "float32", 150_000),
        ("sum", "int32", 2),
        ("max", "int32", 3),
    ]
    assert layout.buffers_of([2, 0]) == [0]
    assert layout.buffers_of([3, 1]) == [1, 3]
