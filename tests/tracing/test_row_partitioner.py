"""A program over a global batch, split by rows: it equals the unsplit program, or is rejected with the line of the
cause."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import examples
from replicax._src.tracing.row_partitioner.row_layouts import RowSplit
from replicax._src.tracing.row_partitioner.row_plan import RowsPlan, split_by_rows
from replicax._src.tracing.row_partitioner.rules import NotByRowsError
from splitting import plan_of, run_by_rows, run_in_segments

EVEN, UNEVEN = (3, 3, 3), (4, 0, 5)
SIZES = [
    EVEN,
    UNEVEN,
    *(pytest.param(sizes, marks=pytest.mark.long) for sizes in [(4, 3, 2), (0, 2, 7), (9, 0, 0)]),
]


def check(function, whole, batch, sizes, rounds=None):
    got, sums = run_by_rows(function, whole, batch, sizes)
    expected = jax.tree_util.tree_leaves(jax.jit(function)(whole, batch))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    if rounds is not None:
        assert len(sums) == rounds


def rng():
    return np.random.default_rng(0)


X = rng().normal(size=(9, 4)).astype("float32")
IMAGES = rng().normal(size=(9, 6, 6, 2)).astype("float32")
IDS = rng().integers(0, 5, (9, 3))
W = rng().normal(size=(4, 5)).astype("float32")
KERNEL = rng().normal(size=(3, 3, 2, 4)).astype("float32")
TABLE = rng().normal(size=(5, 4)).astype("float32")
NUMBERS = ("NHWC", "HWIO", "NHWC")


def of_newer_versions(w, x):
    """Operations that older versions of JAX compute by others."""
    results = [jnp.log2(x**2 + 1).sum(0), jax.scipy.special.digamma(x**2 + 1).sum(0)]
    if hasattr(jax.lax, "polynomial"):  # whose second coefficient has one row here
        results.append(jax.lax.polynomial(x, [1.0, w.T[:1], x]).sum(0))
    return results


def convolved(kernel, x):
    return jax.lax.conv_general_dilated(x, kernel, (2, 1), "SAME", dimension_numbers=NUMBERS)


def depthwise(kernel, x):
    kernel = kernel.reshape(3, 3, 1, 8)
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=NUMBERS, feature_group_count=2
    )


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def loop(w, x):
    """A recurrent layer: the gradient of the weights is a sum that the loop carries."""

    def step(state, column):
        state = jnp.tanh(state + column[:, None] * w[0])
        return state, state

    last, states = jax.lax.scan(step, jnp.zeros((x.shape[0], 5)), x.T)
    return jnp.sum(last**2) + jnp.mean(states)


def clipped_step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    norm = jnp.sqrt(jnp.sum(gradient**2))
    return w - 0.1 * gradient * jnp.minimum(1.0, 1 / norm), loss


def normalised(w, x):
    y = x @ w
    mean, variance = jnp.mean(y, 0), jnp.var(y, 0)
    return jnp.mean(((y - mean) * jax.lax.rsqrt(variance + 1e-3)) ** 3)


def masked_mean(w, x):
    mask = x[:, 0] > 0
    return jnp.sum(jnp.where(mask, jnp.sum(x @ w, 1), 0)) / jnp.sum(mask)


def dropout(w, x):
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return jnp.sum(jnp.where(keep, x * 2, 0) @ w, 0)


CASES = {
    "sums": (lambda w, x: [jnp.sum(x), jnp.sum(x, 0), jnp.sum(x[:, 1]), jnp.mean(x, 0), jnp.var(x)], W, X, 2),
    "extremes": (lambda w, x: [jnp.max(x), jnp.min(x, 0), jnp.any(x > 2), jnp.all(x > -9)], W, X, 0),
    "extremes of whole numbers": (lambda w, x: [jnp.max(x), jnp.min(x), jnp.max(x, 1).sum()], W, IDS, 1),
    "counts": (lambda w, x: [jnp.sum(x > 0), jnp.sum(jnp.argmax(x, 1) == 2), jnp.mean(x > 0)], W, X, 1),
    "dense": (lambda w, x: jnp.mean(jax.nn.relu(x @ w) ** 2), W, X, 1),
    "gradient": (jax.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)), W, X, 1),
    "second derivative": (jax.jacfwd(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))), W, X, 1),
    "gradient, clipped by its norm: summed once": (clipped_step, W, X, 1),
    "operations of newer versions of JAX": (of_newer_versions, W, X, 1),
    "penalty on the weights": (jax.grad(lambda w, x: jnp.mean(x @ w) + jnp.sum(w**2)), W, X, 1),
    "batch normalisation": (jax.grad(normalised), W, X, None),
    "mean over a mask": (jax.grad(masked_mean), W, X, None),
    "dropout": (jax.grad(lambda w, x: jnp.sum(dropout(w, x) ** 2)), W, X, None),
    "convolution": (jax.grad(lambda k, x: jnp.mean(convolved(k, x) ** 2)), KERNEL, IMAGES, 1),
    "convolution, by depth": (jax.grad(lambda k, x: jnp.mean(depthwise(k, x) ** 2)), KERNEL, IMAGES, 1),
    "pooling": (jax.grad(lambda k, x: jnp.mean(pooled(convolved(k, x)) ** 2)), KERNEL, IMAGES, 1),
    "table": (jax.grad(lambda t, i: jnp.mean(t[i] ** 3)), TABLE, IDS, 1),
    "entries of rows": (lambda w, b: jnp.sum(jnp.take_along_axis(b[0], b[1] % 4, axis=1)), W, (X, IDS), 1),
    "gradient of entries of rows": (
        lambda w, b: jax.grad(lambda w: jnp.sum(jnp.take_along_axis(b[0] @ w, b[1], 1) ** 2))(w),
        W,
        (X, IDS),
        1,
    ),
    "columns": (jax.grad(lambda w, x: jnp.sum((x @ w)[:, jnp.array([0, 2, 2])] ** 2)), W, X, 1),
    "merged dims": (lambda w, x: jnp.sum((x.reshape(-1, 2) @ w[:2]).reshape(9, -1) ** 2, 0), W, X, 1),
    "rows moved": (lambda w, x: jnp.einsum("bhwc,cd->dbwh", x, KERNEL[0, 0]).sum((1, 2)), W, IMAGES, 1),
    "products of rows": (jax.grad(lambda w, x: jnp.sum(jnp.einsum("bi,bj->bij", x @ w, x)[:, 1])), W, X, 1),
    "softmax, sorted": (
        lambda w, x: [jnp.sort(jax.nn.softmax(x), 1).sum(0), jax.lax.top_k(x, 2)[0].sum()],
        W,
        X,
        1,
    ),
    "stacked, tiled, padded": (
        lambda w, x: [
            jnp.stack([x, x + 1], 0).sum((0, 1)),
            sum(jnp.unstack(x, axis=1)).sum(),
            sum(jnp.unstack(x[None], axis=0)).sum(0),
            jnp.tile(x, (1, 2)).sum(0),
            jnp.pad(x, ((0, 0), (1, 2))).sum(0),
            jnp.concatenate([x, jnp.ones((9, 1))], 1).sum(0),
            jnp.cumsum(x, 1).sum(0),
            x[:, ::-1].sum(0),
        ],
        W,
        X,
        1,
    ),
    "loop over columns": (jax.value_and_grad(loop), W, X, 1),
    "not a number": (lambda w, x: [jnp.max(x), jnp.min(x, 0)], W, np.where(X > 1.5, np.nan, X), 0),
    "differences of counts": (
        lambda w, x: (jnp.sum(x[:, 0]) - jnp.sum(x[:, 1])).astype(jnp.float32),
        W,
        IDS.astype("uint32"),
        1,
    ),
    "narrow sums": (lambda w, x: (x.T @ x).astype(jnp.float32), W, (IDS * 20).astype("int8"), 1),
    "images of bytes": (lambda w, x: jnp.mean(x.astype(jnp.float32) / 255, 0), W, IDS.astype("uint8"), 1),
    "scaled by nothing": (lambda w, x: jnp.sum(jnp.abs(x)) / (w[0, 0] * 0), W, X, 1),
    "bits, row by row": (lambda w, x: jnp.sum(jax.lax.reduce(x, 0, jax.lax.bitwise_or, (1,))), W, IDS, 1),
    "constants": (lambda w, x: jnp.sum(x * jnp.arange(9.0)[:, None] * jnp.ones((9, 4))), W, X, 1),
    "nothing of the batch": (lambda w, x: jnp.sum(w), W, X, 0),
}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_split_program_equals_the_unsplit_one(name, sizes):
    """This also holds if replicas have different numbers of rows, or none: their padding is never read."""
    check(*CASES[name][:3], sizes, rounds=CASES[name][3])


@pytest.mark.rest
@pytest.mark.parametrize("name", CASES)
def test_split_program_in_segments_equals_the_unsplit_one(name):
    function, whole, batch = CASES[name][:3]
    got = run_in_segments(function, whole, batch, UNEVEN)
    expected = jax.tree_util.tree_leaves(jax.jit(function)(whole, batch))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def counted_loop(w, x):
    """A loop that carries rows and a count, of which only the count is needed after the sums."""

    def step(carry, column):
        state, count = carry
        return (jnp.tanh(state + column[:, None] * w[0]), count + 2), None

    (state, count), _ = jax.lax.scan(step, (jnp.zeros((x.shape[0], 5)), jnp.zeros((), jnp.int32)), x.T)
    return jnp.mean(state), count


def test_last_segment_needs_no_rows():
    got = run_in_segments(counted_loop, W, X, UNEVEN)
    np.testing.assert_allclose(got[0], counted_loop(W, X)[0], rtol=2e-5)
    assert got[1] == 8


def test_one_row():
    check(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)), W, X[:1], (1, 0), rounds=1)


def scanned_over_rows(w, x):
    return jax.lax.scan(lambda total, row: (total + row @ w, None), jnp.zeros(5), x)[0]


def sum_in_every_step(w, x):
    return jax.lax.fori_loop(0, 3, lambda i, w: w - 0.1 * jnp.mean(jnp.tanh(x @ w)), w)


REFUSED = {
    "similarities": lambda w, x: jnp.sum(x @ x.T),
    "sorted rows": lambda w, x: jnp.sort(x, axis=0)[0],
    "running sum": lambda w, x: jnp.cumsum(x, axis=0)[-1],
    "first row": lambda w, x: x[0],
    "every other row": lambda w, x: jnp.sum(x[::2]),
    "reversed rows": lambda w, x: jnp.sum(x[::-1] * x),
    "shifted rows": lambda w, x: jnp.sum(jnp.concatenate([x[1:], x[:1]]) * x),
    "row by number": lambda w, x: jnp.sum(x[jnp.array([0, 3])]),
    "best row": lambda w, x: jnp.argmax(x[:, 0]),
    "product over rows": lambda w, x: jnp.prod(x, 0),
    "rows as the last dim": lambda w, x: x.T.reshape(-1).sum(),
    "rows given back": lambda w, x: x * 2,
    "loop over rows": scanned_over_rows,
    "sum in a loop": sum_in_every_step,
    "condition on rows": lambda w, x: jnp.sum(jax.lax.cond(w[0, 0] > 0, lambda x: x * 2, jnp.sin, x)),
    "co-occurrence": lambda w, x: (x > 0).T @ (x > 0),
    "bits of all rows": lambda w, x: jax.lax.reduce(x.astype(int), 0, jax.lax.bitwise_or, (0,)),
    "largest, in a loop": lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: c + jnp.max(x), 0.0),
    "added to more than the rows": lambda w, x: jnp.sum(jnp.ones((12, 4)).at[: x.shape[0], :2].add(x[:, :2])),
    "callback": lambda w, x: jnp.sum(jax.pure_callback(np.sin, jax.typeof(x), x, vmap_method="expand_dims")),
    "print": lambda w, x: [jax.debug.print("{}", w), jnp.sum(x)][1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_mix_rows_are_rejected(name):
    with pytest.raises(NotByRowsError) as caught:
        plan_of(REFUSED[name], W, X, (4, 3, 2))
    if name != "rows given back":
        assert "test_row_partitioner.py:" in str(caught.value)


# --- random programs ----------------------------------------------------------------------------------

STEPS = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: jnp.tanh(a) - b,
    lambda a, b: jnp.where(a > b, a, b),
    lambda a, b: a / (1 + jnp.sum(b**2)),
    lambda a, b: a - jnp.mean(b, axis=0),
    lambda a, b: a * jnp.max(b),
    lambda a, b: (a.T @ b)[:1] * a,
    lambda a, b: jnp.cumsum(a, axis=1) + b[:, :1],
    lambda a, b: jnp.concatenate([a[:, :2], b[:, 2:]], axis=1),
    lambda a, b: a.reshape(a.shape[0], 2, 2).transpose(2, 0, 1).sum(0).repeat(2, axis=1) + b,
    lambda a, b: jax.nn.softmax(a, axis=1) * b,
    lambda a, b: a @ (b.T @ a),
    lambda a, b: jnp.sort(a, axis=0) + b,
]


@pytest.mark.rest
@examples(40, short=15)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7),
    st.sampled_from([EVEN, UNEVEN]),
    st.booleans(),
)
def test_random_programs_are_equal_or_rejected(steps, sizes, is_differentiated):
    def program(w, x):
        values = [x, x @ w[:, :4], jnp.ones((9, 4)) * w[0, 0]]
        for step, one, other in steps:
            values.append(step(values[one % len(values)], values[other % len(values)]))
        return jnp.mean(jnp.sin(values[-1]))

    function = jax.value_and_grad(program) if is_differentiated else program
    try:
        with jax.enable_x64(True):  # such programs make much of rounding
            check(function, W.astype("float64"), X.astype("float64"), sizes)
    except NotByRowsError:
        assert STEPS[-1] in [step for step, _, _ in steps]


def test_one_function_gives_the_plan_or_the_reason_why_there_is_none():
    split = RowSplit(EVEN)
    summed = jax.make_jaxpr(lambda w, x: (x @ w).sum())(W, X).jaxpr
    plan = split_by_rows(summed, [False, True], split)
    assert isinstance(plan, RowsPlan)
    assert plan.num_rounds == 1
    mixed = jax.make_jaxpr(lambda x: jnp.sort(x, axis=0).sum())(X).jaxpr
    assert "sort" in split_by_rows(mixed, [True], split)
