"""Decides what each name of a module becomes. Nothing changes yet, because imports depend on all uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

import libcst as cst

from replicax._migrate import table
from replicax._migrate.call_arguments import BindError
from replicax._migrate.comments import Comments
from replicax._migrate.imports import MOVED, is_below, moved_name
from replicax._migrate.keras_changes import (
    data_model,
    is_in_layer,
    is_optimizer,
    is_trained_by_keras,
    renamed,
    steps_of_tensorflow,
    suffixed_calls,
)
from replicax._migrate.keras_dropped import find_dropped
from replicax._migrate.marks import Marker
from replicax._migrate.name_bindings import (
    Chain,
    ImportedName,
    ParsedModule,
    canonical,
    names_in,
    parts_of,
    text_of,
)
from replicax._migrate.reach import Reach
from replicax._migrate.table import ROOTS, Row
from replicax._migrate.templates import PLACEHOLDER, evaluated_twice, simplified
from replicax._migrate.values import (
    OF_SHAPES,
    VIRTUAL_DEVICES,
    is_calculated_with,
    is_division_of_gpu,
    is_limit_of_gpu,
    is_parts,
    is_shape,
    is_size,
    is_variable,
    uses_of,
)

# Names that change in a dataset, too: those of distribution, and of Keras, whose layers run there with TensorFlow.
_ALSO_IN_DATA: Final = (*MOVED, "tf.estimator")
# Functions of Keras that take arrays only, and no variables of Keras.
_JOINS: Final = ("tf.concat", "tf.stack", "tf.add_n")
_TOP_K: Final = ("tf.math.top_k", "tf.nn.top_k")
# Reductions of TensorFlow 1 -> their values. Without weights all means are the same.
_REDUCTIONS: Final = MappingProxyType(
    {"NONE": "'none'", "SUM": "'weighted_sum'"}
    | dict.fromkeys(
        ("MEAN", "SUM_OVER_BATCH_SIZE", "SUM_BY_NONZERO_WEIGHTS", "SUM_OVER_NONZERO_WEIGHTS"),
        "'weighted_sum_by_nonzero_weights'",
    )
)
# Packages of TensorFlow whose names are decided one by one.
_PACKAGES: Final = ("tf.compat", "tf.compat.v1")
# Parameters -> names that say more, for arguments that are bound to one.
_NAMES: Final = MappingProxyType({"t_list": "gradients", "x": "array", "y": "factor"})
# Methods that enter a scope: replicax runs steps in TensorFlow's style afterwards, or after a decorator.
_ENTERS: Final = frozenset({"scope", "experimental_set_strategy"})
_LIKE: Final = ("tf.zeros_like", "tf.ones_like")
ROOT: Final = re.compile(rf"(?<![\w.{{\"'])({'|'.join(ROOTS)})(?=\.)")


@final
@dataclass(frozen=True)
class Change:
    """A name that was replaced."""

    line: int
    old: str
    new: str


@final
@dataclass(frozen=True)
class Filling:
    """The row and its template for a call, or for a method or an attribute of an object.

    Attributes:
      bound: Parameter -> the name that its first place binds, if the template would evaluate the argument twice.
    """

    row: Row
    template: str
    arguments: Mapping[str, Any]
    bound: Mapping[str, str]


def decide(source: ParsedModule, reach: Reach) -> Decisions:
    """Returns the decisions for a module. Its arrays are those of ``keras.ops`` if it uses Keras now or afterwards."""
    imported = [canonical(bound.origin) for bound in source.bounds]
    if not any(is_below(name, "tf.keras") for name in (*imported, *map(source.dotted, source.chains))):
        decisions = Decisions(source, reach, uses_keras=False)
        if not decisions.roots() & {"keras", "ops"}:
            return decisions
    return Decisions(source, reach, uses_keras=True)


@final
class Decisions:
    """The decisions for one module.

    Args:
      source: The module.
      reach: The contexts of all functions of the program.
      uses_keras: True if arrays are those of ``keras.ops``; False if they are those of ``jax.numpy``.

    Attributes:
      comments: The marks.
      names: Chain -> the name that replaces it, beginning with one of ``ROOTS``.
      fillings: Call or attribute -> its replacement.
      removed: The statements to remove.
      texts: Keywords, methods and paths of files -> their names in Keras 3.
      wraps: Expression -> the template around it, in which {self} is the replacement of the expression itself.
      dropped: The arguments to remove.
      keywords: Argument -> its keyword in Keras 3.
      taped: Tapes outside of steps, with the function that replaces their statements.
      decorated: The functions that get the decorator ``rx.function``.
      freed: The names whose assignment is removed.
      used: The imports that are still used, including those of other modules.
      changes: The changes, for the report.
    """

    def __init__(self, source: ParsedModule, reach: Reach, *, uses_keras: bool) -> None:
        self._source, self._reach = source, reach
        self.comments = Comments(source)
        self.uses_keras = uses_keras
        self.names: dict[cst.CSTNode, str] = {}
        self.wraps: dict[cst.CSTNode, str] = {}
        self.fillings: dict[cst.CSTNode, Filling] = {}
        self.removed: set[cst.CSTNode] = set()
        self.freed: set[str] = set()
        self.used: set[ImportedName] = set()
        self.changes: list[Change] = []
        self._marked_calls: set[cst.CSTNode] = set()
        self._aliases: list[Chain] = []
        self._words = set(re.findall(r"\w+", source.code))
        for chain in source.chains:
            name = source.dotted(chain)
            if name is not None:
                self._decide_name(chain, name)
        self._keep_aliases()
        for node in (*source.calls, *source.attributes):
            self._decide_method(node)
        self.texts: dict[cst.CSTNode, str] = {}
        for found in renamed(source):
            self._write(found.node, found.text)
        self.dropped: set[cst.CSTNode] = set()
        self.keywords: dict[cst.CSTNode, str] = {}
        self.taped = [
            taped for taped in reach.taped_in(source) if not self.comments.is_ok(taped.statements[0])
        ]
        for taped in self.taped:
            line = source.line_of(taped.statements[0])
            self.changes.append(Change(line, "with tf.GradientTape", f"@rx.function def {taped.name}"))
        self.decorated = set() if reach.methods & _ENTERS else set(steps_of_tensorflow(source))
        for step in self.decorated:
            self.changes.append(Change(source.line_of(step), f"def {step.name.value}", "@rx.function"))
        self._write_suffixes()
        self._add_to_shapes()
        self._return_arrays()
        self._drop()
        if not uses_keras:
            self._loop_over_arrays()
        Marker(source, reach).mark(self.comments)

    def roots(self) -> set[str]:
        """Returns the names of ``ROOTS`` that the new names begin with."""
        templates = [filling.template for filling in self.fillings.values()]
        templates += ["jnp."] * any(form in text for text in templates for form in (":array}", ":operand}"))
        templates += ["ops."] * any(":tensor}" in text for text in templates)
        texts = [
            *self.names.values(),
            *templates,
            *self.wraps.values(),
            *["rx."] * bool(self.taped or self.decorated),
        ]
        return {root for text in texts for root in ROOT.findall(text + ".")}

    def first_random(self) -> cst.CSTNode | None:
        """Returns the first statement of the module that draws random numbers from its generator."""
        drawing = [node for node, filling in self.fillings.items() if table.RANDOM in filling.template]
        around = {outer for node in drawing for outer in self._source.around(node)}
        return next((s for s in self._source.tree.body if s in around), None)

    # Names of TensorFlow.

    def _decide_name(self, chain: Chain, name: str) -> None:
        """Decides for one name: either it changes, or its import is still used."""
        found = table.find(name)
        if self._reach.stays(self._source, chain) and not is_below(name, *_ALSO_IN_DATA):
            if found and found.rows[0].kind != "keep":
                self._mark_both(chain)
            return self._keep(chain)
        if self._is_in(self._marked_calls, chain):
            return self._keep(chain)  # a person replaces the whole call
        if name == "tf.range" and self._is_loop(self._source.parents[chain]):
            return self._rename(chain, name, "range")
        if name in _PACKAGES and self._is_alias(chain):
            self._aliases.append(chain)
            return None
        if found is None:
            if "." in name:
                self._mark_kept(chain, "unknown", f"the table has no row for {name}")
            return self._keep(chain)
        if found.rows[0].kind != "keep" and self._is_kept_alias(chain, name):
            return self._keep(chain)
        call = self._source.parents[chain]
        rows: Sequence[Row] = [row for row in found.rows if not row.is_call]
        if isinstance(call, cst.Call) and call.func is chain:
            if name == "tf.Variable" and (
                is_in_layer(self._source, chain) or is_trained_by_keras(self._source, call)
            ):
                return self._decide_variable_of_layer(call, chain)
            in_data = data_model(self._source, call, self._in_data)
            if in_data:
                return self._rename(chain, name, in_data)
            if in_data is not None:
                what = "a dataset calls this model, and Keras on JAX cannot run a model there"
                self._mark(
                    chain,
                    "both",
                    what,
                    "make an rx.keras.DataModel or a keras.layers.Pipeline for the dataset",
                )
            rows = [row for row in found.rows if row.is_call] or rows
            if rows[0].is_call:
                return self._decide_call(call, chain, name, rows)
        return self._decide_value(chain, name, rows or found.rows, found.rest)

    def _is_alias(self, chain: Chain) -> bool:
        """True for ``v1 = tf.compat.v1`` if the program reads names below it only."""
        statement = self._source.parents[chain]
        if not isinstance(statement, cst.Assign) or len(statement.targets) > 1:
            return False
        uses = list(uses_of(self._source, statement))
        return all(isinstance(self._source.parents[use], cst.Attribute) for use in uses) and bool(uses)

    def _keep_aliases(self) -> None:
        """Removes the names of packages below which everything changes, and keeps the others."""
        for chain in reversed(self._aliases):  # `v1 = compat.v1` before `compat = tf.compat`
            statement = self._source.parents[chain]
            assert isinstance(statement, cst.Assign)
            uses = [self._chain_of(use) for use in uses_of(self._source, statement)]
            if all(self._is_replaced(use) for use in uses):
                self.removed.add(self._source.parents[statement])
                self.changes.append(Change(self._source.line_of(chain), self._source.dotted(chain) or "", ""))
            else:
                self._keep(chain)

    def _is_replaced(self, node: cst.CSTNode) -> bool:
        replaced = (self.names, self.fillings, self.removed)
        return any(each in found for each in (node, *self._source.around(node)) for found in replaced)

    def _is_kept_alias(self, chain: Chain, name: str) -> bool:
        """True for ``square = tf.square`` if a dataset uses ``square``. Calls elsewhere are changed one by one."""
        statement = self._source.parents[chain]
        if not isinstance(statement, cst.Assign) or is_below(name, *_ALSO_IN_DATA):
            return False
        uses = [self._chain_of(use) for use in uses_of(self._source, statement)]
        in_data = [self._in_data(use) for use in uses]
        others = [
            use
            for use, is_there in zip(uses, in_data, strict=True)
            if not is_there
            and isinstance(use, cst.Name)
            and not isinstance(self._source.parents[use], cst.Call)
        ]
        if any(in_data) and others:
            what = f"a dataset uses this name of {name}, so it stays TensorFlow's"
            self._mark(chain, "both", what, "give the steps a name of their own")
        return any(in_data)

    def _chain_of(self, name: cst.Name) -> cst.CSTNode:
        """Returns the ``v1.data.Dataset`` that begins with a name."""
        node: cst.CSTNode = name
        while isinstance(self._source.parents[node], cst.Attribute):
            node = self._source.parents[node]
        return node

    def _mark_both(self, chain: Chain) -> None:
        owner = self._source.owners[chain]
        if owner in self._reach.step and owner in self._reach.data:
            name = owner.name.value if isinstance(owner, cst.FunctionDef) else "this function"
            what = f"{name} runs in a step and in a dataset, so it stays TensorFlow's"
            self._mark(owner, "both", what, "write it twice, and replace tf in the one for the step")

    def _decide_value(self, chain: Chain, name: str, rows: Sequence[Row], rest: str) -> None:
        """Decides for a name that is not called, or that is called and has a row without arguments."""
        row = rows[0]
        if row.action(keras=self.uses_keras, step=self._in_step(chain)) != "change":
            return self._keep_or_remove(chain, name, row)
        target = row.bare(keras=self.uses_keras)
        if target is None or (rest and not target.replace(".", "").isidentifier()):
            template = row.template(keras=self.uses_keras)
            self._mark_kept(
                chain,
                "argument",
                f"{name} is passed on, not called",
                row.write or f"write a function of {template}",
            )
            return self._keep(chain)
        return self._rename(chain, name, f"{target}.{rest}" if rest else target)

    def _decide_call(self, call: cst.Call, chain: Chain, name: str, rows: Sequence[Row]) -> None:
        reasons = []
        for row in rows:
            try:
                bound = row.bind(*self._texts(call), keras=self.uses_keras, step=self._in_step(call))
            except BindError as error:
                reasons.append(str(error))
                continue
            if bound.action != "change":
                return self._keep_or_remove(chain, name, row)
            twice = evaluated_twice(bound.template, bound.arguments)
            if twice and not self._may_bind(call):
                reasons.append(f"{twice[0]} is used twice, and no name can be bound here")
                continue
            if row.name == VIRTUAL_DEVICES:
                statement = self._source.parents[call]
                if isinstance(statement, cst.Expr) and is_limit_of_gpu(self._source, call):
                    return self._remove(chain, name, statement)
                if is_division_of_gpu(self._source, call):
                    self._mark(chain, row.name, f"{name}: JAX does not divide a GPU", row.write)
                    return self._keep(chain)
            return self._fill(call, row, name, bound)
        if not self._is_new_name(chain):
            self._mark_kept(chain, "argument", f"{name}: {reasons[0]}", rows[0].write)
            self._marked_calls.add(call)
        return self._keep(chain)

    def _remove(self, chain: Chain, name: str, statement: cst.Expr) -> None:
        self.removed.add(self._source.parents[statement])
        self.changes.append(Change(self._source.line_of(chain), name, ""))

    def _decide_variable_of_layer(self, call: cst.Call, chain: Chain) -> None:
        owner = self._source.owners[chain]
        in_build = isinstance(owner, cst.FunctionDef) and owner.name.value == "build"
        found = table.find(f"tf.Variable in {'build of ' * in_build}a Keras layer")
        assert found is not None
        self._decide_call(call, chain, "tf.Variable", found.rows)
        first = call.args[0] if call.args else None
        is_typed = any(argument.keyword and argument.keyword.value == "dtype" for argument in call.args)
        if first and isinstance(first.value, cst.Integer) and not is_typed:
            what = "keras.Variable makes a float of an integer"
            self._mark(chain, "integers", what, 'give dtype="int32" if it counts')

    def _keep_or_remove(self, chain: Chain, name: str, row: Row) -> None:
        call = self._source.parents[chain]
        statement = self._source.parents[call]
        if isinstance(statement, cst.ListComp) and statement.elt is call:
            statement = self._source.parents[statement]  # `[set_memory_growth(gpu, True) for gpu in gpus]`
        if row.kind == "remove" and isinstance(call, cst.Call) and isinstance(statement, cst.Expr):
            return self._remove(chain, name, statement)
        if row.action(keras=self.uses_keras, step=self._in_step(chain)) != "keep":
            self._mark_kept(chain, row.name, f"{name}: {row.why or 'it has no counterpart'}", row.write)
            self._marked_calls.add(call)
        return self._keep(chain)

    def _rename(self, chain: Chain, name: str, target: str) -> None:
        """Keeps a name that changes with its import, or with the assignment of its first name; otherwise renames it."""
        first, *rest = parts_of(chain)
        base = self._source.dotted(first)
        moved = moved_name(base) if base else None
        if moved and ".".join([moved, *(part.value for part in rest)]) == self._in_full(target):
            return self._keep(chain)
        if self._source.binding(first) is None and not rest:
            return None
        statement = self._source.parents[chain]
        if isinstance(statement, cst.Assign) and self._is_assigned_to(statement, target):
            self.removed.add(self._source.parents[statement])  # `keras = tf.keras`
            self.freed.add(target)
        self.names[chain] = target
        self.changes.append(Change(self._source.line_of(chain), name, target))
        return None

    def _in_full(self, target: str) -> str:
        return re.sub(r"^rx\b", "replicax", re.sub(r"^ops\b", "keras.ops", target))

    def _is_assigned_to(self, statement: cst.Assign, target: str) -> bool:
        (first, *more) = statement.targets
        return not more and isinstance(first.target, cst.Name) and first.target.value == target

    def _fill(self, node: cst.Call | cst.Attribute, row: Row, name: str, bound: table.MatchedCall) -> None:
        template = bound.template
        if row.name == "tf.shape" and is_calculated_with(self._source, node):
            template = f"np.array({template})"
        elif row.name in OF_SHAPES and isinstance(node, cst.Call):
            of_shapes = OF_SHAPES[row.name]
            taken = {match[2] for match in PLACEHOLDER.finditer(of_shapes)}
            if bound.arguments.keys() <= taken and any(is_shape(self._source, a.value) for a in node.args):
                template = simplified(of_shapes, bound.arguments)
        elif (
            row.name in _LIKE
            and self.uses_keras
            and isinstance(node, cst.Call)
            and self._may_be_variable(node)
        ):
            template = template.replace("{input}", "ops.convert_to_tensor({input})")
        if row.name in _JOINS and isinstance(node, cst.Call) and node.args and not self._in_step(node):
            parts = node.args[0].value
            if is_parts(self._source, parts):  # they lie on several devices
                self.wraps[parts] = "jax.device_get({self})"
        names = {p: self._new_name(p) for p in evaluated_twice(template, bound.arguments)}
        self.fillings[node] = Filling(row, template, bound.arguments, names)
        self.changes.append(Change(self._source.line_of(node), name, template))

    def _may_bind(self, call: cst.Call) -> bool:
        """True if ``(name := value)`` may be in a call: not where a comprehension iterates, or in one of a class."""
        inner: cst.CSTNode = call
        is_in_comprehension = False
        for outer in self._source.around(call):
            if isinstance(outer, cst.CompFor) and outer.iter is inner:
                return False
            is_in_comprehension |= isinstance(outer, cst.BaseComp)
            if isinstance(outer, cst.FunctionDef | cst.Lambda):
                return True
            if isinstance(outer, cst.ClassDef):
                return not is_in_comprehension
            inner = outer
        return True

    def _new_name(self, parameter: str) -> str:
        """Returns a name that the module does not have, for the argument of a parameter."""
        name = base = _NAMES.get(parameter, parameter)
        number = 1
        while name in self._words:
            number += 1
            name = f"{base}_{number}"
        self._words.add(name)
        return name

    def _may_be_variable(self, call: cst.Call) -> bool:
        """True if the first argument is an attribute, or a name of a loop: `for v in model.trainable_variables`."""
        first = call.args[0].value
        if isinstance(first, cst.Attribute):
            return text_of(first).startswith("self.")
        targets = (loop.target for loop in self._source.around(first) if isinstance(loop, cst.For))
        comprehensions = (c.for_in for c in self._source.around(first) if isinstance(c, cst.BaseSimpleComp))
        targets = [*targets, *(c.target for c in comprehensions)]
        return isinstance(first, cst.Name) and any(first.value in names_in(target) for target in targets)

    def _in_step(self, node: cst.CSTNode) -> bool:
        return self._reach.is_step(self._source, node)

    def _keep(self, chain: Chain) -> None:
        bounds = self._source.bindings(parts_of(chain)[0])
        self.used.update(bounds)
        if len(parts_of(chain)) == 1:
            return
        handed_on = self._source.handed_on_by(chain)
        if handed_on is not None:
            self.used.add(handed_on)
        elif self._source.is_assigned_elsewhere(chain):
            text = self._source.tree.code_for_node(chain)
            what = f"a dataset uses {text}, and it is JAX's where it is assigned"
            self._mark(chain, "both", what, f"write {self._source.dotted(chain)} here")

    def _mark(self, node: cst.CSTNode, rule: str, what: str, write: str = "") -> None:
        self.comments.add(node, rule, what, write)

    def _mark_kept(self, chain: Chain, rule: str, what: str, write: str = "") -> None:
        """Marks a name that stays TensorFlow's."""
        if self._reach.has_servers and not self._is_new_name(chain):
            says = "until then each server imports TensorFlow and Keras besides JAX"
            write = f"{write}; {says}" if write else says
        self._mark(chain, rule, what, write)

    def _is_new_name(self, chain: Chain) -> bool:
        """True for ``keras.layers.Dense`` of ``import keras``, which may be migrated already."""
        return (self._source.full_name(chain) or "").startswith("keras.")

    def _is_loop(self, call: cst.CSTNode) -> bool:
        """True in ``for i in tf.range(n)``: a Python loop, which is unrolled at tracing."""
        loop = self._source.parents[call]
        return isinstance(loop, cst.For | cst.CompFor) and loop.iter is call

    # Methods and attributes of objects whose class is unknown.

    def _decide_method(self, node: cst.Call | cst.Attribute) -> None:
        attribute = node.func if isinstance(node, cst.Call) else node
        if not isinstance(attribute, cst.Attribute) or not self._source.is_bound(attribute):
            return
        if node in self.fillings:
            return
        name = f".{attribute.attr.value}"
        found = table.find(name)
        if isinstance(attribute.value, cst.Attribute):
            compound = table.find(f".{attribute.value.attr.value}{name}")
            if compound and not compound.rest:
                found, name = compound, f".{attribute.value.attr.value}{name}"
        if found is None or self._is_of_another_package(attribute) or self._reach.is_data(self._source, node):
            return
        if self._source.definition(attribute) or not (
            isinstance(node, cst.Call) or name.count(".") > 1 or self._is_known(name, node.value)
        ):
            return  # it is the program's own, or an attribute such as `args.lr`
        if name == ".value" and not is_variable(self._source, attribute.value):
            return
        for row in found.rows:
            if row.is_call != isinstance(node, cst.Call):
                continue
            texts = self._texts(node) if isinstance(node, cst.Call) else ((), {})
            try:
                bound = row.bind(*texts, keras=self.uses_keras, step=self._in_step(node))
            except BindError:
                continue
            if bound.action == "mark":
                self._mark(node, row.name, f"{name}: {row.why}", row.write)
            elif bound.action == "change":
                self._fill(node, row, name, bound)
            return

    def _is_known(self, name: str, owner: cst.BaseExpression) -> bool:
        """True for the rate of an optimizer, and for a part of the result of ``top_k``."""
        if name in (".values", ".indices"):
            values = [owner] if isinstance(owner, cst.Call) else self._source.values(owner)
            return any(isinstance(v, cst.Call) and self._source.dotted(v.func) in _TOP_K for v in values)
        return is_optimizer(self._source, owner)

    def _is_of_another_package(self, attribute: cst.Attribute) -> bool:
        """True for ``torch.numpy`` and for the result of a call of another package: ``torch.ones(2).numpy()``."""
        owner: cst.BaseExpression = attribute
        while isinstance(owner, cst.Attribute | cst.Call | cst.Subscript):
            if self._source.full_name(owner) and not self._source.dotted(owner):
                return True
            owner = owner.func if isinstance(owner, cst.Call) else owner.value
        return bool(self._source.full_name(attribute))

    # Names that Keras 3 has changed.

    def _write(self, node: cst.BaseExpression, text: str) -> None:
        self.texts[node] = text
        self.changes.append(Change(self._source.line_of(node), self._source.tree.code_for_node(node), text))

    def _write_suffixes(self) -> None:
        """Gives Keras files the names that Keras 3 requires."""
        for found in suffixed_calls(self._source, uses_keras=self.uses_keras):
            suffix = found.suffixes[0]
            if found.text:
                self._write(found.path, found.text)
            else:
                self.wraps[found.path] = found.template
                self.changes.append(Change(self._source.line_of(found.path), "", found.template))
            for other in found.others:
                what = f"this file's name ends in {suffix} now, where Keras writes and reads it"
                self._mark(other, "suffix", what, "write that name here, too")

    def _add_to_shapes(self) -> None:
        """Makes tuples of lists in sums with shapes: ``x.shape[:-1] + [n]``."""
        for attribute in self._source.attributes:
            if attribute.attr.value != "shape" or self._in_data(attribute):
                continue
            node: cst.CSTNode = attribute
            if isinstance(self._source.parents[node], cst.Subscript):
                node = self._source.parents[node]
            total = self._source.parents[node]
            if isinstance(total, cst.BinaryOperation) and isinstance(total.operator, cst.Add):
                other = total.right if total.left is node else total.left
                if isinstance(other, cst.List):
                    self.wraps[other] = "tuple({self})"
                    self.changes.append(Change(self._source.line_of(other), "", "tuple({self})"))

    def _return_arrays(self) -> None:
        """Makes arrays of sizes that a replica function returns, because ``reduce`` needs one for each replica."""
        for statement in self._source.statements:
            if not isinstance(statement, cst.Return) or statement.value is None:
                continue
            if self._source.owners[statement] not in self._reach.replica_functions:
                continue
            for value in _parts_of_result(statement.value):
                if is_size(self._source, value):
                    template = f"{'ops.convert_to_tensor' if self.uses_keras else 'jnp.asarray'}({{self}})"
                    self.wraps[value] = template
                    self.changes.append(Change(self._source.line_of(value), "", template))

    def _loop_over_arrays(self) -> None:
        """Makes loops over datasets get NumPy arrays, because jax.numpy takes no tensors of TensorFlow. keras.ops
        does.
        """
        for loop in self._source.loops:
            dataset = loop.iter
            if isinstance(dataset, cst.Call) and self._source.full_name(dataset.func) is None:
                is_numbered = isinstance(dataset.func, cst.Name) and dataset.func.value == "enumerate"
                dataset = dataset.args[0].value if is_numbered and dataset.args else dataset
            self._give_arrays(loop, dataset)
        for call in self._source.calls:
            is_builtin = isinstance(call.func, cst.Name) and call.func.value in ("iter", "list", "zip")
            if is_builtin and self._source.full_name(call.func) is None and not self._asks_for_next(call):
                for argument in call.args:
                    self._give_arrays(call, argument.value)

    def _give_arrays(self, node: cst.CSTNode, dataset: cst.BaseExpression) -> None:
        is_on_host = not self._in_data(node) and not self._in_step(node)
        if is_on_host and dataset not in self.wraps and self._reach.is_dataset(self._source, dataset):
            self.wraps[dataset] = "{self}.as_numpy_iterator()"
            self.changes.append(Change(self._source.line_of(node), "", "{self}.as_numpy_iterator()"))

    def _asks_for_next(self, call: cst.Call) -> bool:
        """True for ``iterator = iter(dataset)`` with ``iterator.get_next()``, which iterators of arrays lack."""
        statement = self._source.parents[call]
        if not isinstance(statement, cst.Assign):
            return isinstance(statement, cst.Attribute)
        names = {text_of(target.target) for target in statement.targets}
        return any(
            parts_of(chain)[-1].value.startswith("get_next") and text_of(chain.value) in names  # type: ignore[union-attr]
            for chain in self._source.chains
            if isinstance(chain, cst.Attribute)
        )

    def _drop(self) -> None:
        """Marks names and arguments that Keras 3 does not have; renames others, and removes those without effect."""
        for found in find_dropped(self._source, uses_keras=self.uses_keras):
            if found.what:
                self._mark(found.node, "keras", found.what, found.write)
            elif found.node in self.fillings:
                continue
            elif found.value is not None:
                self.wraps[found.value] = found.template
                self.changes.append(Change(self._source.line_of(found.value), "", found.template))
            elif found.argument is not None:
                text = self._source.tree.code_for_node(found.argument).rstrip(", \n")
                new = f"{found.keyword}=…" if found.keyword else ""
                if found.keyword:
                    self.keywords[found.argument] = found.keyword
                else:
                    self.dropped.add(found.argument)
                self.changes.append(Change(self._source.line_of(found.argument), text, new))

    # Places where TensorFlow stays.

    def _in_data(self, node: cst.CSTNode) -> bool:
        if self._reach.is_data(self._source, node):
            return True
        kept = {outer for outer in self._source.around(node) if self._reach.is_kept(outer)}
        return self._is_in(kept, node)

    def _is_in(self, calls: Set[cst.CSTNode], node: cst.CSTNode) -> bool:
        """True for a node in the arguments of one of the calls, but not in a function there."""
        inner = node
        for outer in self._source.around(node) if calls else ():
            if isinstance(outer, cst.Lambda):
                return False
            if outer in calls and isinstance(outer, cst.Call) and outer.func is not inner:
                return True
            inner = outer
        return False

    def _texts(self, call: cst.Call) -> tuple[list[str], dict[str, str]]:
        positional, keywords = argument_texts(self._source.tree, call.args)
        for argument in call.args:
            reduction = (self._source.dotted(argument.value) or "").rpartition(".losses.Reduction.")[2]
            if argument.keyword and reduction in _REDUCTIONS:
                keywords[argument.keyword.value] = _REDUCTIONS[reduction]
        return positional, keywords


def argument_texts(module: cst.Module, arguments: Sequence[cst.Arg]) -> tuple[list[str], dict[str, str]]:
    """Returns the source texts of positional arguments and of keywords, as ``Row.bind`` takes them."""
    positional = [
        a.star + module.code_for_node(a.value) for a in arguments if not a.keyword and a.star != "**"
    ]
    keywords = {a.keyword.value: module.code_for_node(a.value) for a in arguments if a.keyword}
    if any(a.star == "**" for a in arguments):
        keywords["**"] = ""
    return positional, keywords


def _parts_of_result(value: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Returns the parts of a tuple, a list or a dict that a function returns, else the value."""
    if isinstance(value, cst.Dict | cst.Tuple | cst.List):
        elements = [e for e in value.elements if isinstance(e, cst.DictElement | cst.Element)]
        return [part for element in elements for part in _parts_of_result(element.value)]
    return [value]
