"""GradientTape in traced functions: the numbers of ``jax.grad``, the rules of ``tf.GradientTape``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.vocabulary.errors import InvalidArgumentError, TapeError, TraceError, UnsupportedError

HERE = __file__
X = jnp.asarray([0.5, -1.0, 2.0])


@functools.cache
def two_replicas():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@functools.cache
def one_replica():
    return rx.OneDeviceStrategy("cpu:0")


def run(fn, *args):
    return one_replica().run(fn, args=args)


def tape_gradient(fn, x, **options):
    """d fn(x) / dx by a tape in a replica function; the numbers that ``jax.grad`` gives for the sum."""

    def step(x):
        with rx.GradientTape(**options) as tape:
            tape.watch(x)
            y = fn(x)
        return tape.gradient(y, x)

    return run(step, x)


def summed_gradient(fn, x):
    return jax.grad(lambda x: jnp.sum(fn(x)))(x)


# --- what may stand on the way from a source to a target ----------------------------------------------


def in_scan(x):
    return jax.lax.scan(lambda carry, row: (jnp.tanh(carry + row), carry * row), jnp.float32(0.3), x)[1]


def in_cond(x):
    return jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)


def in_switch(x):
    return jax.lax.switch(1, [jnp.sin, jnp.exp, jnp.cos], x)


def in_checkpoint(x):
    return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x)


def in_jit(x):
    return jax.jit(lambda x: jnp.exp(x) * x)(x)


@jax.custom_vjp
def tripled_gradient(x):
    return x**2


tripled_gradient.defvjp(lambda x: (x**2, x), lambda x, cotangent: (3 * 2 * x * cotangent,))


@jax.custom_jvp
def doubled_tangent(x):
    return x**2


doubled_tangent.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * 2 * primals[0] * tangents[0]))


def in_fori_loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, x: x * (1 + x), x)


def in_vmap(x):
    return jax.vmap(lambda row: row**2 * x[0])(x)


def in_grad(x):
    return jax.grad(lambda x: jnp.sum(x**3))(x)


def indexed(x):
    return x[jnp.asarray([0, 2, 0])] * 2


def sorted_and_updated(x):
    return jnp.sort(x).at[1].mul(3.0)


def with_while_off_the_way(x):
    count = jax.lax.while_loop(lambda c: c < jnp.sum(x) * 10, lambda c: c + 1.0, jnp.float32(0.0))
    return x**2, count


@pytest.mark.parametrize(
    "fn",
    [
        in_scan,
        in_cond,
        in_switch,
        in_checkpoint,
        in_jit,
        tripled_gradient,
        doubled_tangent,
        in_fori_loop,
        in_vmap,
        in_grad,
        indexed,
        sorted_and_updated,
    ],
)
def test_equals_jax_grad(fn):
    np.testing.assert_allclose(tape_gradient(fn, X), summed_gradient(fn, X), rtol=1e-6)


def test_a_while_loop_off_the_way_needs_no_derivative():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y, count = with_while_off_the_way(x)
        return tape.gradient(y, x), count

    gradient, count = run(step, X)
    np.testing.assert_allclose(gradient, 2 * X)
    assert float(count) == 15.0


def test_a_while_loop_on_the_way_has_no_derivative_and_the_users_line_is_shown():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = jax.lax.while_loop(lambda y: jnp.sum(y) < 100.0, lambda y: y * 2, x)  # the line
        return tape.gradient(y, x)

    with pytest.raises(ValueError, match=r"[Rr]everse-mode") as caught:
        run(step, X)
    shown = "".join(str(part) for part in _frames(caught.value))
    assert _line_of(step, "# the line") in shown


def _frames(error):
    """File and line of every frame in an error's traceback and in those of its causes."""
    while error is not None:
        traceback = error.__traceback__
        while traceback is not None:
            yield f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}\n"
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__


def _line_of(fn, text):
    first = fn.__code__.co_firstlineno
    with open(HERE) as file:
        lines = file.read().splitlines()
    return f"{HERE}:{next(n for n in range(first, len(lines)) if text in lines[n - 1])}\n"


# --- sources and targets ------------------------------------------------------------------------------


def test_several_targets_add_up_and_pytrees_of_sources_keep_their_structure():
    v, w = rx.Variable(2.0), rx.Variable([1.0, 3.0])

    def step():
        with rx.GradientTape() as tape:
            targets = {"a": v * jnp.sum(w), "b": [v**2]}
        return tape.gradient(targets, {"v": v, "more": (w,)})

    gradients = run(step)
    assert float(gradients["v"]) == 4.0 + 2 * 2.0
    np.testing.assert_allclose(gradients["more"][0], [2.0, 2.0])


def test_the_same_source_twice():
    v = rx.Variable(3.0)

    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = v * v * x
        return tape.gradient(y, [v, x, v, x])

    assert [float(g) for g in run(step, 5.0 * jnp.ones(()))] == [30.0, 9.0, 30.0, 9.0]


def test_intermediate_source_is_a_leaf_and_an_inner_node():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            middle = x**2
            tape.watch(middle)
            y = middle**3 + x
        return tape.gradient(y, [x, middle]), middle

    (by_x, by_middle), middle = run(step, jnp.float32(2.0))
    assert float(middle) == 4.0
    assert float(by_middle) == 3 * 4.0**2
    assert float(by_x) == 3 * 4.0**2 * 4.0 + 1


def test_a_constant_as_source():
    def step():
        c = jnp.float32(3.0)
        other = jnp.float32(3.0)
        with rx.GradientTape() as tape:
            tape.watch(c)
            y = c * c * other
        return tape.gradient(y, c)

    assert float(run(step)) == 18.0


def test_an_array_constant_as_source():
    constant = np.asarray([1.0, 2.0], "float32")

    def step():
        c = jnp.asarray(constant)
        with rx.GradientTape() as tape:
            tape.watch(c)
            y = jnp.sum(c**2)
        return tape.gradient(y, c)

    np.testing.assert_allclose(run(step), [2.0, 4.0])


def test_a_target_that_is_the_source():
    assert [float(g) for g in tape_gradient(lambda x: x, X)] == [1.0, 1.0, 1.0]


def test_output_gradients():
    def step(x, seed):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y, z = x**2, x**3
        return tape.gradient([y, z], x, output_gradients=[seed, jnp.float32(2.0)])

    np.testing.assert_allclose(
        run(step, X, jnp.arange(3.0)), 2 * X * jnp.arange(3.0) + 2 * 3 * X**2, rtol=1e-6
    )


def test_output_gradients_that_depend_on_the_target():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x**2
        return tape.gradient(y, x, output_gradients=2 * y)

    np.testing.assert_allclose(run(step, X), 2 * X * 2 * X**2, rtol=1e-6)


def test_output_gradients_of_integer_targets_count_for_nothing():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x * 3
        return tape.gradient([jnp.int32(2), y], x, output_gradients=[jnp.int32(5), 2 * jnp.ones_like(y)])

    np.testing.assert_array_equal(run(step, X), 6 * jnp.ones_like(X))


def test_output_gradients_of_another_structure_raise():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x**2
        return tape.gradient(y, x, output_gradients=[x, x])

    with pytest.raises(InvalidArgumentError, match="2 leaves and target has 1"):
        run(step, X)


def test_complex_values():
    def magnitude(x):
        return jnp.abs(jnp.exp(1j * x) * (2 + x)) ** 2

    np.testing.assert_allclose(tape_gradient(magnitude, X), summed_gradient(magnitude, X), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_have_the_sources_dtype(dtype):
    x = jnp.asarray([1.0, 2.0], dtype)
    gradient = tape_gradient(lambda x: jnp.sum(x.astype("float32") ** 2), x)
    assert gradient.dtype == x.dtype
    np.testing.assert_allclose(gradient.astype("float32"), [2.0, 4.0])


# --- unconnected --------------------------------------------------------------------------------------


def unconnected_step(kind):
    connected, unconnected = rx.Variable([1.0, 2.0]), rx.Variable([[3.0]])

    def step():
        with rx.GradientTape() as tape:
            jnp.sum(unconnected.value)  # read, but the target does not depend on it
            y = jnp.sum(connected**2)
        return tape.gradient(y, [connected, unconnected], unconnected_gradients=kind)

    return step


def test_unconnected_sources_give_none():
    first, second = run(unconnected_step("none"))
    np.testing.assert_allclose(first, [2.0, 4.0])
    assert second is None


def test_unconnected_sources_give_zeros_when_asked():
    first, second = run(unconnected_step(rx.UnconnectedGradients.ZERO))
    np.testing.assert_allclose(first, [2.0, 4.0])
    np.testing.assert_array_equal(second, [[0.0]])


def test_a_gradient_through_zero_is_connected():
    assert float(tape_gradient(lambda x: x * 0.0, jnp.float32(2.0))) == 0.0


def test_stop_gradient_and_integers_do_not_connect():
    v = rx.Variable(2.0)

    def step():
        with rx.GradientTape(persistent=True) as tape:
            stopped = jax.lax.stop_gradient(v.value) * 3
            rounded = v.value.astype("int32") * 1.5
        return tape.gradient(stopped, v), tape.gradient(rounded, v)

    assert run(step) == (None, None)


def test_none_reaches_the_function_that_asked():
    """The function is traced again when a source turns out to be unconnected, so that Python sees None."""
    v, w = rx.Variable(2.0), rx.Variable(3.0)

    def step():
        with rx.GradientTape() as tape:
            y = v * 2 + 0 * jax.lax.stop_gradient(w.value)
        gradients = tape.gradient(y, [v, w])
        return [None if g is None else g + 1 for g in gradients]

    first, second = run(step)
    assert float(first) == 3.0
    assert second is None


# --- what has no derivative ---------------------------------------------------------------------------


def maximum_over_replicas(x):
    return jax.lax.pmax(x, "replica")


def doubled_in_python(x):
    aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.experimental.io_callback(lambda x: 2 * np.asarray(x), aval, x)


def doubled_in_a_loop(x):
    return jax.lax.while_loop(lambda y: y[0] < 2 * x[0], lambda y: y + x, x)


@pytest.mark.parametrize("fn", [maximum_over_replicas, doubled_in_python, doubled_in_a_loop])
@pytest.mark.parametrize("where", ["before", "after"])
def test_operation_without_derivative_is_allowed_beside_a_stop_gradient(fn, where):
    """It lies between source and target by dataflow, but no derivative flows through it."""

    def loss(x):
        constant = jax.lax.stop_gradient(fn(x)) if where == "after" else fn(jax.lax.stop_gradient(x))
        return x * constant

    x = jnp.asarray([3.0, 4.0])
    expected = x if fn is maximum_over_replicas else 2 * x
    np.testing.assert_allclose(tape_gradient(loss, x), expected)


def test_a_maximum_over_replicas_has_no_derivative():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = maximum_over_replicas(x)
        return tape.gradient(y, x)

    with pytest.raises(UnsupportedError, match="pmax") as caught:
        two_replicas().run(step, args=(X,))
    assert _line_of(maximum_over_replicas, "pmax").strip() in str(caught.value)


# --- what is recorded ---------------------------------------------------------------------------------


def test_operations_before_the_tape_are_not_recorded():
    v = rx.Variable(3.0)

    def step():
        before = v * v
        with rx.GradientTape() as tape:
            y = before * 2 + v
        return tape.gradient(y, v)

    assert float(run(step)) == 1.0


def test_operations_after_the_tape_are_not_recorded():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x**2
        after = y * 10
        return tape.gradient(y, x), after

    gradient, after = run(step, jnp.float32(3.0))
    assert (float(gradient), float(after)) == (6.0, 90.0)


def test_a_target_made_after_the_tape_is_unconnected():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x**2
        return tape.gradient(y * 10, x)

    assert run(step, jnp.float32(3.0)) is None


def test_stop_recording():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x**2
            with tape.stop_recording():
                constant = x**3
            z = y * constant
        return tape.gradient(z, x)

    assert float(run(step, jnp.float32(2.0))) == 2 * 2.0 * 8.0


def test_only_watched_arrays_and_trainable_variables_are_sources():
    trainable, frozen, chosen = rx.Variable(1.0), rx.Variable(1.0, trainable=False), rx.Variable(1.0)

    def step(x):
        with rx.GradientTape() as tape:
            y = (trainable + frozen) * x
        with rx.GradientTape(watch_accessed_variables=False) as choosy:
            choosy.watch(chosen)
            z = (trainable + chosen) * x
        watched = [v is trainable for v in tape.watched_variables()]
        return tape.gradient(y, [trainable, frozen, x]), choosy.gradient(z, [trainable, chosen]), watched

    (first, second, third), (fourth, fifth), watched = run(step, jnp.float32(4.0))
    assert (float(first), second, third) == (4.0, None, None)
    assert (fourth, float(fifth)) == (None, 4.0)
    assert watched == [True]


def test_persistent_tape_can_be_used_again():
    def step(x):
        with rx.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x**2
            z = y**2
        return tape.gradient(y, x), tape.gradient(z, x), tape.gradient(z, x)

    assert [float(g) for g in run(step, jnp.float32(3.0))] == [6.0, 108.0, 108.0]


def test_a_plain_tape_is_used_once():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x**2
        tape.gradient(y, x)
        return tape.gradient(y, x)

    with pytest.raises(TapeError, match="persistent=True"):
        run(step, X)


def test_a_tape_is_no_longer_open_after_an_exception():
    v = rx.Variable(3.0)

    def step():
        try:
            with rx.GradientTape() as broken:
                raise KeyError
        except KeyError:
            assert broken.watched_variables() == ()
        with rx.GradientTape() as tape:
            y = v**2
        assert broken.watched_variables() == ()
        return tape.gradient(y, v)

    assert float(run(step)) == 6.0


# --- variables that are assigned ----------------------------------------------------------------------


def test_reads_before_and_after_an_assignment_are_leaves():
    """As in TensorFlow, no gradient flows through the assignment, and those of all reads add up."""
    v = rx.Variable(3.0)

    def step():
        with rx.GradientTape() as tape:
            before = v**2
            v.assign(v * 5)
            after = v**3
            y = before + after
        return tape.gradient(y, v)

    assert float(run(step)) == 2 * 3.0 + 3 * 15.0**2
    assert float(v) == 15.0


def test_a_variable_assigned_from_another_is_its_own_leaf():
    online, target = rx.Variable(3.0), rx.Variable(0.0)

    def step():
        target.assign(online.value)
        with rx.GradientTape() as tape:
            loss = online**2 + target**3
        return tape.gradient(loss, [online, target])

    assert [float(g) for g in run(step)] == [6.0, 27.0]
    assert float(target) == 3.0


def test_a_variable_assigned_from_another_inside_the_tape_is_its_own_leaf():
    online, target = rx.Variable(3.0), rx.Variable(0.0)

    def step():
        with rx.GradientTape() as tape:
            target.assign(online.value)
            loss = online**2 + target**3
        return tape.gradient(loss, [online, target])

    assert [float(g) for g in run(step)] == [6.0, 27.0]


def test_the_result_of_an_assignment_before_the_tape_is_a_constant():
    v = rx.Variable(3.0)

    def step(x):
        v.assign(x * 2)
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = v * x
        return tape.gradient(y, [v, x])

    assert [float(g) for g in run(step, jnp.float32(2.0))] == [2.0, 4.0]


# --- tapes and traces ---------------------------------------------------------------------------------


def test_a_tape_in_the_body_of_a_scan():
    w = rx.Variable(2.0)

    def step(xs):
        def body(carry, x):
            with rx.GradientTape() as tape:
                tape.watch(x)
                y = w * x**2
            return carry + tape.gradient(y, x), y

        return jax.lax.scan(body, jnp.float32(0.0), xs)

    total, ys = run(step, X)
    np.testing.assert_allclose(total, np.sum(2 * 2.0 * X))
    np.testing.assert_allclose(ys, 2 * X**2)


def derivative_of_cube(x):
    with rx.GradientTape() as tape:
        tape.watch(x)
        y = x**3
    return tape.gradient(y, x)


INNER = {
    "cond": lambda fn, x: jax.lax.cond(x > 0, fn, jnp.zeros_like, x),
    "scan": lambda fn, x: jax.lax.scan(lambda carry, _: (carry + fn(x), None), x * 0, length=1)[0],
    "checkpoint": lambda fn, x: jax.checkpoint(fn)(x),
    "jit": lambda fn, x: jax.jit(jax.jit(fn))(x),
}


@pytest.mark.parametrize("place", INNER)
def test_a_tape_in_an_inner_function(place):
    assert float(run(lambda x: INNER[place](derivative_of_cube, x), jnp.float32(2.0))) == 12.0


@pytest.mark.parametrize("place", INNER)
def test_a_tape_over_an_inner_function_with_a_tape(place):
    second = tape_gradient(lambda x: INNER[place](derivative_of_cube, x), jnp.float32(2.0))
    assert float(second) == 12.0  # 6 x


def test_a_tape_in_the_condition_and_the_body_of_a_while_loop():
    def step(x):
        return jax.lax.while_loop(
            lambda x: derivative_of_cube(x) < 40, lambda x: x + derivative_of_cube(x) / 12, x
        )

    x = jnp.float32(2.0)
    while 3 * x**2 < 40:
        x = x + 3 * x**2 / 12
    np.testing.assert_allclose(run(step, jnp.float32(2.0)), x, rtol=1e-6)


def test_tape_and_optimizer_step_inside_a_nested_jit():
    """The gradients are this replica's own; ``all_reduce`` in the jit sums them over replicas."""
    strategy = two_replicas()
    with strategy.scope():
        w = rx.Variable(2.0)

    @jax.jit
    def gradient_of(x):
        with rx.GradientTape() as tape:
            loss = w * x**2
        return rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, w))

    def step(x):
        w.assign_sub(0.1 * gradient_of(x))

    x = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group + 1)
    )
    strategy.run(step, args=(x,))
    np.testing.assert_allclose(float(w), 2.0 - 0.1 * (1 + 4), rtol=1e-6)


def test_gradient_in_another_trace_than_the_tapes_raises():
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x**2
        return jax.jit(lambda y: tape.gradient(y, x))(y)

    with pytest.raises(TapeError, match="opened in") as caught:
        run(step, X)
    assert f"{HERE}:" in str(caught.value)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [(jax.vmap, "jax.vmap"), (lambda fn: jax.grad(lambda x: jnp.sum(fn(x))), "jax.grad")],
    ids=["vmap", "grad"],
)
def test_tape_under_a_transformation_of_jax_raises(wrap, words):
    def derivative(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x**2
        return tape.gradient(y, x)

    with pytest.raises(TapeError, match=words):
        run(wrap(derivative), X)


def test_tape_outside_a_trace_raises():
    with pytest.raises(TapeError, match="outside of a trace"):
        with rx.GradientTape():
            pass


def test_tape_in_a_scope_but_outside_run_raises():
    with one_replica().scope(), pytest.raises(TapeError, match="outside of a trace"):
        rx.GradientTape().__enter__()


def test_gradient_before_the_tape_was_opened_raises():
    with pytest.raises(TapeError, match="before the tape was opened"):
        rx.GradientTape().gradient(X, X)


def test_a_tape_in_a_function_outside_run():
    v = rx.Variable([1.0, 2.0])

    @rx.function
    def descend(x):
        with rx.GradientTape() as tape:
            loss = jnp.sum(v * x) ** 2
        gradient = tape.gradient(loss, v)
        v.assign_sub(0.1 * gradient)
        return gradient

    gradient = descend(jnp.asarray([3.0, 1.0]))
    np.testing.assert_allclose(gradient, [30.0, 10.0])
    np.testing.assert_allclose(v.value, [-2.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: 3.0, lambda: jnp.asarray(3.0)], ids=["python", "weakly_typed"])
def test_watching_a_number_raises(make):
    """Each use of such a number is another constant of the program."""

    def step():
        with rx.GradientTape() as tape:
            tape.watch(make())

    with pytest.raises(InvalidArgumentError, match=r"jnp\.float32\(number\)"):
        run(step)


# --- functions that JAX traces once and remembers -----------------------------------------------------


@functools.cache
def weight():
    return rx.Variable(2.0)


@jax.jit
def jitted(x):
    return weight() * x


checkpointed = jax.checkpoint(lambda x: weight() * x)


def scanned(x):
    return jax.lax.scan(_add_weighted, jnp.zeros(()), x[None])[0]


def _add_weighted(carry, x):
    return carry + weight() * x, None


REMEMBERED = pytest.mark.parametrize("fn", [jitted, checkpointed, scanned], ids=["jit", "checkpoint", "scan"])


@REMEMBERED
def test_variable_first_read_in_a_cached_function(fn):
    """In two programs: JAX's cached trace of the first must not affect the second."""
    weight().assign(2.0)
    for factor in (1.0, 3.0):

        def step(x, factor=factor):
            with rx.GradientTape() as tape:
                y = fn(x) * factor
            return tape.gradient(y, weight())

        assert float(run(step, jnp.float32(5.0))) == 5.0 * factor
    assert float(fn(jnp.float32(5.0))) == 10.0


@REMEMBERED
def test_each_tape_records_the_reads_of_a_cached_function(fn):
    weight().assign(2.0)

    def step(x):
        before = fn(x)
        with rx.GradientTape() as first:
            y = fn(x)
        with rx.GradientTape() as second:
            z = fn(x) * before
        return first.gradient(y, weight()), second.gradient(z, weight())

    assert [float(g) for g in run(step, jnp.float32(5.0))] == [5.0, 50.0]


@REMEMBERED
def test_cached_function_reads_later_assignments(fn):
    weight().assign(2.0)

    def step(x):
        before = fn(x)
        weight().assign(3.0)
        return before, fn(x)

    assert [float(y) for y in run(step, jnp.float32(5.0))] == [10.0, 15.0]


# --- several tapes ------------------------------------------------------------------------------------


def test_nested_tapes_give_second_derivatives():
    def step(x):
        with rx.GradientTape() as outer:
            outer.watch(x)
            with rx.GradientTape() as inner:
                inner.watch(x)
                y = jnp.sin(x) * x
            first = inner.gradient(y, x)
        return first, outer.gradient(first, x)

    first, second = run(step, X)
    np.testing.assert_allclose(first, jnp.cos(X) * X + jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(second, 2 * jnp.cos(X) - X * jnp.sin(X), rtol=1e-5)


def test_three_nested_tapes():
    def step(x):
        with rx.GradientTape() as a:
            a.watch(x)
            with rx.GradientTape() as b:
                b.watch(x)
                with rx.GradientTape() as c:
                    c.watch(x)
                    y = x**4
                y = c.gradient(y, x)
            y = b.gradient(y, x)
        return a.gradient(y, x)

    np.testing.assert_allclose(run(step, X), 24 * X, rtol=1e-5)


def test_a_gradient_penalty():
    """The loss contains a gradient: WGAN-GP's, against nested ``jax.grad``."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(3, 2)).astype("float32")
    w = rx.Variable(kernel)
    data = jnp.asarray(rng.normal(size=(4, 3)), "float32")

    def score(weights, x):
        return jnp.sum(jnp.tanh(x @ weights))

    def penalised(weights, x, gradient):
        return score(weights, x) + jnp.mean((jnp.linalg.norm(gradient, axis=1) - 1) ** 2)

    def step(x):
        with rx.GradientTape() as outer:
            with rx.GradientTape() as inner:
                inner.watch(x)
                value = score(w.value, x)
            loss = penalised(w.value, x, inner.gradient(value, x))
        return loss, outer.gradient(loss, w)

    expected = jax.value_and_grad(lambda k: penalised(k, data, jax.grad(score, 1)(k, data)))(kernel)
    loss, gradient = run(step, data)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-6)


def gan_losses(generator, discriminator, noise, real):
    fake = jnp.tanh(noise * generator)
    on_real, on_fake = real @ discriminator, fake @ discriminator
    return jnp.mean(jax.nn.softplus(-on_fake)), jnp.mean(jax.nn.softplus(-on_real) + jax.nn.softplus(on_fake))


def test_two_tapes_over_a_shared_forward_pass():
    """A GAN's step: both tapes are open during one forward pass, and each differentiates its own loss."""
    rng = np.random.default_rng(0)
    noise, real = (jnp.asarray(rng.normal(size=(4, 3)), "float32") for _ in range(2))
    g, d = (rng.normal(size=3).astype("float32") for _ in range(2))
    generator, discriminator = rx.Variable(g), rx.Variable(d)

    def step(noise, real):
        with rx.GradientTape() as g_tape, rx.GradientTape() as d_tape:
            g_loss, d_loss = gan_losses(generator.value, discriminator.value, noise, real)
        g_gradient = g_tape.gradient(g_loss, generator)
        d_gradient = d_tape.gradient(d_loss, discriminator)
        generator.assign_sub(g_gradient)
        discriminator.assign_sub(d_gradient)
        return g_loss, d_loss

    losses = run(step, noise, real)
    np.testing.assert_allclose(losses, gan_losses(g, d, noise, real), rtol=1e-6)
    g_gradient = jax.grad(lambda g: gan_losses(g, d, noise, real)[0])(g)
    d_gradient = jax.grad(lambda d: gan_losses(g, d, noise, real)[1])(d)
    np.testing.assert_allclose(generator.value, g - g_gradient, rtol=1e-5)
    np.testing.assert_allclose(discriminator.value, d - d_gradient, rtol=1e-5)


def test_a_second_tape_over_updated_weights_of_the_first():
    """The discriminator first, then the generator against the updated discriminator."""
    v, w = rx.Variable(2.0), rx.Variable(3.0)

    def step():
        with rx.GradientTape() as first:
            y = v * w
        w.assign_sub(first.gradient(y, w))
        with rx.GradientTape() as second:
            y = v * w
        return second.gradient(y, [v, w])

    assert [float(g) for g in run(step)] == [1.0, 2.0]


# --- side effects and collectives ---------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [one_replica, two_replicas])
def test_callbacks_on_the_way_run_once_per_replica(strategy, capfd):
    calls = []

    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x**2
            jax.debug.print("y is {y}", y=y)
            jax.experimental.io_callback(lambda y: calls.append(float(y)), None, y)
            z = y * 3
        return tape.gradient(z, x)

    gradient = strategy().run(step, args=(jnp.float32(2.0),))
    jax.effects_barrier()
    num_replicas = strategy().num_replicas_in_sync
    assert calls == [4.0] * num_replicas
    assert capfd.readouterr().out.count("y is 4.0") == num_replicas
    components = strategy().experimental_local_results(gradient)
    assert [float(g) for g in components] == [12.0] * num_replicas


@pytest.mark.parametrize(("op", "expected"), [("SUM", [2.0, 4.0]), ("MEAN", [1.0, 2.0])])
def test_the_gradient_of_an_all_reduce_is_the_all_reduce_of_the_gradients(op, expected):
    def step(x):
        replica = rx.get_replica_context()
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = replica.all_reduce(op, x * (replica.replica_id_in_sync_group + 1))
        return tape.gradient(y, x)

    gradient = two_replicas().run(step, args=(jnp.float32(3.0),))
    assert [float(g) for g in gradient.values] == expected


def test_the_gradient_of_a_collective_in_a_scan():
    def step(x):
        def body(carry, _):
            return jax.lax.psum(carry * x, "replica"), None

        with rx.GradientTape() as tape:
            tape.watch(x)
            y = jax.lax.scan(body, x, length=2)[0]
        return tape.gradient(y, x)

    values = np.asarray([2.0, 3.0], "float32")
    strategy = two_replicas()
    x = strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )

    def total(x):
        # Replica by replica: each returns psum(psum(x * x) * x), and each one's y counts.
        inner = jnp.sum(x * x)
        return 2 * jnp.sum(inner * x)

    gradient = strategy.run(step, args=(x,))
    np.testing.assert_allclose([float(g) for g in gradient.values], jax.grad(total)(values), rtol=1e-6)


def test_variable_assigned_inside_jax_grad_raises():
    v = rx.Variable(1.0)

    def step(x):
        def loss(x):
            v.assign(x)
            return x**2

        return jax.grad(loss)(x)

    with pytest.raises(TraceError, match=r"assigned at .*test_tape\.py"):
        run(step, jnp.float32(2.0))
    assert float(v) == 1.0
