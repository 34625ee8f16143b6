"""Each row of the table: its examples run on JAX and give TensorFlow's results; its targets exist."""

import ast
import builtins
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from migrated import becomes, rewritten
from replicax._migrate import table
from table_examples import examples

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
ROWS = table.rows()
# JAX has 32-bit numbers unless told otherwise.
NARROWED = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
# A file with these uses Keras.
NAMES_KERAS = re.compile(
    r"tf\.(keras|random|nn\.dropout|nn\.(max|avg)_pool|nn\.(conv[13]d|convolution|\w+_conv2d\(tf.reshape\(tf.range\(32)|\w+_initializer)"
)
# Examples that are not traced together with the others: they make variables, draw numbers or trace themselves.
ALONE = re.compile(r"random|dropout|normal|[Vv]ariable|tf\.(function|distribute)")


def identity(row: table.Row) -> str:
    return "-".join([row.name, *row.when.values()])


class Module:
    """The examples of rows in one module, each in a separate function, as the command leaves it."""

    def __init__(self, rows: Iterable[table.Row], *, keras: bool, step: bool = False) -> None:
        examples = dict.fromkeys(example for row in rows for example in row.examples)
        self.examples = [example for example in examples if keras or not NAMES_KERAS.search(example)]
        self.is_step = step
        lines = ["import tensorflow as tf", *["from tensorflow import keras"] * keras]
        for number, example in enumerate(self.examples):
            lines += [*["@tf.function"] * step, f"def example_{number}():", f"    return {example}"]
        self.rewritten = rewritten("\n".join(lines) + "\n")
        self.code = self.rewritten.code.decode()

    def results(self) -> dict[str, Any]:
        """The results of the examples, or the errors. Examples that return arrays are traced and compiled as one
        program."""
        names: dict[str, Any] = {}
        exec(compile(self.code, "examples", "exec"), names)
        functions = {example: names[f"example_{number}"] for number, example in enumerate(self.examples)}

        def traced() -> dict[str, Any]:
            results = {e: attempt(function) for e, function in functions.items() if not ALONE.search(e)}
            return {e: result for e, result in results.items() if are_arrays(result)}

        compiled = {} if self.is_step else jax.jit(traced)()
        return {e: compiled[e] if e in compiled else attempt(f) for e, f in functions.items()}


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return error


def are_arrays(result: Any) -> bool:
    leaves = jax.tree.leaves(result)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)


def difference(ours: Any, theirs: Any) -> str:
    """The differences between two results; empty if there are none."""
    if isinstance(ours, Exception):
        return f"{type(ours).__name__}: {ours}"
    if isinstance(theirs, list):
        return "; ".join(filter(None, (difference(a, b) for a, b in zip(ours, theirs, strict=True))))
    if isinstance(theirs, dict) and "dtype" not in theirs:
        return "; ".join(filter(None, (difference(ours[key], theirs[key]) for key in theirs)))
    if theirs is None or ours is None:
        return "" if theirs is ours else f"{ours} instead of {theirs}"
    array = np.asarray(ours)
    wanted = np.asarray(theirs["value"])
    if "complex" in theirs["dtype"]:
        wanted = wanted[..., 0] + 1j * wanted[..., 1]
    here, there = (NARROWED.get(name, name) for name in (str(array.dtype), theirs["dtype"]))
    if (here, array.shape) != (there, wanted.shape):
        return f"{here}{array.shape} instead of {there}{wanted.shape}"
    is_close = np.allclose(array.astype(wanted.dtype), wanted, rtol=2e-6, atol=1e-6)
    return "" if is_close else f"{array.tolist()} instead of {wanted.tolist()}"


@pytest.mark.parametrize("keras", [True, False], ids=["keras", "jax"])
def test_examples_give_what_tensorflow_gave(keras):
    module = Module((row for row in ROWS if row.action(keras=keras) == "change"), keras=keras)
    assert [mark.what for mark in module.rewritten.marks] == []
    assert re.findall(r"\btf\.[\w.]+", module.code) == []
    assert ("from keras import ops" in module.code) is keras
    wrong = {e: difference(ours, RECORDED[e]) for e, ours in module.results().items()}
    assert {example: text for example, text in wrong.items() if text} == {}


def test_examples_of_rows_for_steps_give_what_tensorflow_gave():
    module = Module((row for row in ROWS if row.in_step), keras=True, step=True)
    assert module.examples
    assert re.findall(r"\btf\.[\w.]+", module.code) == []
    wrong = {e: difference(ours, RECORDED[e]) for e, ours in module.results().items()}
    assert {example: text for example, text in wrong.items() if text} == {}


def test_rows_unsupported_in_steps_are_marked_in_steps():
    rows = [
        row
        for row in ROWS
        if row.kind != "mark" and row.why and not row.in_step and row.parameters and row.examples
    ]
    module = Module(rows, keras=False, step=True)
    assert module.examples
    named = " ".join(mark.what for mark in module.rewritten.marks)
    assert [row.name for row in rows if row.name not in named] == []


def test_the_recording_has_every_example():
    assert list(RECORDED) == examples(), "run table_examples.py with a Python that has TensorFlow"


def test_functions_without_an_example_say_why():
    rows = [row for row in ROWS if row.kind == "change" and row.is_call and not row.examples]
    assert rows
    assert [identity(row) for row in rows if not row.resolve_only] == []


def test_marks_say_why_and_what_to_write():
    rows = [row for row in ROWS if row.kind == "mark"]
    assert rows
    assert [identity(row) for row in rows if not (row.why and row.write)] == []
    assert [identity(row) for row in rows if row.with_keras or row.without_keras] == []


def templates(row: table.Row) -> set[str]:
    texts = {row.template(keras=keras, step=step) for keras in (True, False) for step in (True, False)}
    return texts - {""}


@functools.cache
def value_of_root(root: str) -> Any:
    names: dict[str, Any] = {}
    exec(table.ROOTS[root], names)
    return names[root]


def value_of(node: ast.AST) -> Any:
    """The object of a dotted name in a template; None if there is none."""
    if isinstance(node, ast.Attribute):
        left = value_of(node.value)
        return None if left is None else getattr(left, node.attr)
    if not isinstance(node, ast.Name):
        return None
    if node.id in table.ROOTS and node.id not in (table.RANDOM, "tf"):  # TensorFlow is not installed here
        return value_of_root(node.id)
    return getattr(builtins, node.id, None)


def test_targets_exist_and_take_the_arguments():
    """Every name of a template exists, and every function takes the arguments that the template gives it."""
    wrong = {template: fault(template) for row in ROWS for template in templates(row)}
    assert {template: text for template, text in wrong.items() if text} == {}


def fault(template: str) -> str:
    tree = ast.parse(re.sub(r"\{(\*?)(\w+)[^{}]*\}", r"\1given_\2", template), mode="eval")
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    loops = [node.target for node in ast.walk(tree) if isinstance(node, ast.comprehension)]
    bound |= {node.id for target in loops for node in ast.walk(target) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not is_known(node.id, bound):
            return f"{node.id} is unknown"
        try:
            called = value_of(node.func) if isinstance(node, ast.Call) else value_of(node)
            if isinstance(node, ast.Call) and called is not None and has_signature(called):
                is_whole = not any(isinstance(argument, ast.Starred) for argument in node.args)
                signature = inspect.signature(called)
                bind = signature.bind if is_whole else signature.bind_partial
                bind(*node.args, **{keyword.arg: keyword for keyword in node.keywords})
        except (AttributeError, TypeError) as error:
            return str(error)
    return ""


def is_known(name: str, bound: set[str]) -> bool:
    return name.startswith("given_") or name in {*bound, *table.ROOTS} or hasattr(builtins, name)


def has_signature(function: Any) -> bool:
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("keras", [True, False], ids=["keras", "jax"])
@pytest.mark.parametrize(
    ("name", "with_keras", "without"),
    [
        ("tf.reduce_mean", "keras.ops.mean", "jnp.mean"),
        ("tf.math.reduce_mean", "keras.ops.mean", "jnp.mean"),
        ("tf.keras.layers.Dense", "keras.layers.Dense", "keras.layers.Dense"),
        ("tf.compat.v2.square", "keras.ops.square", "jnp.square"),
        ("tf.print", "jax.debug.print", "jax.debug.print"),
        ("tf.while_loop", None, None),
        ("tf.nothing", None, None),
    ],
)
def test_messages_name_the_target(name, with_keras, without, keras):
    assert table.target_of(name, keras=keras) == (with_keras if keras else without)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "tf.keras.optimizers.Adam(lr=0.1, beta_1=0.5)",
            "keras.optimizers.Adam(learning_rate=0.1, beta_1=0.5)",
        ),
        ("tf.keras.optimizers.legacy.SGD(lr=rate)", "keras.optimizers.SGD(learning_rate=rate)"),
        ("tf.keras.layers.Dense(lr=0.1)", "keras.layers.Dense(lr=0.1)"),
    ],
)
def test_keywords_that_keras_3_renamed(before, after):
    assert becomes(f"import tensorflow as tf\nx = {before}\n").endswith(f"x = {after}\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tf.reduce_sum(x, [1, 2])", "jnp.sum(x, axis=(1, 2))"),
        ("tf.reduce_sum(x, axes, keepdims=False, name='a')", "jnp.sum(x, axis=axes)"),
        (
            "tf.reduce_sum(x, axis=tf.range(1, len(x.shape)))",
            "jnp.sum(x, axis=tuple(range(1, len(x.shape))))",
        ),
        ("tf.reduce_sum([x, y])", "jnp.sum(jnp.asarray([x, y]))"),
        ("tf.math.squared_difference(a + b, c).mean()", "jnp.square((a + b) - c).mean()"),
        ("tf.split(x, [2, 3, 4], -1)", "jnp.split(x, [2, 5], axis=-1)"),
        (
            "tf.nn.conv2d(x, w, [1, s, s, 1], 'SAME').shape",
            "jax.lax.conv_general_dilated(x, jnp.asarray(w), (s, s), 'SAME', ",
        ),
        ("tf.device('/GPU:1')", "rx.device('/GPU:1')"),
        ("tf.device('/job:localhost/replica:0/task:0/device:GPU:1')", "rx.device('/job:localhost/"),
        ("tf.device(strategy.extended.worker_devices[0])", "rx.device(strategy.extended.worker_devices[0])"),
        ("tf.device(f'/gpu:{i}')", "rx.device(f'/gpu:{i}')"),
        ("tf.matmul(a, b, transpose_b=True)", "jnp.matmul(a, jnp.swapaxes(b, -1, -2))"),
        ("tf.random.uniform([2], 0, 5, tf.int32)", "keras.random.randint([2], 0, 5, "),
        (
            "tf.clip_by_global_norm(g, 1.0)",
            "(optax.projections.projection_l2_ball(g, 1.0), optax.tree.norm(g))",
        ),
        ("tf.print('a', x)", "print('a', x)"),
        ("tf.group(*updates)", "(*updates,)"),
        ("tf.split(x, num_heads, axis=-1)", "jnp.split(x, num_heads, axis=-1)"),
        ("tf.constant('text')", "tf.constant('text')"),
        (
            "tf.nn.conv2d(x, w, [1, 1, 2, 2], 'SAME', 'NCHW')",
            "jax.lax.conv_general_dilated(x, jnp.asarray(w), (2, 2), ",
        ),
        ("map(tf.square, x)", "map(jnp.square, x)"),
        (
            "tf.config.set_logical_device_configuration(d, [tf.config.LogicalDeviceConfiguration()] * n)",
            "rx.config.set_local_devices(n)",
        ),
        (
            "tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in names])",
            "rx.config.set_local_devices(len([None for _ in names]))",
        ),
        ("tf.config.list_logical_devices(kind)", "rx.config.list_logical_devices(kind)"),
    ],
)
def test_forms_of_arguments(before, after):
    code = becomes(f"import tensorflow as tf\nr = {before}\n")
    assert code.rpartition("r = ")[2].startswith(after)


@pytest.mark.parametrize(
    "call",
    [
        "tf.reduce_sum(*args)",
        "tf.split(x, parts)",
        "tf.split(x, [a, b])",
        "tf.nn.conv2d(x, w, strides, 'SAME')",
        "tf.device('/job:ps/task:0')",
        "tf.gather(x, i, batch_dims=2)",
        "tf.norm(x, ord=3)",
        "tf.function(f, autograph=False, nothing=1)",
    ],
)
def test_uncovered_call_is_marked_and_unchanged(call):
    done = rewritten(f"import tensorflow as tf\nr = {call}\n")
    assert [mark.rule for mark in done.marks] == ["argument"]
    assert call in done.code.decode()
