"""Operations that mix the rows of a batch; each is a function of an array [rows, 4] of multiples of 1/16, which
float32 holds exactly.

An operation that truncates, rounds or compares therefore gives the same in float32 and in float64, and ties are ties
in both.
"""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np

FEATURES = 4


def f32(x):
    return x.astype(jnp.float32)


def ints(x):
    """Integers with ties."""
    return jax.lax.stop_gradient(jnp.round(x)).astype(jnp.int32)


def bits(x):
    return jax.lax.bitcast_convert_type(f32(jax.lax.stop_gradient(x)), jnp.int32)


def order(x, columns=0):
    return jnp.argsort(jax.lax.stop_gradient(x[:, columns]), axis=0)


def ids(x, size=3):
    return jnp.arange(len(x)) * 7 % size


def rows(x):
    return jnp.arange(len(x), dtype=x.dtype)


def distances(x):
    return jnp.sum((x[:, None] - x[None]) ** 2, -1)


def gram(x):
    """Positive definite, one row and column for each row."""
    return x @ x.T / 8 + 2 * jnp.eye(len(x), dtype=x.dtype)


def normalised(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def square(x):
    """As many rows as columns for any batch, and well-conditioned."""
    return x.T @ x / len(x) + 2 * jnp.eye(x.shape[1], dtype=x.dtype)


def hard_triplets(x):
    d, labels = distances(x), ids(x)
    same = labels[:, None] == labels[None]
    positive = jnp.max(jnp.where(same, d, 0), 1)
    negative = jnp.min(jnp.where(same, 1e6, d), 1)
    return jnp.maximum(positive - jnp.where(negative < 1e5, negative, 0) + 1, 0)


def contrastive(x):
    logits = normalised(x) @ normalised(jnp.roll(x, 1, 1)).T * 4
    return jax.nn.log_softmax(logits, 1)[jnp.arange(len(x)), jnp.arange(len(x))]


def supervised_contrastive(x):
    z, labels = normalised(x), ids(x)
    logits = z @ z.T - 9 * jnp.eye(len(x), dtype=x.dtype)
    same = (labels[:, None] == labels[None]) & ~jnp.eye(len(x), dtype=bool)
    return jnp.sum(jnp.where(same, jax.nn.log_softmax(logits, 1), 0), 1) / jnp.maximum(jnp.sum(same, 1), 1)


def batch_norm(x):
    return (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-3)


def barlow(x):
    z = batch_norm(x)
    return z.T @ z / len(x)


def scanned(x):
    def step(state, row):
        state = jnp.tanh(state / 2 + row)
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]


def scanned_back(x):
    return jax.lax.scan(lambda s, row: (s * 0.5 + row, s), jnp.zeros_like(x[0]), x, reverse=True)[1]


def looped(x):
    def body(state):
        i, total = state
        return i + 1, total * 0.5 + jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

    return jax.lax.while_loop(lambda s: s[0] < len(x), body, (0, jnp.zeros_like(x[0])))[1]


def by_fori(x):
    return jax.lax.fori_loop(0, len(x), lambda i, y: y.at[i].multiply(1 + i / 8), x)


def branch(x):
    return jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.sort(x, 0), lambda x: jnp.flip(x, 0) * 2, x)


def switched(x):
    branches = [lambda x: x, lambda x: jnp.cumsum(x, 0), lambda x: jnp.roll(x, 1, 0)]
    return jax.lax.switch(jnp.abs(ints(x)[0, 0]) % 3, branches, x)


def convolved(x, image, kernel, numbers, **options):
    lhs = x.reshape(image)
    rhs = jnp.cos(jnp.arange(np.prod(kernel), dtype=x.dtype)).reshape(kernel)
    return jax.lax.conv_general_dilated(
        lhs, rhs, (1,) * (len(image) - 2), "SAME", dimension_numbers=numbers, **options
    )


def gram_kernel(x):
    """A convolution whose kernel also depends on the rows."""
    kernel = jnp.flip(x, 0).T[:, None, :]
    return jax.lax.conv_general_dilated(
        x.T[None], kernel, (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH"), feature_group_count=4
    )


def dynamic_sliced(x):
    start = jnp.abs(ints(x)[0, 0]) % len(x)
    return jax.lax.dynamic_slice_in_dim(x, start, max(1, len(x) // 2), 0)


def dynamic_updated(x):
    start = jnp.abs(ints(x)[0, 1]) % len(x)
    return jax.lax.dynamic_update_slice_in_dim(x * 2, x[: max(1, len(x) // 2)], start, 0)


def pooled(x, reduce, start, window=2, stride=1, padding="SAME"):
    return jax.lax.reduce_window(x, start, reduce, (window, 1), (stride, 1), padding)


def perturbed(x, kind, **options):
    return x * f32(getattr(jax.random, kind)(jax.random.key(3), shape=x.shape, dtype=jnp.float32, **options))


def attention(x):
    """Rows attend to the rows before them."""
    logits = jnp.where(jnp.tri(len(x), dtype=bool), x @ x.T / 2, -1e9)
    return jax.nn.softmax(logits, 1) @ x


def sinkhorn(x):
    logits = x / 4
    for _ in range(3):
        logits = logits - jsp.special.logsumexp(logits, 0)
        logits = logits - jsp.special.logsumexp(logits, 1, keepdims=True)
    return jnp.exp(logits)


def mixed_up(x):
    alpha = jnp.cos(rows(x))[:, None]
    return alpha * x + (1 - alpha) * x[jax.random.permutation(jax.random.key(1), len(x))]


def queue(x):
    return jnp.concatenate([x, jnp.ones_like(x)[:3]], 0)[: len(x)]


def ranked(x):
    return jnp.argsort(jnp.argsort(jax.lax.stop_gradient(x), 0), 0)


def listwise(x):
    """ListMLE over the batch: rows in the order of a column, then a cumulative log-sum-exp."""
    s = x[order(x, 1), 0]
    return s - jax.lax.cumlogsumexp(s, reverse=True)


def cox(x):
    time = order(x, 2)
    risk = jax.lax.cumlogsumexp(jnp.flip(x[time, 0]))
    return x[time, 0] - jnp.flip(risk)


def whitened(x):
    centred = x - x.mean(0)
    values, vectors = jnp.linalg.eigh(
        centred.T @ centred / len(x) + jnp.diag(jnp.arange(1.0, 5.0, dtype=x.dtype))
    )
    return jnp.abs(centred @ vectors) / jnp.sqrt(values)


def unique(x):
    return jnp.unique(ints(x)[:, 0], size=6, fill_value=9, return_inverse=True)[1]


def rng_rows(x):
    """Each row draws from its own key."""
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(len(x)))
    return x * jax.vmap(lambda key: jax.random.normal(key, (4,), jnp.float32))(keys)


OPERATIONS = {
    # sorting and selecting
    "sort": lambda x: jnp.sort(x, 0),
    "sort_with_ties": lambda x: jnp.sort(ints(x), 0),
    "sort_flat": lambda x: jnp.sort(x.ravel()),
    "sort_descending": lambda x: jnp.sort(x, 0, descending=True),
    "sort_pairs": lambda x: jax.lax.sort([x[:, 0], x[:, 1]], num_keys=1)[1],
    "sort_two_keys": lambda x: jax.lax.sort([jnp.round(x[:, 0]), x[:, 1], x[:, 2]], num_keys=2)[2],
    "sort_by_token": lambda x: jnp.sort(x.reshape(-1, 2), 0),
    "sort_without_first": lambda x: jnp.sort(x[min(1, len(x) - 1) :], 0),
    "sort_with_more": lambda x: jnp.sort(jnp.concatenate([x, x[:1] * 2, x[-1:] + 1], 0), 0),
    "sort_halved": lambda x: jnp.sort(x[::2], 0),
    "sort_distances": lambda x: jnp.sort(distances(x), 0),
    "sort_wide": lambda x: jnp.sort(jnp.pad(x, ((0, 1), (0, 0))).reshape(2, -1), 1),
    "argsort": lambda x: jnp.argsort(jax.lax.stop_gradient(x), 0),
    "argsort_with_ties": lambda x: jnp.argsort(ints(x), 0),
    "argsort_take": lambda x: jnp.take(x, order(x), 0),
    "argsort_take_along_axis": lambda x: jnp.take_along_axis(x, order(x, slice(None)), 0),
    "lexsort": lambda x: x[jnp.lexsort((ints(x)[:, 0], ints(x)[:, 1]))],
    "rank": ranked,
    "top_k": lambda x: jax.lax.top_k(x.T, min(3, len(x)))[0],
    "top_k_rows": lambda x: x[jax.lax.top_k(x[:, 0], min(3, len(x)))[1]],
    "approx_max_k": lambda x: jax.lax.approx_max_k(x[:, 0], 1)[0],
    "argmax": lambda x: jnp.argmax(x, 0),
    "argmin_with_ties": lambda x: jnp.argmin(ints(x), 0),
    "argmax_flat": lambda x: jnp.argmax(x),
    "row_of_argmax": lambda x: x[jnp.argmax(x[:, 0])],
    "unique": unique,
    "nonzero": lambda x: jnp.nonzero(ints(x)[:, 0], size=len(x), fill_value=-1)[0],
    "where_size": lambda x: x[jnp.where(x[:, 0] > 0, size=len(x), fill_value=0)[0]],
    "median": lambda x: jnp.median(x, 0),
    "quantile": lambda x: jnp.quantile(x, jnp.array([0.1, 0.5, 0.8], x.dtype), axis=0),
    "percentile_nearest": lambda x: jnp.percentile(x, 30, axis=0, method="nearest"),
    "nanmedian": lambda x: jnp.nanmedian(jnp.where(x > 2, jnp.nan, x), 0),
    "partition": lambda x: jnp.sort(jnp.partition(x, len(x) // 2, 0)[: len(x) // 2 + 1], 0),
    "searchsorted": lambda x: jnp.searchsorted(jnp.sort(x[:, 0]), x[:, 1]),
    "digitize": lambda x: jnp.digitize(x, jnp.array([-2.0, 0.0, 1.5])),
    "bincount": lambda x: jnp.bincount(jnp.abs(ints(x).ravel()), length=5),
    "bincount_weighted": lambda x: jnp.bincount(ids(x), weights=x[:, 0], length=5),
    "histogram": lambda x: jnp.histogram(x, bins=5, range=(-4, 4))[0],
    "histogram_of_range": lambda x: jnp.histogram(x, bins=4)[1],
    "isin": lambda x: jnp.isin(ints(x)[:, 0], ints(x)[:, 1]),
    "mode_by_counts": lambda x: jnp.argmax(jnp.sum(ints(x)[:, None] == ints(x)[None], 0), 0),
    # moving rows
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 0))),
    "pad_edge": lambda x: jnp.pad(x, ((2, 1), (0, 1)), mode="edge"),
    "pad_reflect": lambda x: jnp.pad(x, ((len(x) - 1, 0), (0, 0)), mode="reflect"),
    "pad_wrap": lambda x: jnp.pad(x, ((1, 1), (0, 0)), mode="wrap"),
    "pad_negative": lambda x: jax.lax.pad(x, jnp.ones((), x.dtype), ((2, -1, 0), (0, 0, 0))),
    "pad_interior": lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), ((1, 0, 1), (0, 0, 0))),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "roll_back": lambda x: jnp.roll(x, -2, 0),
    "roll_flat": lambda x: jnp.roll(x, 3),
    "roll_dynamic": lambda x: jnp.roll(x, ints(x)[0, 0], 0),
    "flip": lambda x: jnp.flip(x, 0),
    "flip_both": lambda x: jnp.flip(x),
    "rot90": lambda x: jnp.rot90(x),
    "transpose": lambda x: x.T,
    "concatenate": lambda x: jnp.concatenate([x, x * 2], 0),
    "concatenate_shifted": lambda x: jnp.concatenate([x[1:], x[:1]], 0),
    "concatenate_uneven": lambda x: jnp.concatenate([x[:1], x, x[-1:]], 0),
    "stack": lambda x: jnp.stack([x, x + 1], 0),
    "stack_interleaved": lambda x: jnp.stack([x, -x], 1).reshape(-1, FEATURES),
    "split_halves": lambda x: jnp.concatenate(jnp.array_split(x, 2, 0)[::-1], 0),
    "queue": queue,
    "every_second": lambda x: x[::2],
    "every_third_from_one": lambda x: x[min(1, len(x) - 1) :: 3],
    "reversed_slice": lambda x: x[::-1],
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "without_ends": lambda x: x[min(1, len(x) - 1) : max(1, len(x) - 1)] * 3,
    "differences": lambda x: jnp.concatenate([x[:1], jnp.diff(x, axis=0)], 0),
    "repeat": lambda x: jnp.repeat(x, 2, 0),
    "repeat_by_counts": lambda x: jnp.repeat(x, ids(x), axis=0, total_repeat_length=len(x)),
    "tile": lambda x: jnp.tile(x, (3, 1)),
    "merge_rows": lambda x: x.reshape(-1) * jnp.cos(jnp.arange(x.size, dtype=x.dtype)),
    "merge_pairs": lambda x: x.reshape(2, -1).sum(0),
    "merge_fortran": lambda x: x.reshape(-1, order="F"),
    "rows_to_columns": lambda x: x.reshape(4, -1).T,
    "pairs_softmax": lambda x: jax.nn.softmax(x.reshape(-1, 2), 0),
    "swap_and_merge": lambda x: x.reshape(-1, 2, 2).swapaxes(0, 1).reshape(-1, 4),
    "space_to_batch": lambda x: jnp.moveaxis(x.reshape(-1, 2, 2), 2, 0).reshape(-1, 2).cumsum(0),
    "broadcast_first": lambda x: x * jnp.broadcast_to(x[:1], x.shape),
    "outer_pairs": lambda x: x[:, None] - x[None],
    "meshgrid": lambda x: jnp.meshgrid(x[:, 0], x[:, 1])[1],
    "ifelse_rows": lambda x: jnp.where((jnp.arange(len(x)) % 2 == 0)[:, None], x, jnp.flip(x, 0)),
    "select_neighbours": lambda x: jnp.maximum(x, jnp.roll(x, 1, 0)),
    # gather and scatter
    "take": lambda x: jnp.take(x, jnp.array([0, 0, -1]), 0),
    "take_by_ids": lambda x: x[ids(x, len(x))],
    "take_from_slice": lambda x: x[:-1][ids(x, max(1, len(x) - 1))] if len(x) > 1 else x,
    "take_from_more": lambda x: jnp.concatenate([x, x[:2]], 0)[ids(x, len(x) + 1)],
    "scatter_to_slice": lambda x: x[min(1, len(x) - 1) :].at[ids(x, max(1, len(x) - 1))].add(x),
    "scatter_max_to_more": lambda x: jnp.pad(x, ((0, 2), (0, 0))).at[ids(x, len(x) + 1)].max(x + 1),
    "take_clipped": lambda x: jnp.take(x, jnp.arange(len(x)) + 2, 0, mode="clip"),
    "take_filled": lambda x: jnp.take(x, jnp.arange(len(x)) + 2, 0, mode="fill", fill_value=3),
    "take_wrapped": lambda x: jnp.take(x, jnp.arange(len(x)) * 3, 0, mode="wrap"),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.abs(ints(x)) % len(x), 0),
    "gather_pairs": lambda x: x[jnp.arange(len(x))[::-1], jnp.arange(len(x)) % FEATURES],
    "gather_two": lambda x: x[jnp.arange(len(x)), jnp.abs(ints(x)[:, 0]) % FEATURES],
    "boolean_rows": lambda x: jnp.where(x[:, :1] > 0, x, 0).sum(0),
    "scatter_set": lambda x: jnp.zeros_like(x).at[jnp.arange(len(x))[::-1]].set(x),
    "scatter_add": lambda x: jnp.zeros((5, FEATURES), x.dtype).at[ids(x)].add(x),
    "scatter_add_to_rows": lambda x: x.at[ids(x, len(x))].add(x * 2),
    "scatter_max": lambda x: jnp.full((3, FEATURES), -9, x.dtype).at[ids(x)].max(x),
    "scatter_min_to_rows": lambda x: x.at[jnp.arange(len(x))[::-1]].min(x),
    "scatter_multiply": lambda x: (
        jnp.ones((len(x) + 2, FEATURES), x.dtype).at[rows(x).astype(int) + 1].multiply(x, unique_indices=True)
    ),
    "scatter_one_row": lambda x: x.at[0].set(1.0),
    "scatter_column": lambda x: x.at[:, 1].set(x[:, 2]),
    "scatter_slice": lambda x: x.at[1:].add(x[:-1]),
    "scatter_pairs": lambda x: jnp.zeros_like(x).at[jnp.arange(len(x))[::-1], ids(x, FEATURES)].set(x[:, 0]),
    "segment_sum": lambda x: jax.ops.segment_sum(x, ids(x), 4),
    "segment_max": lambda x: jnp.maximum(jax.ops.segment_max(x, ids(x), 4), -20),
    "segment_mean": lambda x: (
        jax.ops.segment_sum(x, ids(x), 3) / jnp.maximum(jnp.bincount(ids(x), length=3), 1)[:, None]
    ),
    "segment_softmax": lambda x: jnp.exp(x / 4) / jax.ops.segment_sum(jnp.exp(x / 4), ids(x), 3)[ids(x)],
    "segment_prod": lambda x: jax.ops.segment_prod(jax.lax.stop_gradient(x / 2), ids(x), 3),
    "embedding_by_rows": lambda x: x[jnp.abs(ints(x)[:, 0]) % len(x)] + x,
    "neighbours_sum": lambda x: jnp.zeros_like(x).at[jnp.arange(len(x)) // 2].add(x)[jnp.arange(len(x)) // 2],
    "dynamic_slice": dynamic_sliced,
    "dynamic_update_slice": dynamic_updated,
    "dynamic_index": lambda x: jax.lax.dynamic_index_in_dim(x, ints(x)[0, 2] % len(x), 0),
    "one_hot": lambda x: jax.nn.one_hot(ints(x)[:, 0] % 3, 3).T @ x,
    "one_hot_of_rows": lambda x: jax.nn.one_hot(jnp.abs(ints(x)[:, 1]) % len(x), len(x)),
    # reductions
    "sum": lambda x: jnp.sum(x, 0),
    "mean": lambda x: jnp.mean(x, 0),
    "var": lambda x: jnp.var(x, 0),
    "var_all": jnp.var,
    "std": lambda x: jnp.sqrt(jnp.var(x, 0) + 1e-3),
    "var_with_ddof": lambda x: jnp.var(x, 0, ddof=1) if len(x) > 1 else jnp.var(x, 0),
    "max": lambda x: jnp.max(x, 0),
    "min_all": jnp.min,
    "max_with_ties": lambda x: jnp.max(jnp.round(x), 0) + jnp.max(jnp.minimum(x, 0.5), 0),
    "prod": lambda x: jnp.prod(1 + x / 16, 0),
    "ptp": lambda x: jnp.ptp(x, 0),
    "logsumexp": lambda x: jsp.special.logsumexp(x, 0),
    "logsumexp_weighted": lambda x: jsp.special.logsumexp(x, 0, b=1 + jnp.abs(x)),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "log_softmax": lambda x: jax.nn.log_softmax(x, 0),
    "average": lambda x: jnp.average(x, 0, weights=jnp.abs(x) + 1),
    "norm": lambda x: jnp.linalg.norm(x, axis=0),
    "normalised": lambda x: x / jnp.linalg.norm(x, axis=0),
    "nanmean": lambda x: jnp.nanmean(jnp.where(x > 2, jnp.nan, x), 0),
    "nansum": lambda x: jnp.nansum(jnp.where(x > 1, jnp.nan, x), 0),
    "nanmax": lambda x: jnp.nanmax(jnp.where(x > 1, jnp.nan, x), 0, initial=-9),
    "count_nonzero": lambda x: jnp.count_nonzero(ints(x), 0),
    "any": lambda x: jnp.any(x > 2, 0),
    "all": lambda x: jnp.all(x > -3, 0),
    "xor": lambda x: jax.lax.reduce(ints(x), np.int32(0), jax.lax.bitwise_xor, (0,)),
    "or": lambda x: jnp.bitwise_or.reduce(ints(x), axis=0),
    "and": lambda x: jnp.bitwise_and.reduce(ints(x), axis=0),
    "int_sum": lambda x: jnp.sum(ints(x), 0),
    "int_max": lambda x: jnp.max(ints(x), 0),
    "int_dot": lambda x: ints(x).T @ ints(x),
    "uint8_sum": lambda x: jnp.sum((ints(x) + 8).astype(jnp.uint8), 0, dtype=jnp.uint8),
    "bfloat16_max": lambda x: jnp.max(x.astype(jnp.bfloat16), 0),
    "moments": lambda x: jnp.mean((x - x.mean(0)) ** 3, 0),
    "covariance": lambda x: jnp.cov(x, rowvar=False) if len(x) > 1 else jnp.zeros((4, 4), x.dtype),
    "correlation": lambda x: jnp.corrcoef(x + jnp.sin(rows(x))[:, None], rowvar=False) if len(x) > 1 else x,
    "batch_norm": batch_norm,
    "barlow": barlow,
    "xor_of_bools": lambda x: jax.lax.reduce_xor(x > 0, (0,)),
    "float8_max": lambda x: jnp.max(jax.lax.stop_gradient(x).astype(jnp.float8_e4m3fn), 0),
    "float16_sum": lambda x: jnp.sum(ints(x).astype(jnp.float16), 0, dtype=jnp.float16),
    "int8_sum": lambda x: jnp.sum(ints(x).astype(jnp.int8), 0, dtype=jnp.int8),
    "int16_max": lambda x: jnp.max(ints(x).astype(jnp.int16), 0),
    "complex_prod": lambda x: jnp.abs(
        jnp.prod((1 + 1j * jax.lax.stop_gradient(x) / 8).astype(jnp.complex64), 0)
    ),
    "reduce_of_ones_own": lambda x: jax.lax.reduce(ints(x), np.int32(0), lambda a, b: (a + b) % 5, (0,)),
    "reduce_by_logaddexp": lambda x: jax.lax.reduce(
        f32(jax.lax.stop_gradient(x)), np.float32(-np.inf), jnp.logaddexp, (0,)
    ),
    "reduce_of_pairs": lambda x: jax.lax.reduce(
        (ints(x), jnp.abs(ints(x))),
        (np.int32(0), np.int32(0)),
        lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])),
        (0,),
    )[1],
    # cumulative
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "cumsum_back": lambda x: jax.lax.cumsum(x, 0, reverse=True),
    "cumsum_flat": jnp.cumsum,
    "cumprod": lambda x: jnp.cumprod(1 + x / 16, 0),
    "cummax": lambda x: jax.lax.cummax(x, 0),
    "cummin_of_ints": lambda x: jax.lax.cummin(ints(x), 0),
    "cumlogsumexp": lambda x: jax.lax.cumlogsumexp(x, 0),
    "associative_scan": lambda x: jax.lax.associative_scan(lambda a, b: a * 0.5 + b, x, axis=0),
    "scan": scanned,
    "scan_back": scanned_back,
    "while": lambda x: looped(jax.lax.stop_gradient(x)),
    "fori": by_fori,
    "cond": branch,
    "switch": switched,
    "map": lambda x: jax.lax.map(lambda row: jnp.sort(row) * row[0], x),
    "vmapped_dot": lambda x: jax.vmap(lambda row: jnp.sort(x @ row))(x),
    # pairs of rows
    "cdist": lambda x: jnp.sqrt(distances(x) + 1e-3),
    "cdist_by_dot": lambda x: jnp.sum(x**2, 1)[:, None] + jnp.sum(x**2, 1) - 2 * x @ x.T,
    "hard_triplets": hard_triplets,
    "nearest": lambda x: jnp.min(distances(x) + 1e3 * jnp.eye(len(x), dtype=x.dtype), 1),
    "nearest_rows": lambda x: x[jnp.argmin(jax.lax.stop_gradient(distances(x) + 99 * jnp.eye(len(x))), 1)],
    "contrastive": contrastive,
    "supervised_contrastive": supervised_contrastive,
    "attention": attention,
    "sinkhorn": sinkhorn,
    "mix_up": mixed_up,
    "listwise": listwise,
    "cox": cox,
    "mmd": lambda x: jnp.mean(jnp.exp(-distances(x) / 8)) - jnp.exp(-distances(x) / 4)[0],
    "isclose": lambda x: jnp.isclose(x[:, None], x[None], atol=0.3),
    "gram": lambda x: x @ x.T,
    "gram_of_columns": lambda x: x.T @ x,
    "outer": lambda x: jnp.outer(x[:, 0], x[:, 1]),
    "kron": lambda x: jnp.kron(x, jnp.array([[1.0, 2.0], [3.0, 4.0]], x.dtype)),
    "kron_with_itself": lambda x: jnp.kron(x[:, 0], x[:, 1]),
    "cross": lambda x: jnp.cross(x[:, :3], jnp.roll(x[:, :3], 1, 0)),
    "tensordot": lambda x: jnp.tensordot(x, x, ((0,), (0,))),
    "einsum_rows": lambda x: jnp.einsum("bi,bj,cj->ic", x, x, x),
    "einsum_trilinear": lambda x: jnp.einsum("bi,ci,di->bcd", x, x, x),
    "einsum_diagonal": lambda x: jnp.einsum("bb->b", x @ x.T),
    "tril": lambda x: jnp.tril(x @ x.T),
    "triu": lambda x: jnp.triu(x),
    "tri_indices": lambda x: (x @ x.T)[jnp.triu_indices(len(x), 1)].sum(),
    "diag": lambda x: jnp.diag(x[:, 0]),
    "diagonal": lambda x: jnp.diagonal(x @ x.T, 1),
    "trace": lambda x: jnp.trace(x @ x.T),
    "vander": lambda x: jnp.vander(x[:, 0] / 4, 3),
    "toeplitz": lambda x: jsp.linalg.toeplitz(x[:, 0]),
    # of the batch as one unit
    "convolve": lambda x: jnp.convolve(x[:, 0], jnp.array([1.0, -2.0, 0.5], x.dtype)),
    "convolve_with_itself": lambda x: jnp.convolve(x[:, 0], x[:, 1], mode="same"),
    "correlate": lambda x: jnp.correlate(x[:, 0], jnp.array([1.0, 2.0], x.dtype), mode="same"),
    "interp": lambda x: jnp.interp(x[:, 1], jnp.arange(3.0, dtype=x.dtype), jnp.array([1.0, -1, 2], x.dtype)),
    "interp_rows": lambda x: jnp.interp(jnp.linspace(0, len(x) - 1, 5, dtype=x.dtype), rows(x), x[:, 0]),
    "resize": lambda x: jax.image.resize(x, (2 * len(x), FEATURES), "linear"),
    "resize_down": lambda x: jax.image.resize(x, (max(1, len(x) // 2), FEATURES), "cubic"),
    "conv_over_rows": lambda x: convolved(x, (1, -1, 4), (3, 4, 2), ("NHC", "HIO", "NHC")),
    "conv_rows_as_channels": lambda x: convolved(x, (1, 4, len(x)), (3, len(x), 2), ("NHC", "HIO", "NHC")),
    "conv_rows_as_groups": lambda x: convolved(
        x, (1, 4, len(x)), (3, 1, len(x)), ("NHC", "HIO", "NHC"), feature_group_count=len(x)
    ),
    "conv_over_rows_depthwise": lambda x: convolved(
        x, (1, -1, 4), (3, 1, 4), ("NHC", "HIO", "NHC"), feature_group_count=4
    ),
    "conv_dilated": lambda x: convolved(x, (1, -1, 4), (3, 4, 2), ("NHC", "HIO", "NHC"), rhs_dilation=(2,)),
    "conv_with_rows": gram_kernel,
    "max_pool_rows": lambda x: pooled(x, jax.lax.max, -jnp.inf),
    "max_pool_three": lambda x: pooled(x, jax.lax.max, -jnp.inf, 3),
    "max_pool_strided": lambda x: pooled(x, jax.lax.max, -jnp.inf, 2, 2),
    "sum_pool_rows": lambda x: pooled(x, jax.lax.add, 0.0, 3),
    "sum_pool_valid": lambda x: pooled(x, jax.lax.add, 0.0, min(2, len(x)), 1, "VALID"),
    "fft": lambda x: jnp.real(jnp.fft.fft(x, axis=0)),
    "fft_abs": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)) ** 2,
    "rfft": lambda x: jnp.imag(jnp.fft.rfft(x, axis=0)),
    "fft2": lambda x: jnp.real(jnp.fft.fft2(x)),
    "ifft_of_complex": lambda x: jnp.real(jnp.fft.ifft(x + 1j * jnp.roll(x, 1, 0), axis=0)),
    "inv": lambda x: jnp.linalg.inv(gram(x)),
    "solve": lambda x: jnp.linalg.solve(gram(x), x),
    "cholesky": lambda x: jnp.linalg.cholesky(gram(x)),
    "qr": lambda x: jnp.abs(jnp.linalg.qr(gram(x))[1]),
    "svd_values": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "eigh_values": lambda x: jnp.linalg.eigvalsh(gram(x)),
    "eigh_projection": lambda x: jnp.linalg.eigh(square(x))[1][:, -1] ** 2,
    "slogdet": lambda x: jnp.linalg.slogdet(gram(x))[1],
    "det_of_columns": lambda x: jnp.linalg.det(square(x)),
    "triangular_solve": lambda x: jsp.linalg.solve_triangular(jnp.tril(gram(x)), x, lower=True),
    "lstsq": lambda x: jnp.linalg.solve(square(x), x.T @ jnp.cos(rows(x))),
    "pinv": lambda x: jnp.linalg.pinv(gram(x)),
    "expm": lambda x: jsp.linalg.expm(gram(x) / 16),
    "matrix_power": lambda x: jnp.linalg.matrix_power(gram(x) / 8, 3),
    "whitened": whitened,
    # bits, whole numbers, complex numbers
    "bitcast": bits,
    "bitcast_narrow": lambda x: jax.lax.bitcast_convert_type(f32(jax.lax.stop_gradient(x)), jnp.uint16),
    "bitcast_wide": lambda x: jax.lax.bitcast_convert_type(
        f32(x).astype(jnp.bfloat16).reshape(-1, 2), jnp.int32
    ),
    "bits_of_neighbours": lambda x: bits(x) ^ bits(jnp.roll(x, 1, 0)),
    "shifts": lambda x: (ints(x) << 3) + jnp.right_shift(ints(jnp.flip(x, 0)), 1),
    "population_count": lambda x: jax.lax.population_count(bits(x)).sum(0),
    "packbits": lambda x: jnp.packbits(x > 0, axis=0),
    "unpackbits": lambda x: jnp.unpackbits((ints(x) + 8).astype(jnp.uint8), axis=0),
    "int_cumsum": lambda x: jnp.cumsum(ints(x), 0),
    "int_divmod": lambda x: jnp.divmod(jnp.cumsum(ints(x), 0), 3)[1],
    "gcd": lambda x: jnp.gcd(ints(x), jnp.roll(ints(x), 1, 0)),
    "hash_rows": lambda x: (
        jnp.cumsum(bits(x).astype(jnp.uint32) * jnp.uint32(2654435761), 0, dtype=jnp.uint32) >> 8
    ),
    "complex_sum": lambda x: jnp.abs(jnp.sum(x * jnp.exp(1j * rows(x)[:, None]), 0)),
    "complex_gram": lambda x: jnp.real((x + 1j * jnp.roll(x, 1, 0)) @ (x - 1j * x).conj().T),
    "angle": lambda x: jnp.angle(jnp.cumsum(x[:, 0] + 1j * (1 + x[:, 1] ** 2))),
    "float8": lambda x: jnp.roll(jax.lax.stop_gradient(x).astype(jnp.float8_e4m3fn), 1, 0),
    # random
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(2), jnp.float32(0.5), x.shape), x, 0),
    "random_normal": lambda x: perturbed(x, "normal"),
    "random_gumbel": lambda x: perturbed(x, "gumbel"),
    "random_gamma": lambda x: perturbed(x, "gamma", a=jnp.float32(2)),
    "random_of_rows": rng_rows,
    "permutation": lambda x: jax.random.permutation(jax.random.key(5), x, axis=0),
    "shuffled_columns": lambda x: jax.random.permutation(jax.random.key(5), x, axis=0, independent=True),
    "choice": lambda x: x[jax.random.randint(jax.random.key(7), (3,), 0, len(x), jnp.int32)],
    "categorical": lambda x: jax.random.categorical(jax.random.key(4), f32(jax.lax.stop_gradient(x)), 0),
    "rbg": lambda x: (
        x * (jax.random.bits(jax.random.key(4, impl="rbg"), (4,), jnp.uint32) >> 8).astype(x.dtype)
    ),
}
