"""The scale of gradients: programs that sum a reduced loss's gradients again raise an error, right programs do not."""

import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import replicax as rx
from checks import assert_close
from replicax import errors

RATE = 0.125
TASK = jnp.float32([1.0, -2.0, 0.5])


def rows(num_rows=8):
    x = np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)
    return x, (x @ np.asarray(TASK) + 0.25).astype(np.float32)


def weights():
    return jnp.float32([0.5, 0.25, 1.0])


def replica():
    return rx.get_replica_context()


def num_replicas():
    return rx.get_strategy().num_replicas_in_sync


def squares(w, batch):
    x, y = batch
    return (x @ w - y) ** 2


def share(w, batch):
    return rx.nn.compute_average_loss(squares(w, batch))


def summed(w, batch):
    """The loss of the global batch, on every replica."""
    return jax.lax.psum(share(w, batch), "replica")


def updated(w, gradient):
    return w - RATE * gradient


def with_sum(loss_of, psum=lambda g: replica().all_reduce("sum", g)):
    def step(batch, w):
        return updated(w, psum(jax.grad(loss_of)(w, batch)))

    return step


def with_mean(loss_of):
    return with_sum(loss_of, lambda g: replica().all_reduce("mean", g))


# --- right programs: they are silent, and give one device's numbers -------------------------------------

RIGHT = {}


def right(make):
    RIGHT[make.__name__] = make
    return make


@right
def share_of_the_loss():
    return with_sum(share)


@right
def psum_of_jax():
    return with_sum(share, lambda g: jax.lax.psum(g, "replica"))


@right
def layer_norm():
    def loss_of(w, batch):
        x, y = batch
        normed = (x - x.mean(axis=1, keepdims=True)) / jnp.sqrt(x.var(axis=1, keepdims=True) + 1e-3)
        return share(w, (normed, y))

    return with_sum(loss_of)


@right
def scaled_regularizer():
    return with_sum(lambda w, batch: share(w, batch) + rx.nn.scale_regularization_loss(0.1 * jnp.sum(w**2)))


@right
def regularizer_of_summed_gradients():
    def step(batch, w):
        gradient = replica().all_reduce("sum", jax.grad(share)(w, batch))
        return updated(w, gradient + jax.grad(lambda w: 0.1 * jnp.sum(w**2))(w))

    return step


@right
def mean_over_features():
    def loss_of(w, batch):
        x, y = batch
        return rx.nn.compute_average_loss(jnp.mean((x * w - y[:, None]) ** 2, axis=1))

    return with_sum(loss_of)


@right
def gradient_penalty():
    def loss_of(w, batch):
        x, y = batch
        slopes = jax.vmap(jax.grad(lambda x: jnp.sum(jnp.tanh(x * w))))(x)
        penalty = (jnp.sqrt(jnp.sum(slopes**2, axis=1) + 1e-6) - 1) ** 2
        return rx.nn.compute_average_loss(penalty + (x @ w - y) ** 2)

    return with_sum(loss_of)


def similarities(w, batch):
    x, _ = batch
    own = jnp.tanh(x * w)
    return own, replica().all_gather(own, axis=0)


@right
def contrastive_loss_of_own_rows():
    def loss_of(w, batch):
        own, everything = similarities(w, batch)
        return rx.nn.compute_average_loss(
            jax.nn.logsumexp(own @ everything.T, axis=1) - jnp.sum(own**2, axis=1)
        )

    return with_sum(loss_of)


@right
def contrastive_loss_of_all_rows_and_mean():
    def loss_of(w, batch):
        _, everything = similarities(w, batch)
        losses = jax.nn.logsumexp(everything @ everything.T, axis=1) - jnp.sum(everything**2, axis=1)
        return jnp.mean(losses)

    return with_mean(loss_of)


def normalized(x):
    """Batch normalization over the rows of all replicas."""
    count = jax.lax.psum(jnp.float32(x.shape[0]), "replica")
    mean = jax.lax.psum(x.sum(0), "replica") / count
    var = jax.lax.psum(((x - mean) ** 2).sum(0), "replica") / count
    return (x - mean) / jnp.sqrt(var + 1e-3)


@right
def statistics_of_the_global_batch():
    def loss_of(w, batch):
        x, y = batch
        return rx.nn.compute_average_loss((normalized(jnp.tanh(x * w)).sum(1) - y) ** 2)

    return with_sum(loss_of)


@right
def statistics_in_a_checkpoint():
    def loss_of(w, batch):
        x, y = batch
        return rx.nn.compute_average_loss(
            jax.checkpoint(lambda w: normalized(x * jnp.exp(w)).sum(1) - y)(w) ** 2
        )

    return with_sum(loss_of)


@right
def rows_compared_with_the_mean_row():
    def loss_of(w, batch):
        x, _ = batch
        mean = jax.lax.psum(jnp.sum(x @ w), "replica") / 8
        return rx.nn.compute_average_loss(jnp.broadcast_to(mean**2, x.shape[:1]))

    return with_sum(loss_of)


@right
def global_penalty_scaled():
    def loss_of(w, batch):
        x, _ = batch
        mean = jax.lax.psum(jnp.sum(jnp.tanh(x * w), axis=0), "replica") / 8
        return share(w, batch) + rx.nn.scale_regularization_loss(jnp.sum(mean**2))

    return with_sum(loss_of)


@right
def normalizer_of_the_global_batch():
    """A softmax over all rows: the denominator is differentiated too."""

    def loss_of(w, batch):
        x, y = batch
        scores = jnp.exp(jnp.tanh(x @ w))
        return jnp.sum(scores / jax.lax.psum(jnp.sum(scores), "replica") * y)

    return with_sum(loss_of)


@right
def weights_of_rows():
    def loss_of(w, batch):
        x, _ = batch
        weight = jnp.abs(x[:, 0])
        return jnp.sum(squares(w, batch) * weight) / jax.lax.psum(jnp.sum(weight), "replica")

    return with_sum(loss_of)


@right
def mean_of_gradients_of_a_summed_loss():
    return with_mean(summed)


@right
def pmean_of_gradients_of_a_summed_loss():
    return with_sum(summed, lambda g: jax.lax.pmean(g, "replica"))


@right
def sum_of_gradients_divided_by_hand():
    return with_sum(summed, lambda g: jax.lax.psum(g, "replica") / num_replicas())


@right
def gradients_divided_by_hand_and_summed():
    return with_sum(summed, lambda g: jax.lax.psum(g / num_replicas(), "replica"))


@right
def gradients_scaled_by_hand_and_summed():
    return with_sum(summed, lambda g: jax.lax.psum(g * (1 / num_replicas()), "replica"))


@right
def sum_in_a_function_and_division_elsewhere():
    @jax.jit
    def total(tree):
        return jax.tree.map(lambda g: jax.lax.psum(g, "replica"), tree)

    def step(batch, w):
        gradients = total({"w": jax.grad(summed)(w, batch)})
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
        count = jax.lax.psum(jnp.ones(()), "replica")
        return updated(w, gradients["w"] / count), norm / count

    return step


@right
def mean_weighted_by_rows():
    def step(batch, w):
        num_rows = jnp.float32(batch[1].shape[0])
        fraction = num_rows / jax.lax.psum(num_rows, "replica")
        return updated(w, jax.lax.psum(fraction * jax.grad(summed)(w, batch), "replica"))

    return step


@right
def loss_scaled_by_the_number_of_replicas():
    return with_sum(lambda w, batch: summed(w, batch) / num_replicas())


@right
def loss_multiplied_by_one_over_the_number_of_replicas():
    return with_sum(lambda w, batch: (1 / num_replicas()) * summed(w, batch))


@right
def pmean_of_shares():
    return with_sum(lambda w, batch: jax.lax.pmean(share(w, batch), "replica"))


@right
def pmean_of_local_means_and_mean():
    def loss_of(w, batch):
        return jax.lax.pmean(jnp.mean(squares(w, batch)), "replica")

    return with_mean(loss_of)


@right
def loss_divided_by_an_array():
    def step(batch, w, count):
        scaled = lambda w: summed(w, batch) / count  # noqa: E731
        return updated(w, replica().all_reduce("sum", jax.grad(scaled)(w)))

    return lambda batch, w: step(batch, w, jnp.asarray(num_replicas(), jnp.float32))


@right
def cotangent_of_one_over_the_number_of_replicas():
    def step(batch, w):
        _, pull_back = jax.vjp(lambda w: summed(w, batch), w)
        return updated(w, replica().all_reduce("sum", pull_back(jnp.float32(1 / num_replicas()))[0]))

    return step


@right
def rows_compared_with_the_mean_row_by_a_factor():
    def loss_of(w, batch):
        x, _ = batch
        mean = jax.lax.psum(jnp.sum(x @ w), "replica") / 8
        return jnp.sum(jnp.broadcast_to(mean**2, x.shape[:1])) * (1 / 8)

    return with_sum(loss_of)


@right
def vouched_loss():
    def step(batch, w):
        gradient = jax.grad(lambda w: rx.assert_same(summed(w, batch)))(w)
        return w - RATE / num_replicas() * replica().all_reduce("sum", gradient)

    return step


@right
def vouched_sum():
    def step(batch, w):
        gradient = rx.assert_same(replica().all_reduce("sum", jax.grad(summed)(w, batch)))
        return w - RATE / num_replicas() * gradient

    return step


@right
def metrics_outside_of_the_differentiated_function():
    def step(batch, w):
        loss, gradient = jax.value_and_grad(share)(w, batch)
        loss, gradient = replica().all_reduce("sum", (loss, gradient))
        error = jax.lax.psum(jnp.sum(jnp.abs(squares(w, batch))), "replica")
        return updated(w, gradient), loss, error

    return step


@right
def auxiliary_values():
    def loss_of(w, batch):
        return share(w, batch), {"loss": summed(w, batch), "rows": jax.lax.psum(jnp.sum(batch[0]), "replica")}

    def step(batch, w):
        (_, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(w, batch)
        return updated(w, replica().all_reduce("sum", gradient)), aux

    return step


@right
def stopped_gradient():
    def loss_of(w, batch):
        own = share(w, batch)
        fixed = jax.lax.stop_gradient(own)
        return jax.lax.psum(fixed, "replica") + (own - fixed)

    return with_sum(loss_of)


@right
def small_batches_in_a_scan():
    def step(batch, w):
        def one(total, half):
            return total + jax.grad(lambda w: jnp.sum(squares(w, half)) / 8)(w), None

        halves = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), batch)
        return updated(w, replica().all_reduce("sum", jax.lax.scan(one, jnp.zeros(3), halves)[0]))

    return step


@right
def gradient_through_an_inner_step():
    def loss_of(w, batch):
        inner = updated(w, jax.lax.psum(jax.grad(share)(w, batch), "replica"))
        return share(inner, batch)

    return with_sum(loss_of)


@right
def tape_and_value_and_grad():
    def step(batch, w):
        _, gradient = rx.value_and_grad(share)(w, batch)
        return updated(w, replica().all_reduce("sum", gradient))

    return step


@right
def optax_aggregates_shares():
    def step(batch, w):
        optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.sgd(RATE))
        updates, _ = optimizer.update(jax.grad(share)(w, batch), optimizer.init(w))
        return optax.apply_updates(w, updates)

    return step


@right
def optax_gets_means_of_a_summed_loss():
    def step(batch, w):
        optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.sgd(RATE))
        gradient = replica().all_reduce("mean", jax.grad(summed)(w, batch))
        updates, _ = optimizer.update(gradient, optimizer.init(w))
        return optax.apply_updates(w, updates)

    return step


@right
def two_losses_of_different_kinds():
    """A penalty over the global batch, whose gradient is not summed, beside the share of a loss."""

    def step(batch, w):
        penalty = jax.grad(lambda w: jax.lax.psum(jnp.sum(jnp.tanh(batch[0] @ w)), "replica") / 8)(w)
        penalty = jax.lax.pmean(penalty, "replica")
        return updated(w, penalty + replica().all_reduce("sum", jax.grad(share)(w, batch)))

    return step


@right
def sum_whose_derivative_is_the_identity():
    @jax.custom_vjp
    def total(value):
        return jax.lax.psum(value, "replica")

    total.defvjp(lambda value: (total(value), None), lambda _, cotangent: (cotangent,))
    return with_sum(lambda w, batch: total(share(w, batch)))


@right
def covariance_of_the_global_batch():
    def loss_of(w, batch):
        own = normalized(jnp.tanh(batch[0] * w))
        covariance = jax.lax.psum(own.T @ own, "replica") / 7
        return share(w, batch) + jnp.sum((covariance - jnp.diag(jnp.diag(covariance))) ** 2) / num_replicas()

    return with_sum(loss_of)


@right
def average_of_models_after_a_summed_loss():
    def step(batch, w):
        return jax.lax.psum(updated(w, jax.grad(summed)(w, batch)), "replica") / num_replicas()

    return step


@right
def mean_of_gathered_gradients():
    return with_sum(summed, lambda g: jnp.mean(jax.lax.all_gather(g, "replica"), axis=0))


@right
def steps_in_a_loop():
    def step(batch, w):
        def one(_, w):
            return updated(w, jax.lax.pmean(jax.grad(summed)(w, batch), "replica"))

        return jax.lax.fori_loop(0, 3, one, w)

    return step


UNEVEN = [
    share_of_the_loss,
    mean_of_gradients_of_a_summed_loss,
    statistics_of_the_global_batch,
    contrastive_loss_of_own_rows,
    optax_aggregates_shares,
]


def make_strategy(devices=2):
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(devices)])


def results(make, num_rows, devices):
    """What the program gives on each replica."""
    strategy = make_strategy(devices)
    return strategy.experimental_local_results(
        strategy.run(make(), (distributed(strategy, num_rows), weights()))
    )


def check(make, num_rows, caplog, devices=2):
    with caplog.at_level(logging.WARNING, "replicax"):
        on_several, (on_one,) = results(make, num_rows, devices), results(make, num_rows, 1)
    for one in on_several:
        assert_close(one, on_one, 1e-4, 1e-5)
    assert not caplog.messages


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_right_program_is_silent_and_gives_one_devices_result(make, caplog):
    check(make, 8, caplog)


@pytest.mark.rest
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_right_program_is_silent_on_four_replicas(make, caplog):
    check(make, 8, caplog, devices=4)


@pytest.mark.parametrize("make", UNEVEN)
def test_right_program_is_silent_on_an_uneven_batch(make, caplog):
    check(make, 7, caplog)


def test_loss_divided_by_an_argument_is_silent(caplog):
    strategy = make_strategy()

    def step(batch, w, count):
        return updated(w, replica().all_reduce("sum", jax.grad(lambda w: summed(w, batch) / count)(w)))

    ours = strategy.run(step, args=(distributed(strategy), weights(), jnp.float32(2)))
    wanted = jax.grad(lambda w: jnp.mean(squares(w, rows())))(weights())
    np.testing.assert_allclose(strategy.unreplicate(ours), updated(weights(), wanted), rtol=1e-5)
    assert not caplog.messages


# --- wrong programs: the gradients are R times too large ------------------------------------------------

WRONG = {}


def wrong(make):
    WRONG[make.__name__] = make
    return make


@wrong
def psum_and_psum():
    return with_sum(summed, lambda g: jax.lax.psum(g, "replica"))


@wrong
def psum_and_all_reduce():
    return with_sum(summed)


@wrong
def all_reduce_and_all_reduce():
    return with_sum(lambda w, batch: replica().all_reduce("sum", jnp.sum(squares(w, batch))) / 8)


@wrong
def half_of_each_square():
    return with_sum(lambda w, batch: jax.lax.psum(jnp.sum(0.5 * squares(w, batch)), "replica") / 8)


@wrong
def divided_by_the_summed_rows():
    def loss_of(w, batch):
        total, count = jax.lax.psum((jnp.sum(squares(w, batch)), jnp.float32(batch[1].shape[0])), "replica")
        return total / count

    return with_sum(loss_of)


@wrong
def sum_with_the_loss_and_a_count():
    def step(batch, w):
        loss, gradient = jax.value_and_grad(summed)(w, batch)
        near = jnp.sum(squares(w, batch) < 1).astype(jnp.float32)
        loss, near, gradient = replica().all_reduce("sum", (loss, near, gradient))
        return updated(w, gradient), loss, near

    return step


@wrong
def tree_of_parameters():
    def loss_of(parameters, batch):
        x, y = batch
        hidden = jnp.tanh(x @ parameters["w1"])
        loss = jnp.mean((hidden @ parameters["w2"] + parameters["b"] - y) ** 2)
        return jax.lax.psum(loss, "replica") + 0.01 * sum(jnp.sum(p**2) for p in jax.tree.leaves(parameters))

    def step(batch, w):
        parameters = {"w1": jnp.outer(w, w), "w2": w, "b": w[0], "unused": w}
        gradients = jax.grad(loss_of)(parameters, batch)
        return jax.tree.map(lambda p, g: p - RATE * jax.lax.psum(g, "replica"), parameters, gradients)

    return step


@wrong
def weight_decay_before_the_sum():
    return with_sum(lambda w, batch: summed(w, batch) + 0.1 * jnp.sum(w**2))


@wrong
def in_functions_that_jax_traces():
    def loss_of(w, batch):
        return jax.jit(jax.checkpoint(summed))(w, batch)

    def step(batch, w):
        return updated(w, jax.jit(lambda g: jax.lax.psum(g, "replica"))(jax.jit(jax.grad(loss_of))(w, batch)))

    return step


@wrong
def small_batches_in_a_scan_with_a_summed_loss():
    def step(batch, w):
        def one(total, half):
            return total + jax.grad(lambda w: jax.lax.psum(jnp.sum(squares(w, half)), "replica") / 8)(w), None

        halves = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), batch)
        return updated(w, replica().all_reduce("sum", jax.lax.scan(one, jnp.zeros(3), halves)[0]))

    return step


@wrong
def sum_in_a_scan_that_is_differentiated():
    def loss_of(w, batch):
        def one(total, half):
            return total + jax.lax.psum(jnp.sum(squares(w, half)), "replica") / 8, None

        halves = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), batch)
        return jax.lax.scan(one, 0.0, halves)[0]

    return with_sum(loss_of)


@wrong
def norm_of_summed_rows():
    return with_sum(
        lambda w, batch: jnp.sqrt(jnp.sum(jax.lax.psum(batch[0].T @ (batch[0] @ w), "replica") ** 2))
    )


@wrong
def square_of_the_summed_errors():
    return with_sum(lambda w, batch: (jax.lax.psum(jnp.sum(batch[0] @ w), "replica") / 8) ** 2)


@wrong
def contrastive_loss_of_all_rows_and_sum():
    def loss_of(w, batch):
        _, everything = similarities(w, batch)
        losses = jax.nn.logsumexp(everything @ everything.T, axis=1) - jnp.sum(everything**2, axis=1)
        return jnp.mean(losses)

    return with_sum(loss_of)


@wrong
def auxiliary_values_and_a_summed_loss():
    def loss_of(w, batch):
        return summed(w, batch), jnp.sum(batch[0])

    def step(batch, w):
        gradient, _ = jax.grad(loss_of, has_aux=True)(w, batch)
        return updated(w, replica().all_reduce("sum", gradient))

    return step


@wrong
def value_and_grad_of_replicax():
    def step(batch, w):
        _, gradient = rx.value_and_grad(summed)(w, batch)
        return updated(w, replica().all_reduce("sum", gradient))

    return step


@wrong
def tape():
    def step(batch, w):
        with rx.GradientTape() as tape:
            tape.watch(w)
            loss = replica().all_reduce("sum", share(w, batch))
        return updated(w, replica().all_reduce("sum", tape.gradient(loss, w)))

    return step


@wrong
def optax_aggregates_a_summed_loss():
    def step(batch, w):
        optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.adam(RATE))
        updates, _ = optimizer.update(jax.grad(summed)(w, batch), optimizer.init(w))
        return optax.apply_updates(w, updates)

    return step


def distributed(strategy, num_rows=8):
    (batch,) = strategy.experimental_distribute_dataset([rows(num_rows)])
    return batch


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.rest)])
@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_summed_gradients_of_a_reduced_loss_raise_with_the_lines(make, devices):
    strategy = make_strategy(devices)
    with pytest.raises(errors.ReducedLossError) as caught:
        strategy.run(make(), args=(distributed(strategy, 4 * devices), weights()))
    message = str(caught.value)
    assert f"{devices} times too large" in message
    assert message.count(f"{__file__}:") == 2, (
        "the line that reduces the loss, and the line that sums gradients"
    )
    assert "rx.nn.compute_average_loss" in message
    assert "rx.assert_same" in message


def test_summed_gradients_of_a_reduced_loss_raise_on_an_uneven_batch():
    strategy = make_strategy()
    with pytest.raises(errors.ReducedLossError):
        strategy.run(psum_and_all_reduce(), args=(distributed(strategy, 7), weights()))


def keras_step(strategy, loss_of, apply):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)

    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = loss_of((model(x)[:, 0] - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        apply(optimizer, gradients, model.trainable_variables)

    return step


def apply_gradients(optimizer, gradients, variables):
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def stateless_apply(optimizer, gradients, variables):
    optimizer.stateless_apply([v.value for v in optimizer.variables], gradients, [v.value for v in variables])


@pytest.mark.parametrize("apply", [apply_gradients, stateless_apply])
def test_keras_optimizer_refuses_gradients_of_a_reduced_loss(apply):
    strategy = make_strategy()
    step = keras_step(
        strategy, lambda losses: replica().all_reduce("sum", rx.nn.compute_average_loss(losses)), apply
    )
    with pytest.raises(errors.ReducedLossError, match="2 times too large"):
        strategy.run(step, args=(distributed(strategy),))


def test_variable_that_sums_assignments_refuses_gradients_of_a_reduced_loss():
    strategy = make_strategy()
    with strategy.scope():
        w = rx.Variable(weights(), aggregation="sum")

    def step(batch):
        w.assign_sub(jax.grad(summed)(w.value, batch))

    with pytest.raises(errors.ReducedLossError, match="2 times too large"):
        strategy.run(step, args=(distributed(strategy),))


def test_refused_step_changes_no_variable():
    strategy = make_strategy()
    with strategy.scope():
        w = rx.Variable(weights())

    def step(batch):
        w.assign_sub(replica().all_reduce("sum", jax.grad(summed)(w.value, batch)))

    with pytest.raises(errors.ReducedLossError):
        strategy.run(step, args=(distributed(strategy),))
    np.testing.assert_array_equal(w.numpy(), weights())


# --- uncertain programs: a log line ----------------------------------------------------------------------


def all_reduced(gradient):
    return replica().all_reduce("mean", gradient)


def pmean(gradient):
    return jax.lax.pmean(gradient, "replica")


@pytest.mark.parametrize("mean", [all_reduced, pmean])
def test_average_that_is_averaged_again_is_logged_once(mean, caplog):
    strategy = make_strategy()
    step = with_sum(share, mean)
    for _ in range(2):
        strategy.run(step, args=(distributed(strategy), weights()))
    (told,) = caplog.messages
    assert told.startswith(f"{__file__}:")
    assert "2 times too small" in told


def test_average_loss_that_is_divided_by_the_replicas_is_logged_once(caplog):
    strategy = make_strategy()
    step = with_sum(lambda w, batch: share(w, batch) / strategy.num_replicas_in_sync)
    for _ in range(2):
        strategy.run(step, args=(distributed(strategy), weights()))
    (told,) = caplog.messages
    assert told.startswith(f"{__file__}:")
    assert "2 times too small. Leave this division out." in told


RIGHT_DIVISIONS = {
    "half a loss": lambda w, batch, n: share(w, batch) / 2,
    "a size that was given": lambda w, batch, n: (
        rx.nn.compute_average_loss(squares(w, batch), global_batch_size=len(batch[0]))
        / n.num_replicas_in_sync
    ),
    "a penalty": lambda w, batch, n: share(w, batch) + jnp.sum(w**2) / n.num_replicas_in_sync,
    "a divided penalty": lambda w, batch, n: jnp.sum(w**2) / n.num_replicas_in_sync,
}


@pytest.mark.parametrize("loss_of", RIGHT_DIVISIONS.values(), ids=RIGHT_DIVISIONS)
def test_division_that_may_be_right_is_not_logged(loss_of, caplog):
    strategy = make_strategy()
    step = with_sum(lambda w, batch: loss_of(w, batch, strategy))
    strategy.run(step, args=(distributed(strategy), weights()))
    # The size of one replica is worth a warning by itself: without the division the loss is too large.
    assert not [told for told in caplog.messages if "global_batch_size" not in told]


@pytest.mark.parametrize(
    ("loss_of", "advice"),
    [(summed, "take the mean of the gradients"), (share, "Sum the gradients: gradients =")],
)
def test_warning_of_state_that_drifts_gives_advice_that_is_right(loss_of, advice, caplog):
    strategy = make_strategy()
    w = strategy.replicate(weights())
    for _ in range(2):
        w = strategy.run(
            lambda batch, w: updated(w, jax.grad(loss_of)(w, batch)), args=(distributed(strategy), w)
        )
    (told,) = caplog.messages
    assert advice in told
