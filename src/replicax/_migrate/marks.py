"""Rules for places that the command cannot decide. The rules see the program before any change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, TypeAlias, final

import libcst as cst
import libcst.matchers as m

from replicax._migrate.comments import Comments
from replicax._migrate.imports import is_below, moved_name
from replicax._migrate.name_bindings import Function, ParsedModule, canonical, text_of
from replicax._migrate.reach import Reach
from replicax._migrate.tapes import is_tape, nodes_below
from replicax._migrate.trained_tables import is_sparse_gradient, looks_up
from replicax._migrate.values import is_integer, is_variable

_SCHEDULES: Final = "tf.keras.optimizers.schedules"
# The reason why the command does not decide, by rule. Marks of a row of the table use the row's name as the rule.
RULES: Final = {
    "unknown": "The table has no row for the name.",
    "argument": "The function that takes its place has no such argument, or the arguments cannot be read.",
    "both": "TensorFlow runs functions of a dataset, and JAX those of a step: one function cannot use both libraries.",
    "mean": "Gradients are summed over replicas, and a replica's mean does not know the global batch.",
    "integers": "Results of integers have another dtype.",
    "side effect": "run traces a function once and compiles it: Python code in it runs once, not in each step.",
    "scope": "A variable made outside of strategy.scope() belongs to no strategy.",
    "part": "Arrays are not assigned in place.",
    "clipping": "A gradient is clipped as a whole, whatever the number of replicas and the rows that a batch looks up.",
    "fallback": 'With "local", CPU devices stand for the cores of a TPU, so a TPU strategy works without one.',
    "int64": "JAX has 32-bit integers unless JAX_ENABLE_X64 is set.",
    "text": "JAX has no arrays of texts.",
    "sizes": "A program is compiled for each shape of its arguments. TensorFlow compiled one for all sizes of an axis.",
    "tape": "A tape records functions that are traced.",
    "condition": "AutoGraph made graph operations of if and while, but JAX traces Python as it is.",
    "suffix": "Keras 3 reads the contents of a file from its name: .keras, or .weights.h5 for weights alone.",
    "keras": "Keras 3 has left out this name or argument of Keras 2.",
    "star": "The names that import * binds are unknown.",
    "standing": "The comment was there before.",
}
# TensorFlow functions whose results are Python values here, or that only ask about the program.
_PYTHON_VALUES: Final = re.compile(
    r"tf\.(shape|rank|executing_eagerly|is_tensor|inside_function|io\.|distribute\.|config\.|train\.|keras\.|version\.|"
    r"test\.|data\.|nest\.|compat\.|dtypes|as_dtype|debugging|is_symbolic_tensor|get_static_value|function)"
)
_SEVERAL_REPLICAS: Final = re.compile(r"tf\.distribute\.(experimental\.)?(?!OneDevice)\w+Strategy(V[12])?")
_CLIPS: Final = re.compile(
    r"tf\.(compat\.v1\.)?(clip_by_(norm|global_norm|average_norm|value)|(linalg\.)?global_norm)"
)
_IS_TEXT: Final = re.compile(
    r"\bdtype\s*==\s*(np\.|numpy\.)?(object|str)_?\b|\.dtype\.kind\s*(==|in)\s*[(\[{]?\s*[\"'][OSU]"
)
_MAX_INT32: Final = 2**31 - 1
_RANDOM_OR_TIME: Final = ("numpy.random.", "random.", "time.")

Found: TypeAlias = tuple[cst.CSTNode, str, str, str]


@final
class Marker:
    """Applies the rules to one module."""

    def __init__(self, source: ParsedModule, reach: Reach) -> None:
        self._source, self._reach = source, reach

    def mark(self, comments: Comments) -> None:
        """Adds the marks of all rules."""
        rules = (
            self._star,
            self._mean_over_replicas,
            self._mean_of_losses,
            self._mean_of_integers,
            self._keras_loss,
            self._outputs,
            self._rate,
            self._clipping,
            self._clipping_of_tables,
            self._fallback,
            self._part_of_variable,
            self._side_effect,
            self._scope,
            self._int64,
            self._sizes,
            self._table,
            self._texts_of_model,
            self._texts_at_run_time,
            self._tape,
            self._condition,
        )
        for rule in rules:
            for node, word, what, write in rule():
                comments.add(node, word, what, write)

    def _star(self) -> Iterator[Found]:
        for bound in self._source.bounds:
            name = canonical(bound.dotted) if bound.alias is None else None
            if name and not moved_name(name):
                yield (
                    bound.statement,
                    "star",
                    f"from {bound.dotted} import * hides names",
                    "import each by name",
                )

    def _mean_over_replicas(self) -> Iterator[Found]:
        for call in self._source.calls:
            method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
            if method not in ("reduce", "all_reduce", "reduce_to") or not call.args:
                continue
            operation = call.args[0].value
            text = operation.raw_value if isinstance(operation, cst.SimpleString) else ""
            is_mean = (self._source.dotted(operation) or "").endswith("ReduceOp.MEAN")
            rows = [
                argument.value
                for argument in call.args
                if argument.keyword and argument.keyword.value == "axis"
            ]
            if any(text_of(axis) != "None" for axis in rows):
                continue  # along an axis each row counts the same
            if is_mean or text.lower() == "mean":
                yield (
                    call,
                    "mean",
                    "this mean counts each replica the same, however many rows it has",
                    "if replicas have different numbers of rows, reduce sums of values and of rows, and divide",
                )

    def _mean_of_losses(self) -> Iterator[Found]:
        """Finds a mean over the rows of one replica whose gradient is taken, or whose name contains "loss"."""
        for call in self._source.calls:
            is_mean = self._source.dotted(call.func) in ("tf.reduce_mean", "tf.math.reduce_mean")
            if not is_mean or self._source.owners[call] not in self._reach.replica or len(call.args) != 1:
                continue
            statement = next(n for n in self._source.around(call) if isinstance(n, cst.BaseSmallStatement))
            is_called_loss = "loss" in self._source.tree.code_for_node(statement).lower()
            if is_called_loss or call in self._reach.differentiated:
                yield (
                    call,
                    "mean",
                    "this mean is over the rows of one replica",
                    "for a loss whose gradient is taken, write rx.nn.compute_average_loss(losses)",
                )

    def _mean_of_integers(self) -> Iterator[Found]:
        for call in self._source.calls:
            is_mean = self._source.dotted(call.func) in ("tf.reduce_mean", "tf.math.reduce_mean")
            is_data = is_mean and self._reach.is_data(self._source, call)
            if is_mean and not is_data and call.args and is_integer(self._source, call.args[0].value):
                what = "the mean of integers is an integer in TensorFlow, and a float here"
                yield (
                    call,
                    "integers",
                    what,
                    "write // of the sum and the number of elements for the old value",
                )

    def _keras_loss(self) -> Iterator[Found]:
        """Finds a loss object that takes the mean itself, called in a replica function."""
        for call in self._source.calls:
            if self._source.owners[call] not in self._reach.replica:
                continue
            for made in self._source.values(call.func):
                name = self._source.dotted(made.func) if isinstance(made, cst.Call) else None
                if name is None or not re.fullmatch(r"tf\.keras\.losses\.[A-Z]\w*", name):
                    continue
                assert isinstance(made, cst.Call)
                if not any(
                    argument.keyword and argument.keyword.value == "reduction" for argument in made.args
                ):
                    yield (
                        made,
                        "mean",
                        "this loss takes the mean over the rows of one replica",
                        "give it reduction=None, and write rx.nn.compute_average_loss(losses) in the step",
                    )

    def _outputs(self) -> Iterator[Found]:
        """Finds models with several outputs that give one of them to their compiled loss or metrics, each once."""
        found: set[cst.CSTNode] = set()
        for call in self._source.calls:
            owner = text_of(call.func.value) if isinstance(call.func, cst.Attribute) else ""
            is_loss = text_of(call.func) == "self.compiled_loss"
            if not is_loss and not (
                owner == "self.compiled_metrics" and text_of(call.func).endswith("update_state")
            ):
                continue
            around = self._source.class_around(call)
            if around is None or around in found:
                continue
            method = self._source.member(around, "call")
            returned = (
                s.value
                for s in self._source.statements
                if isinstance(s, cst.Return) and method and self._source.owners[s] is method.node
            )
            if any(isinstance(value, cst.Tuple) for value in returned):
                found.add(around)
                yield (
                    call,
                    "keras",
                    "before the first step, Keras 3 gives all outputs of call to the loss and the metrics of compile",
                    "override compute_loss and compute_metrics, and take y_pred[0] there if y_pred is a tuple",
                )

    def _rate(self) -> Iterator[Found]:
        """Finds an optimizer of TensorFlow 1 whose rate is a variable."""
        for call in self._source.calls:
            name = self._source.dotted(call.func) or ""
            is_optimizer = re.fullmatch(r"tf\.(compat\.v1\.)?train\.\w+Optimizer", name)
            if is_optimizer and call.args and is_variable(self._source, call.args[0].value):
                yield (
                    call,
                    "argument",
                    "the rate of an optimizer of Keras is a number or a schedule, and counts in the momentum",
                    "write a number, and optimizer.learning_rate.assign(rate) where it changes",
                )

    def _fallback(self) -> Iterator[Found]:
        """Finds a resolver of the local TPU whose error a program awaits, to use other devices then."""
        for call in self._source.calls:
            is_resolver = (self._source.dotted(call.func) or "").endswith(".TPUClusterResolver")
            if not is_resolver or not any(self._is_local(argument.value) for argument in call.args):
                continue
            inner: cst.CSTNode = call
            for outer in self._source.around(call):
                if isinstance(outer, cst.Try) and outer.body is inner and outer.handlers:
                    yield (
                        call,
                        "fallback",
                        'without a TPU "local" is no error: CPU devices stand for its cores, and `except` does not run',
                        "write TPUClusterResolver() without arguments, which raises a ValueError then",
                    )
                inner = outer

    def _is_local(self, node: cst.BaseExpression) -> bool:
        """True for ``"local"``, also by a name."""
        values = (node, *self._source.values(node))
        return any(isinstance(v, cst.SimpleString) and v.evaluated_value == "local" for v in values)

    def _clipping(self) -> Iterator[Found]:
        """Finds an optimizer of Keras that clips gradients, in a program that makes a strategy of several replicas."""
        if not any(map(_SEVERAL_REPLICAS.fullmatch, self._reach.names)):
            return
        for call in self._source.calls:
            if is_below(self._source.dotted(call.func), "tf.keras.optimizers"):
                for argument in call.args:
                    if (
                        argument.keyword
                        and argument.keyword.value
                        in (
                            "clipnorm",
                            "global_clipnorm",
                            "clipvalue",
                        )
                        and text_of(argument.value) != "None"
                    ):
                        yield (
                            argument,
                            "clipping",
                            "TensorFlow clips each replica's gradients before it sums them; here the sum is clipped",
                            "nothing to do: one device gives the same; TensorFlow's numbers differ",
                        )

    def _clipping_of_tables(self) -> Iterator[Found]:
        """Finds a gradient that is clipped, in a program that looks up rows of a table and trains it."""
        for call in self._source.calls:
            name = self._source.dotted(call.func) or ""
            if not _CLIPS.fullmatch(name) or not call.args or self._reach.is_data(self._source, call):
                continue
            is_gradient = is_sparse_gradient(self._source, self._reach, call.args[0].value)
            if is_gradient and looks_up(self._source.program, self._reach):
                yield (
                    call,
                    "clipping",
                    "TensorFlow counts and clips each lookup of a row of a table by itself; here the whole table counts",
                    "nothing to do; for equal numbers, the original must clip tf.convert_to_tensor(gradient)",
                )

    def _part_of_variable(self) -> Iterator[Found]:
        """Finds ``v[0].assign(x)`` of a variable: a part of it is an array here."""
        for call in self._source.calls:
            if m.matches(call.func, m.Attribute(m.Subscript(), m.Name(m.MatchRegex(r"assign(_add|_sub)?")))):
                assert isinstance(call.func, cst.Attribute)
                assert isinstance(call.func.value, cst.Subscript)
                if is_variable(self._source, call.func.value.value):
                    yield (
                        call,
                        "part",
                        "a part of a variable is an array, which is not assigned",
                        "write v.assign(v.value.at[…].set(…)), with add in place of set for assign_add",
                    )

    def _side_effect(self) -> Iterator[Found]:
        """Finds side effects where TensorFlow ran a replica function eagerly. In a tf.function they happened once,
        too.
        """
        eager = (self._reach.replica | self._reach.taped) - self._reach.traced
        for call in self._source.calls:
            if self._source.owners[call] not in eager:
                continue
            name = self._source.full_name(call.func) or ""
            if m.matches(call.func, m.Name("print")) or name.startswith(_RANDOM_OR_TIME):
                what = f"{text_of(call.func)} runs once here, when the step is traced"
                yield (
                    call,
                    "side effect",
                    what,
                    "print with jax.debug.print; pass times and random values as arguments",
                )
            elif m.matches(call.func, m.Attribute(m.Name(), m.Name("append"))) and self._is_outer(call):
                what = f"{text_of(call.func)} runs once here, when the step is traced"
                yield call, "side effect", what, "return the value from the step, and append it after run"
        for statement in self._source.statements:
            if isinstance(statement, cst.AugAssign) and self._source.owners[statement] in eager:
                target = text_of(statement.target)
                if target.startswith("self.") or self._is_global(statement):
                    what = f"{target} changes once here, when the step is traced"
                    yield statement, "side effect", what, "make it an rx.Variable, or return its new value"

    def _is_global(self, statement: cst.AugAssign) -> bool:
        """True for a name that ``global`` or ``nonlocal`` declares."""
        if not isinstance(statement.target, cst.Name):
            return False
        scope = self._source.scope_of(statement.target)
        return all(a.scope is not scope for a in scope[statement.target.value])

    def _is_outer(self, call: cst.Call) -> bool:
        """True for a method of a name that the function does not bind itself."""
        assert isinstance(call.func, cst.Attribute)
        assert isinstance(call.func.value, cst.Name)
        name = call.func.value
        scope = self._source.scope_of(name)
        return bool(scope[name.value]) and all(a.scope is not scope for a in scope[name.value])

    def _scope(self) -> Iterator[Found]:
        """Finds a module's variable that a replica function reads, and that is made outside of every scope."""
        in_replica = {
            text_of(chain).partition(".")[0]
            for chain in self._source.chains
            if self._source.owners[chain] in self._reach.replica
        }
        for call in self._source.calls:
            if self._source.dotted(call.func) != "tf.Variable" or self._source.owners[call] is not None:
                continue
            assign = self._source.parents[call]
            is_inside = any(
                m.matches(item.item, m.Call(func=m.Attribute(attr=m.Name("scope"))))
                for outer in self._source.around(call)
                if isinstance(outer, cst.With)
                for item in outer.items
            )
            if not isinstance(assign, cst.Assign) or is_inside:
                continue
            if any(text_of(target.target) in in_replica for target in assign.targets):
                what = "this variable is made outside of strategy.scope(), and a replica function uses it"
                yield call, "scope", what, "make it in `with strategy.scope():`"

    def _int64(self) -> Iterator[Found]:
        """Finds the first int64 of a file that has a number for which int32 is too small.

        Elsewhere the report says it once: most programs use int64 for labels, ids and counts, which fit, and arguments
        and batches that do not fit raise a ``NarrowingError``.
        """
        if not any(self._is_too_large(number) for number in self._source.integers):
            return
        for chain in self._source.chains:
            if self._source.dotted(chain) == "tf.int64" and not self._reach.stays(self._source, chain):
                what = "int64 is int32 in JAX, here and below"
                yield chain, "int64", what, "if a value needs more, set JAX_ENABLE_X64=1"
                return

    def _is_too_large(self, number: cst.Integer) -> bool:
        """True if int32 is too small for a number, or for a power or shift by it."""
        value, parent = abs(number.evaluated_value), self._source.parents[number]
        is_exponent = isinstance(parent, cst.BinaryOperation) and parent.right is number
        is_power = is_exponent and isinstance(parent.operator, cst.Power | cst.LeftShift)  # type: ignore[union-attr]
        return value >= 31 if is_power else value > _MAX_INT32

    def _table(self) -> Iterator[Found]:
        """Finds a method of a ``tf.lookup`` table in a step. The table itself may be made outside."""
        for call in self._source.calls:
            if not isinstance(call.func, cst.Attribute) or not self._reach.is_step(self._source, call):
                continue
            values = self._reach.values_of(self._source, call.func.value)
            made = [home.dotted(value.func) for home, value in values if isinstance(value, cst.Call)]
            if any(is_below(name, "tf.lookup") for name in made) and not self._reach.is_data(
                self._source, call
            ):
                what = f"{text_of(call.func)} looks up in a table of TensorFlow, and a compiled step has arrays only"
                yield (
                    call,
                    "tf.lookup",
                    what,
                    "look up in the dataset, or with keras.layers.StringLookup there",
                )

    def _texts_of_model(self) -> Iterator[Found]:
        """Finds an input of texts of a model that runs outside of datasets: Keras on JAX computes with numbers only."""
        for call in self._source.calls:
            name = self._source.dotted(call.func) or ""
            if not re.fullmatch(r"tf\.keras\.(layers\.)?Input", name) or self._reach.is_data(
                self._source, call
            ):
                continue
            types = [a.value for a in call.args if a.keyword and a.keyword.value == "dtype"]
            is_text = any(
                self._source.dotted(kind) == "tf.string"
                or (isinstance(kind, cst.SimpleString) and kind.raw_value == "string")
                for kind in types
            )
            if is_text and "fit" in self._reach.methods:  # otherwise it may run in datasets
                yield (
                    call,
                    "text",
                    "a model on JAX takes no texts, so that StringLookup and TextVectorization cannot be in it",
                    "call these layers in dataset.map, or on NumPy before fit, and give the model their numbers",
                )

    def _texts_at_run_time(self) -> Iterator[Found]:
        """Finds ``tf.constant(x)`` where the program has just found that x has texts: ``x.dtype == object``."""
        for call in self._source.calls:
            if self._source.dotted(call.func) not in ("tf.constant", "tf.convert_to_tensor"):
                continue
            inner: cst.CSTNode = call
            for outer in self._source.around(call):
                if not isinstance(outer, cst.IfExp | cst.If) or outer.body is not inner:
                    inner = outer
                    continue
                if _IS_TEXT.search(self._source.tree.code_for_node(outer.test)):
                    what = "JAX has no arrays of texts, which an array of dtype object may hold"
                    yield call, "text", what, "leave these as NumPy, and make numbers of them in the dataset"
                    break
                inner = outer

    def _sizes(self) -> Iterator[Found]:
        """Finds an ``input_signature`` with an unknown size other than that of the batch."""
        for call in self._source.calls:
            if self._source.dotted(call.func) != "tf.function" or self._reach.is_data(self._source, call):
                continue
            signatures = [
                argument.value
                for argument in call.args
                if argument.keyword and argument.keyword.value == "input_signature"
            ]
            if any(self._has_unknown_size(signature) for signature in signatures):
                what = "TensorFlow compiles this once, and replicax for each size of the axes that are None"
                yield (
                    call,
                    "sizes",
                    what,
                    "pad the arrays to a few sizes, such as multiples of 64, and mask the rest",
                )

    def _has_unknown_size(self, signature: cst.BaseExpression, depth: int = 5) -> bool:
        """True for ``TensorSpec((None, None))``, in a list or under a name; False for ``TensorSpec((None, 3))``."""
        if depth == 0:
            return False
        if isinstance(signature, cst.List | cst.Tuple | cst.Dict):
            return any(self._has_unknown_size(e.value, depth - 1) for e in signature.elements)
        if isinstance(signature, cst.BinaryOperation):
            return any(self._has_unknown_size(e, depth - 1) for e in (signature.left, signature.right))
        if not isinstance(signature, cst.Call):
            return any(self._has_unknown_size(v, depth - 1) for v in self._source.values(signature))
        if self._source.dotted(signature.func) not in ("tf.TensorSpec", "tf.compat.v1.TensorSpec"):
            return False
        shapes = [a.value for a in signature.args if not a.keyword][:1]
        shapes += [a.value for a in signature.args if a.keyword and a.keyword.value == "shape"]
        for shape in shapes:
            if isinstance(shape, cst.Call) and shape.args:  # tf.TensorShape([None, None])
                shape = shape.args[0].value
            if text_of(shape) == "None":
                return True
            if isinstance(shape, cst.List | cst.Tuple):
                return any(text_of(size.value) == "None" for size in shape.elements[1:])
        return False

    def _tape(self) -> Iterator[Found]:
        for statement in self._source.statements:
            owner = self._source.owners[statement]
            if is_tape(self._source, statement) and not self._reach.is_step(self._source, statement):
                if isinstance(owner, cst.FunctionDef):
                    what, write = (
                        f"a tape in {owner.name.value}, which is not traced",
                        "put @rx.function above its def",
                    )
                    yield statement, "tape", what, write
                else:
                    what = "a tape outside of functions"
                    yield statement, "tape", what, "put these lines into a function with @rx.function"

    def _condition(self) -> Iterator[Found]:
        for statement in self._source.statements:
            if not isinstance(statement, cst.If | cst.While | cst.IfExp):
                continue
            owner = self._source.owners[statement]
            is_step = self._reach.is_step(self._source, statement)
            if not is_step or self._reach.is_data(self._source, statement):
                continue
            number = next(self._numbers_of_parameters(statement.test), "")
            number = number or next(self._steps_of_schedules(statement.test, owner), "")
            if number and owner in self._reach.traced:
                word = "while" if isinstance(statement, cst.While) else "if"
                what = f"{word} on {number}, which is known only when the step runs"
                yield (
                    statement.test,
                    "condition",
                    what,
                    "write jnp.where or rx.cond, or call it with Python numbers",
                )
                continue
            called = self._calls_of_tensorflow(statement.test, owner)
            names = [name for name in called if name and not _PYTHON_VALUES.match(name)]
            if names:
                word = "while" if isinstance(statement, cst.While) else "if"
                write = "jax.lax.while_loop" if word == "while" else "jnp.where or rx.cond"
                what = f"{word} on a result of {names[0]}, which is known only when the step runs"
                yield statement.test, "condition", what, f"write {write}, or Python values"

    def _numbers_of_parameters(self, test: cst.BaseExpression) -> Iterator[str]:
        """Yields ``float(x)`` and ``int(x)`` of a parameter, which AutoGraph made a cast."""
        for call in nodes_below(test):
            if not isinstance(call, cst.Call):
                continue
            if text_of(call.func) in ("float", "int") and len(call.args) == 1:
                value = call.args[0].value
                if isinstance(value, cst.Name) and self._source.parameter_of(value):
                    yield self._source.tree.code_for_node(call)

    def _steps_of_schedules(self, test: cst.BaseExpression, owner: Function | None) -> Iterator[str]:
        """Yields the names in a condition that are the step of a schedule, or that its ``__call__`` makes of it."""
        if not isinstance(owner, cst.FunctionDef) or owner.name.value != "__call__":
            return
        class_ = self._source.class_around(owner)
        if not class_ or not any(is_below(base, _SCHEDULES) for base in self._source.bases(class_)):
            return
        for name in nodes_below(test):
            if isinstance(name, cst.Name) and self._source.is_bound(name) and not self._is_identity(name):
                assigned = (part for value in self._source.values_of(name) for part in nodes_below(value))
                if any(self._is_step_of(owner, part) for part in (name, *assigned)):
                    yield name.value

    def _is_step_of(self, owner: cst.FunctionDef, node: cst.CSTNode) -> bool:
        """True for the argument of a schedule's ``__call__``."""
        is_name = isinstance(node, cst.Name) and self._source.is_bound(node)
        return is_name and self._source.parameter_of(node) == (owner, 1)  # type: ignore[arg-type]

    def _calls_of_tensorflow(self, test: cst.BaseExpression, owner: Function | None) -> Iterator[str]:
        """Yields the TensorFlow functions that a condition calls, or whose results its names are."""
        nodes = list(nodes_below(test))
        for call in nodes:
            if isinstance(call, cst.Call):
                yield self._source.dotted(call.func) or ""
        for name in nodes:
            if isinstance(name, cst.Name) and name in self._source.owners and not self._is_identity(name):
                for value in self._source.values_of(name):
                    if isinstance(value, cst.Call) and self._source.owners[value] is owner:
                        yield self._source.dotted(value.func) or ""

    def _is_identity(self, name: cst.Name) -> bool:
        """True for the name in ``name is None``."""
        comparison = self._source.parents[name]
        operators = (
            [t.operator for t in comparison.comparisons] if isinstance(comparison, cst.Comparison) else []
        )
        return any(isinstance(operator, cst.Is | cst.IsNot) for operator in operators)
