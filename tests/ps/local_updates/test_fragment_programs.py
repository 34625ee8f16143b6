"""The update programs of local updates on a real ``Store``, in one process."""

import itertools
import random

import numpy as np
import optax
import pytest
from fragment_store import FragmentStore

from ps_simulation.round_model import NOT_FINITE, RoundModel
from replicax._ps.local_updates.int8_blocks import decoded, encoded
from replicax._ps.local_updates.outer_optimizer import OuterTransformation, outer_optimizer_of
from replicax._ps.local_updates.round_state import REFUSED, MemberState
from replicax._ps.local_updates.stored_position import StoredPosition
from replicax.errors import InvalidArgumentError

SIZE = 300  # more than a block


def pushes(num, seed=0):
    of_seed = np.random.default_rng(seed)
    return [
        (of_seed.normal(size=SIZE) * 10.0 ** of_seed.integers(-3, 3)).astype(np.float32) for _ in range(num)
    ]


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "int8"])
def either(request):
    return FragmentStore(SIZE, 4, is_compressed=request.param)


@pytest.fixture(scope="module")
def float32():
    return FragmentStore(SIZE, 4)


def fresh(store, theta=None, *, rate=0.7, decay=0.9):
    store.begin(pushes(1, seed=9)[0] if theta is None else theta, rate=rate, decay=decay)
    for member in range(4):
        store.claim(member, 10 + member)
    return store


def test_all_orders_of_four_pushes_give_one_bit_pattern(either):
    patterns = set()
    for order in itertools.permutations(range(4)):
        store = fresh(either)
        for member, values in [(each, pushes(4)[each]) for each in order]:
            store.push(member, 10 + member, 1, 0, (7, 7, 1, 2)[member], values)
        store.close(0, 4)
        patterns.add(store.read("theta").tobytes() + store.read("momentum").tobytes())
    assert len(patterns) == 1


def test_repeated_and_late_requests_change_nothing(either):
    store = fresh(either)
    one, two = pushes(2)
    first, other = StoredPosition(30, 210), StoredPosition(60, 420)
    state = store.push(0, 10, 1, 0, 7, one, position=first.encoded())
    assert StoredPosition.decoded(store.read("positions")[0]) == first
    assert (state.members[0].pushed, state.members[0].landed, state.members[0].tokens) == (1, 0, 7)
    before = store.bits
    store.push(0, 10, 1, 0, 7, one)  # again
    store.push(0, 10, 3, 2, 7, two)  # the server lacks push 2
    store.push(0, 99, 1, 0, 7, two, position=other.encoded())  # another process
    store.claim(0, 99)  # the slot is taken
    store.close(1)  # another version
    store.close(0, 2)  # one member has pushed
    assert store.bits == before
    assert store.close(0).version == 1
    before = store.bits
    store.close(0)
    store.close(1)  # nothing was pushed
    assert store.bits == before
    assert store.push(0, 10, 2, 1, 7, two, position=other.encoded()).members[0].landed == 1
    assert StoredPosition.decoded(store.read("positions")[0]) == other
    assert StoredPosition.decoded(store.read("positions")[1]) == StoredPosition()


def test_push_that_is_not_finite_is_refused_and_counts_as_pushed(either):
    store = fresh(either)
    for number, bad in enumerate((np.nan, np.inf), 1):
        values = pushes(1)[0]
        values[200] = bad
        before = store.read("slots")
        state = store.push(0, 10, number, number - 1, 7, values, is_last=True)
        assert state.members[0] == (10, number, REFUSED, 0, 1)
        np.testing.assert_array_equal(store.read("slots"), before)
        assert not state.contributors


@pytest.mark.parametrize("is_nesterov", [pytest.param(False, marks=pytest.mark.rest), True])
def test_close_is_a_step_of_sgd_with_the_mean_by_rows_and_a_flush_adds_the_mean(is_nesterov):
    store = FragmentStore(SIZE, 2, is_nesterov=is_nesterov).begin(np.zeros(SIZE), rate=0.7, decay=0.9)
    theta = momentum = np.zeros(SIZE)
    for version in range(4):
        one, two = pushes(2, seed=version)
        if not version:
            store.claim(0, 10)
            store.claim(1, 11)
        store.push(0, 10, version + 1, version, 14, one)
        store.push(1, 11, version + 1, version, 2, two)
        mean = (14 * one.astype(np.float64) + 2 * two) / 16
        is_flush = version == 3
        if is_flush:
            theta = theta - mean
        else:
            momentum = 0.9 * momentum + mean
            theta = theta - 0.7 * (mean + 0.9 * momentum if is_nesterov else momentum)
        store.close(version, 2, is_flush=is_flush)
        np.testing.assert_allclose(store.read("theta"), theta, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(store.read("momentum"), momentum, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(store.read("history")[version + 1], [version + 1, is_flush, 14, 2])


@pytest.mark.rest
def test_close_with_optax_is_its_update_of_the_mean_by_rows_and_a_flush_leaves_its_state():
    transformation = optax.chain(optax.clip(1.0), optax.adam(0.1))
    store = FragmentStore(SIZE, 2, optimizer=OuterTransformation(transformation)).begin(np.zeros(SIZE))
    for member in range(2):
        store.claim(member, 10 + member)
    theta = np.zeros(SIZE, np.float32)
    state = transformation.init(theta)
    for version in range(3):
        one, two = pushes(2, seed=version)
        store.push(0, 10, version + 1, version, 3, one)
        store.push(1, 11, version + 1, version, 1, two)
        mean = (3 * one.astype(np.float64) + two) / 4
        is_flush = version == 2
        if is_flush:
            theta = theta - mean
        else:
            update, state = transformation.update(mean.astype(np.float32), state, theta)
            theta = theta + update
        store.close(version, 2, is_flush=is_flush)
        np.testing.assert_allclose(store.read("theta"), theta, rtol=1e-5, atol=1e-4)
    assert store.read("state 0") == 2  # Adam's count
    keeps_parameters = optax.GradientTransformation(
        lambda params: params, lambda updates, state, _: (updates, state)
    )
    with pytest.raises(InvalidArgumentError, match="begins with the parameters"):
        outer_optimizer_of(keeps_parameters)
    assert outer_optimizer_of(transformation) == OuterTransformation(transformation)


def test_rounds_are_those_of_the_simulated_server(float32):
    """The integer model of `tests/ps_simulation` and the programs agree on every number, request after request."""
    for seed in range(3):
        of_seed = random.Random(seed)
        store, model = fresh(float32), RoundModel.new(0, 4, 5)
        owners = [10, 11, 12, 13]
        for member, owner in enumerate(owners):
            model.claim(member, MemberState(), owner)
        for _ in range(60):
            member = of_seed.randrange(4)
            me = model.members[member]
            match of_seed.choice(["push", "push", "push", "close", "claim"]):
                case "push":
                    after = of_seed.choice([me.pushed, me.pushed, me.pushed, max(0, me.pushed - 1)])
                    tokens, is_last, stops = (
                        of_seed.choice([0, 1, 7]),
                        of_seed.random() < 0.1,
                        of_seed.random() < 0.05,
                    )
                    is_finite = of_seed.random() < 0.9
                    push = member, me.owner, after + 1, after, tokens
                    model.push(*push, is_last, stops, 0 if is_finite else NOT_FINITE)
                    values = np.full(SIZE, 1.0 if is_finite else np.nan)
                    state = store.push(*push, values, is_last=is_last, stops=stops)
                case "close":
                    version, quorum = model.version - of_seed.choice([0, 0, 1]), of_seed.randint(1, 4)
                    model.close(version, quorum, False)
                    state = store.close(version, quorum)
                case "claim":
                    owner, other = of_seed.randint(20, 99), me._replace(pushed=me.pushed + 1)
                    expected = of_seed.choice([me, me, MemberState(), other])
                    model.claim(member, expected, owner)
                    state = store.claim(member, owner, expected)
            assert state == model.state


def test_stop_reaches_a_group_that_comes_after_all_others_have_pushed_their_last(float32):
    store = float32
    store.begin(np.zeros(SIZE))
    store.claim(0, 10)
    first = store.push(0, 10, 1, 0, 1, np.zeros(SIZE), is_last=True, stops=True)
    second = store.claim(1, 21)
    assert second.is_stopping
    assert store.claim(1, 31, second.members[1]).is_stopping  # it was killed, and has started again
    assert store.claim(0, 20, first.members[0]).is_stopping  # it was killed while it finished


def test_integers_and_scales_are_exact_on_both_sides(either):
    for scale, values in enumerate(pushes(5)):
        values[:256] *= scale  # zeros too
        integers, scales = encoded(values)
        error = np.abs(decoded(integers, scales) - values)
        assert error.max() <= np.abs(values).max() / 127
        fresh(either).push(0, 10, 1, 0, 1, values)
        sent = decoded(integers, scales) if either.is_compressed else values
        np.testing.assert_array_equal(either.read("slots")[0], sent)


def test_exchanging_at_each_step_equals_one_device_with_uneven_groups(float32):
    """H=1, outer SGD(1), groups of 7, 7, 1 and 1 rows: the mean by rows of all gradients is that of one device."""
    of_seed = np.random.default_rng(0)
    features = of_seed.normal(size=(100, 16, SIZE)).astype(np.float32)
    labels = np.tanh(features @ of_seed.normal(size=SIZE) / 10).astype(np.float32)
    rows = [slice(0, 7), slice(7, 14), slice(14, 15), slice(15, 16)]

    def gradient(w, x, y):
        hidden = np.tanh(x @ w)
        return x.T @ ((hidden - y) * (1 - hidden**2)) / len(y)

    one = start = of_seed.normal(size=SIZE).astype(np.float32) / 10
    store = fresh(float32, start, rate=1.0, decay=0.0)
    for step in range(100):
        one = one - np.float32(0.1) * gradient(one, features[step], labels[step])
        outer = store.read("theta")
        for member, some in enumerate(rows):
            w = outer - np.float32(0.1) * gradient(outer, features[step, some], labels[step, some])
            store.push(member, 10 + member, step + 1, step, some.stop - some.start, outer - w)
        store.close(step, 4)
    assert np.abs(store.read("theta") - one).max() <= 1e-6 * np.abs(one).max()
    assert np.abs(one - start).max() > 0.1
