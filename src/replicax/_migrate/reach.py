"""Finds which functions run in a step and which in a dataset, by a call graph over all given modules.

A function that is in neither runs on the host, as does the body of a module. There, an expression stays TensorFlow's
if its value goes to a dataset or to another function that stays, and to no step.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, final

import libcst as cst

from replicax._migrate import table
from replicax._migrate.flow import GIVES_NUMBERS, SAVES, Flow, Place
from replicax._migrate.imports import MOVED, is_below
from replicax._migrate.name_bindings import Definition, Function, ParsedModule, Program, parts_of, text_of
from replicax._migrate.tapes import Taped, find_taped, is_tape, nodes_below
from replicax._migrate.values import VIRTUAL_DEVICES, is_division_of_gpu

# Dataset methods whose functions run in TensorFlow's graph.
_DATASET_METHODS: Final = frozenset(
    {"map", "filter", "interleave", "flat_map", "scan", "take_while", "from_generator", "group_by_window"}
    | {"reduce", "bucket_by_sequence_length", "parallel_interleave", "map_and_batch", "rejection_resample"}
)
# Functions that take a function that makes a dataset.
DATASET_MAKERS: Final = frozenset(
    {
        "distribute_datasets_from_function",
        "experimental_distribute_datasets_from_function",
        "create_per_worker_dataset",
        "make_input_fn_iterator",
        "DatasetCreator",
    }
)
# Functions that make a dataset of tf.data, by their full names, and methods of other libraries and strategies.
_MAKES_DATASET: Final = re.compile(
    r"tensorflow\.((compat\.v[12]|contrib|_api\.v2\.v2)\.)?data\..*|tensorflow_datasets\.load"
    r"|(tensorflow\.|tf_)?keras\.(utils|preprocessing(\.\w+)?)\.\w+_dataset_from_\w+"
)
_DATASET_GIVERS: Final = frozenset(
    {"experimental_make_numpy_dataset", "make_experimental_numpy_dataset", "as_dataset", "to_tf_dataset"}
)
# Functions that stay TensorFlow's and give tensors.
_GIVES_TENSORS: Final = re.compile(r"tf\.(io\.(?!gfile)|strings|audio|ragged|sparse|lookup)\b.*")
STEP_METHODS: Final = frozenset(
    {"run", "experimental_run_v2", "call_for_each_replica", "merge_call", "schedule", "value_and_grad"}
)
# Decorators of TensorFlow, replicax and JAX that make a step of a function.
STEP_DECORATORS: Final = frozenset(
    {"tf.function", "tf.custom_gradient", "tf.recompute_grad", "tf.autograph.experimental.do_not_convert"}
)
_MIGRATED_DECORATORS: Final = frozenset({"replicax.function", "jax.jit", "jax.custom_vjp"})
STEP_BASES: Final = ("tf.keras.", "tf.Module", "tf.nn.", "tf.optimizers.", "tf.losses.", "tf.metrics.")
# Names that start servers, or connect to them.
_SERVERS: Final = re.compile(
    r"(tf\.distribute|replicax)\.(experimental\.)?(Server|ParameterServerStrategy|coordinator\.ClusterCoordinator)"
)
_NOT_IN_STEP: Final = frozenset({"__init__", "build", "get_config", "from_config", "__repr__", "summary"})
_CALLBACKS: Final = ("tf.keras.callbacks.", "tf.keras.utils.")


@final
class Reach:
    """The functions of a program, by their context.

    Attributes:
      step: Functions that run in a step: of ``strategy.run``, ``tf.function``, Keras, a coordinator.
      data: Functions that run in a dataset or make one.
      traced: Functions of ``step`` that TensorFlow traced, too; it ran the others eagerly.
      replica: Functions of ``step`` that ``strategy.run`` or a coordinator's function runs.
      differentiated: Calls whose result is part of a tape's gradient target.
      taped: Functions of ``step`` that a tape outside of steps records.
      has_servers: True if the program has parameter servers, whose processes run its imports, too.
      names: The names of TensorFlow that the program reads.
      methods: The names of the methods that the program calls.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.has_servers = any(
            _SERVERS.fullmatch(source.dotted(chain) or source.full_name(chain) or "")
            for source in program.sources
            for chain in source.chains
        )
        self.names = frozenset(
            filter(None, (source.dotted(chain) for source in program.sources for chain in source.chains))
        )
        self.methods = frozenset(
            call.func.attr.value
            for source in program.sources
            for call in source.calls
            if isinstance(call.func, cst.Attribute)
        )
        self._edges: dict[Function, set[Function]] = {}
        self._data_arguments: set[cst.CSTNode] = set()
        self._callers = self._find_callers()
        self._flow = Flow(program, self._callers)
        self._datasets: dict[Hashable, bool] = {}
        steps: set[Function] = set()
        replicas: set[Function] = set()
        data: set[Function] = set()
        decorated: set[Function] = set()
        for source in program.sources:
            for call in source.calls:
                method = call.func.attr.value if isinstance(call.func, cst.Attribute) else text_of(call.func)
                given = [argument.value for argument in call.args]
                is_method = method in _DATASET_METHODS and self._may_be_dataset(source, call)
                if is_method or method in DATASET_MAKERS:
                    data.update(self._mark_data(source, given))
                elif source.dotted(call.func) in STEP_DECORATORS and given:
                    steps.update(self._functions(source, given[0]))
                elif method in STEP_METHODS and given and not source.full_name(call.func):
                    replicas.update(self._functions(source, given[0]))
                elif method == "compile":
                    steps.update(self._compiled(source, call))
            for function in source.functions:
                if isinstance(function, cst.FunctionDef):
                    if function.name.value == "input_fn":
                        data.add(function)
                    if any(self._is_step(source, decorator) for decorator in function.decorators):
                        decorated.add(function)
            steps.update(self._methods_of_keras(source))
        for source in program.sources:
            self._collect_edges(source)
        self.replica_functions: frozenset[cst.CSTNode | None] = frozenset(replicas)
        self.replica = self._closure(replicas)
        self.data = self._closure(data)
        self.traced = self._closure(steps | (decorated - self.data))  # a dataset runs tf.functions, too
        self.step = self.traced | self.replica
        self._taped = {source: self._find_taped(source) for source in program.sources}
        self.taped = (
            self._closure({f for source in program.sources for f in self._in_taped(source)}) - self.data
        )
        self.step |= self.taped
        self.differentiated = {call for source in program.sources for call in self._differentiated(source)}
        self._tensors: dict[Hashable, bool] = {}
        self._kept = {c for source in program.sources for c in source.calls if self._is_kept(source, c)}
        self._of_steps = self._flow.closure(self._read_by_steps(), self.step)
        self._of_data = self._flow.closure(self._read_by_data(), self.data | self.step)
        self._kept_for_arguments = {c for s in program.sources for c in s.calls if self._keeps(s, c)}
        self._kept |= self._kept_for_arguments

    def evaluates_replicas(self, source: ParsedModule) -> bool:
        """True if a replica function of the module evaluates a model, ``model(x, training=False)``."""
        return any(
            source.owners[call] in self.replica
            and argument.keyword is not None
            and argument.keyword.value == "training"
            and text_of(argument.value) == "False"
            for call in source.calls
            for argument in call.args
        )

    def taped_in(self, source: ParsedModule) -> list[Taped]:
        """Returns the tapes outside of steps whose statements become a function."""
        return self._taped[source]

    def is_step(self, source: ParsedModule, node: cst.CSTNode) -> bool:
        """True for a name, call or statement that runs in a step."""
        return source.owners[node] in self.step or any(node in taped.nodes for taped in self._taped[source])

    def _find_taped(self, source: ParsedModule) -> list[Taped]:
        tapes = [s for s in source.statements if isinstance(s, cst.With) and is_tape(source, s)]
        outside = [t for t in tapes if source.owners[t] not in self.step and not self.is_data(source, t)]
        return list(find_taped(source, outside))

    def _in_taped(self, source: ParsedModule) -> Iterator[Function]:
        """Yields the functions that the statements of a tape name."""
        for taped in self._taped[source]:
            for chain in source.chains:
                found = source.definition(chain) if chain in taped.nodes else None
                if found and not isinstance(found.node, cst.ClassDef):
                    yield found.node

    def _differentiated(self, source: ParsedModule) -> Iterator[cst.Call]:
        """Follows the target of ``tape.gradient(target, variables)`` through names and functions of the program."""
        for call in source.calls:
            is_gradient = isinstance(call.func, cst.Attribute) and call.func.attr.value == "gradient"
            if is_gradient and call.args and source.owners[call] in self.step:
                yield from self._calls_in(source, call.args[0].value)

    def _calls_in(self, source: ParsedModule, node: cst.BaseExpression, depth: int = 8) -> Iterator[cst.Call]:
        """Yields the calls in an expression, and in the values of its names and calls, over some steps."""
        seen: set[cst.CSTNode] = {node}
        places: list[Place] = [(source, node)]
        for _ in range(depth):
            found: list[Place] = []
            for home, value in places:
                for part in nodes_below(value):
                    if isinstance(part, cst.Call):
                        yield part
                        made = home.definition(part.func)
                        found += [(made.source, result) for result in self._results_of(made)] if made else []
                    elif isinstance(part, cst.Name) and home.is_bound(part):
                        found += [(home, assigned) for assigned in home.values_of(part)]
            places = [(home, value) for home, value in found if value not in seen]
            seen.update(value for _, value in places)

    def _results_of(self, made: Definition) -> Iterator[cst.BaseExpression]:
        for statement in made.source.statements:
            if (
                isinstance(statement, cst.Return)
                and made.source.owners[statement] is made.node
                and statement.value
            ):
                yield statement.value

    def is_data(self, source: ParsedModule, node: cst.CSTNode) -> bool:
        """True for a name, call or statement in a function that runs in a dataset, or in its decorators."""
        decorator = next((outer for outer in source.around(node) if isinstance(outer, cst.Decorator)), None)
        owner = source.owners[node] if decorator is None else source.parents[decorator]
        return owner in self.data

    def is_dataset(self, source: ParsedModule, node: cst.BaseExpression) -> bool:
        """True for an expression that is certainly a dataset, because it comes from a call of tf.data."""
        variable = source.variable(node)
        if variable not in self._datasets:
            self._find_dataset(source, node)
        return self._datasets[variable]

    def _find_dataset(self, source: ParsedModule, node: cst.BaseExpression) -> None:
        """Visits each variable and expression that the value may come from once: in `x = f(x)`, as many as lines."""
        before: dict[Hashable, Hashable | None] = {source.variable(node): None}
        waiting: list[Place] = [(source, node)]
        while waiting:
            home, value = waiting.pop()
            here = home.variable(value)
            if self._datasets.get(here) or self._makes_dataset(home, value):
                step: Hashable | None = here
                while step is not None:
                    self._datasets[step] = True
                    step = before[step]
                return
            for where, origin in self._origins_of_dataset(home, value):
                variable = where.variable(origin)
                if self._datasets.get(variable):
                    waiting = [(where, origin)]
                    before.setdefault(variable, here)
                    break
                if variable not in before and variable not in self._datasets:
                    before[variable] = here
                    waiting.append((where, origin))
        self._datasets.update(dict.fromkeys(before, False))

    def _makes_dataset(self, source: ParsedModule, node: cst.BaseExpression) -> bool:
        if not isinstance(node, cst.Call):
            return False
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        is_made = bool(_MAKES_DATASET.fullmatch(source.full_name(node.func) or ""))
        return method != "as_numpy_iterator" and (is_made or method in _DATASET_GIVERS)

    def _origins_of_dataset(self, source: ParsedModule, node: cst.BaseExpression) -> Iterator[Place]:
        """Yields the expressions of which one is a dataset if ``node`` is one and does not make it."""
        if isinstance(node, cst.Subscript):
            yield source, node.value
            return
        if isinstance(node, cst.Call):
            if isinstance(node.func, cst.Attribute):
                if node.func.attr.value == "as_numpy_iterator":
                    return
                yield source, node.func.value
        elif not self._is_variable(source, node):
            return
        origins = self._flow.origins(source, node)
        yield from ((home, value) for home, value in origins if not _is_looped(home, value))

    def _is_variable(self, source: ParsedModule, node: cst.BaseExpression) -> bool:
        """True for ``name`` and ``self.name`` of the program."""
        if not isinstance(node, cst.Name | cst.Attribute):
            return False
        is_bound = bool(parts_of(node)) and source.is_bound(parts_of(node)[0])
        return is_bound and (isinstance(node, cst.Name) or text_of(node).startswith("self."))

    def _may_be_dataset(self, source: ParsedModule, call: cst.Call) -> bool:
        """False for ``pool.map``, ``jax.lax.map`` and similar calls, whose origin is known and is not a dataset."""
        if not isinstance(call.func, cst.Attribute):
            return False
        node: cst.BaseExpression = call.func.value
        if self.is_dataset(source, node) or _MAKES_DATASET.fullmatch(source.full_name(call.func) or ""):
            return True
        if source.full_name(call.func):
            return False
        while True:
            if isinstance(node, cst.Call) and source.full_name(node.func):
                return False
            if isinstance(node, cst.Call):
                node = node.func
            elif isinstance(node, cst.Attribute | cst.Subscript):
                node = node.value
            else:
                break
        if isinstance(node, cst.Name) and source.is_bound(node):
            values = list(source.values_of(node))
            known = [isinstance(v, cst.Call) and source.full_name(v.func) for v in values]
            return not (values and all(known))
        return True

    def _mark_data(self, source: ParsedModule, given: list[cst.BaseExpression]) -> Iterator[Function]:
        for value in given:
            functions = list(self._functions(source, value))
            if functions:
                self._data_arguments.add(value)
            yield from functions

    def _compiled(self, source: ParsedModule, call: cst.Call) -> Iterator[Function]:
        """Yields the losses and metrics that are functions, in ``model.compile(optimizer, loss, metrics=[…])``."""
        for place, argument in enumerate(call.args):
            name = (
                argument.keyword.value
                if argument.keyword
                else ("optimizer", "loss", "metrics")[min(place, 2)]
            )
            if name in ("loss", "metrics", "weighted_metrics"):
                values = [argument.value]
                if isinstance(argument.value, cst.List | cst.Tuple | cst.Dict):
                    values = [element.value for element in argument.value.elements]
                for value in values:
                    if isinstance(value, cst.Name | cst.Attribute | cst.Lambda):
                        yield from self._functions(source, value)

    def _is_step(self, source: ParsedModule, decorator: cst.Decorator) -> bool:
        node = decorator.decorator
        function = node.func if isinstance(node, cst.Call) else node
        return (
            source.dotted(function) in STEP_DECORATORS or source.full_name(function) in _MIGRATED_DECORATORS
        )

    def _methods_of_keras(self, source: ParsedModule) -> Iterator[Function]:
        """Yields methods of layers, models, losses and metrics, except those that Keras calls outside of a step."""
        for class_ in source.classes:
            bases = [base for base in source.bases(class_) if base.startswith(STEP_BASES)]
            if not bases or all(base.startswith(_CALLBACKS) for base in bases):
                continue
            for statement in class_.body.body:
                if isinstance(statement, cst.FunctionDef) and statement.name.value not in _NOT_IN_STEP:
                    yield statement

    def _functions(
        self, source: ParsedModule, node: cst.BaseExpression, depth: int = 6
    ) -> Iterator[Function]:
        """Yields the functions that an expression stands for: a name, a lambda, a partial, or a function's result."""
        if depth == 0:
            return
        if isinstance(node, cst.Call):
            name = source.full_name(node.func)
            if name and (name.endswith(".partial") or source.dotted(node.func) in STEP_DECORATORS):
                yield from self._functions(source, node.args[0].value, depth - 1) if node.args else ()
                return
            made = source.definition(node.func)
            if made and not isinstance(made.node, cst.ClassDef):
                yield from self._returned(made, depth)
                return
        if isinstance(node, cst.Name) and source.is_bound(node):
            value = source.value_of(node)
            if isinstance(value, cst.Call):
                yield from self._functions(source, value, depth - 1)
                return
            yield from self._given(source, node, depth)
        if text_of(node).startswith("self."):  # `self.step = step` in `__init__(self, step)`
            for value in source.values(node):
                if isinstance(value, cst.Name):
                    yield from self._functions(source, value, depth - 1)
        if not isinstance(node, cst.Name | cst.Attribute | cst.Lambda | cst.Call):
            return
        for found in source.definitions(node):
            if not isinstance(found.node, cst.ClassDef):
                yield found.node
                continue
            for method in ("__call__", "call", "__init__"):
                member = found.source.member(found.node, method)
                if member and not isinstance(member.node, cst.ClassDef):
                    yield member.node

    def _find_callers(self) -> dict[cst.CSTNode, list[tuple[ParsedModule, Sequence[cst.Arg]]]]:
        """Returns the arguments of the calls of each function. Calls of a class count for its ``__init__``."""
        callers: dict[cst.CSTNode, list[tuple[ParsedModule, Sequence[cst.Arg]]]] = {}
        for source in self._program.sources:
            for call in source.calls:
                function, arguments = call.func, call.args
                if arguments and (source.full_name(function) or "").endswith(".partial"):
                    function, arguments = arguments[0].value, arguments[1:]
                found = source.definition(function)
                if found and isinstance(found.node, cst.ClassDef):
                    found = found.source.member(found.node, "__init__")
                if found:
                    callers.setdefault(found.node, []).append((source, arguments))
        return callers

    def _given(self, source: ParsedModule, name: cst.Name, depth: int) -> Iterator[Function]:
        """Yields the functions that calls pass for a parameter."""
        parameter = source.parameter_of(name)
        if parameter is None:
            return
        function, place = parameter
        is_method = isinstance(function, cst.FunctionDef) and source.class_around(function) is not None
        for caller, arguments in self._callers.get(function, ()):
            for number, argument in enumerate(arguments):
                keyword = argument.keyword.value if argument.keyword else None
                if keyword == name.value or (keyword is None and number + is_method == place):
                    yield from self._functions(caller, argument.value, depth - 1)

    def _returned(self, made: Definition, depth: int) -> Iterator[Function]:
        for statement in made.source.statements:
            if not isinstance(statement, cst.Return) or made.source.owners[statement] is not made.node:
                continue
            if isinstance(statement.value, cst.Name | cst.Lambda):
                yield from self._functions(made.source, statement.value, depth - 1)

    def _collect_edges(self, source: ParsedModule) -> None:
        """Connects a function to each function that it names, except those that it only passes to a dataset."""
        for chain in source.chains:
            owner = source.owners[chain]
            if owner is None or chain in self._data_arguments or source.dotted(chain):
                continue
            for found in source.definitions(chain):
                for target in self._entered(chain, found):
                    if target.node is not owner and not isinstance(target.node, cst.ClassDef):
                        self._edges.setdefault(owner, set()).add(target.node)
        for function in source.functions:
            owner = source.owners[function]
            if isinstance(function, cst.Lambda) and owner and function not in self._data_arguments:
                self._edges.setdefault(owner, set()).add(function)

    def _entered(self, chain: cst.BaseExpression, found: Definition) -> Iterator[Definition]:
        """Yields the functions that a name leads to: for a class its ``__init__``, for an object its ``__call__``."""
        if not isinstance(found.node, cst.ClassDef):
            yield found
            return
        is_class = text_of(chain).rpartition(".")[2] == found.node.name.value
        for method in ("__init__",) if is_class else ("__call__", "call"):
            member = found.source.member(found.node, method)
            if member:
                yield member

    # Values on the host that stay TensorFlow's.

    def stays(self, source: ParsedModule, node: cst.CSTNode) -> bool:
        """True for a name or call whose value stays TensorFlow's, and for what is in the arguments of such a call."""
        if self.is_data(source, node):
            return True
        if self.is_step(source, node):
            return False
        inner = node
        for outer in source.around(node):
            if isinstance(outer, cst.FunctionDef | cst.Lambda):
                return False
            call = outer if isinstance(outer, cst.Call) and outer.func is not inner else None
            if outer in self._kept and (call or outer in self._kept_for_arguments):
                return True
            is_moved = call is not None and is_below(source.dotted(call.func), *MOVED)
            if outer in self._of_data and outer not in self._of_steps:
                return not is_moved
            if is_moved:
                return False
            if call and self._asks_for_tensor(source, call):
                return True
            inner = outer
        return False

    def is_kept(self, call: cst.CSTNode) -> bool:
        """True for a call that stays TensorFlow's, including its arguments."""
        return call in self._kept

    def values_of(self, source: ParsedModule, node: cst.BaseExpression) -> Iterator[Place]:
        """Yields the expressions that a name or an attribute may be assigned, with their modules."""
        if parts_of(node) and source.is_bound(parts_of(node)[0]):
            yield from self._flow.origins(source, node)

    def results_of(self, source: ParsedModule, call: cst.Call) -> Iterator[Place]:
        """Yields the expressions that a function of the program returns to a call."""
        yield from self._flow.origins(source, call)

    def _is_kept(self, source: ParsedModule, call: cst.Call) -> bool:
        name = source.dotted(call.func)
        if name is None or is_below(name, *MOVED):
            return self.is_dataset(source, call) and name is None
        found = table.find(name)
        if is_below(name, "tf.config"):
            is_virtual = found is not None and found.rows[0].name == VIRTUAL_DEVICES
            return is_virtual and is_division_of_gpu(source, call)
        return (
            found is not None and found.rows[0].action(keras=True, step=self.is_step(source, call)) == "keep"
        )

    def _keeps(self, source: ParsedModule, call: cst.Call) -> bool:
        """True for a call of TensorFlow, on the host, with an argument that stays TensorFlow's."""
        name = source.dotted(call.func)
        if self.is_step(source, call) or call in self._of_steps:
            return False
        if name is None:  # `table.lookup(keys)`
            is_method = isinstance(call.func, cst.Attribute) and source.full_name(call.func) is None
            return is_method and bool(call.args) and self._is_tensor(source, call)
        if is_below(name, *MOVED, "tf.config", "tf.function", "tf.Variable", *SAVES):
            return False
        return any(self._is_tensor(source, argument.value) for argument in call.args)

    def _is_tensor(self, source: ParsedModule, node: cst.CSTNode, depth: int = 8) -> bool:
        """True for the result of a function that stays TensorFlow's, and for what the host computes from it."""
        if depth == 0 or isinstance(node, cst.Lambda):
            return False
        variable = source.variable(node)
        if variable not in self._tensors:
            self._tensors[variable] = False  # ends the recursion for `x = f(x)`
            self._tensors[variable] = self._gives_tensor(source, node, depth)
        return self._tensors[variable]

    def _gives_tensor(self, source: ParsedModule, node: cst.CSTNode, depth: int) -> bool:
        if isinstance(node, cst.Call):
            name, made = source.dotted(node.func), source.definition(node.func)
            if made is not None:
                return (
                    made.node in self.data
                    and made.node not in self.step
                    and not self.is_dataset(source, node)
                )
            if name is not None and not is_below(name, *MOVED):
                is_of_data = node in self._of_data and node not in self._of_steps
                return bool(_GIVES_TENSORS.fullmatch(name)) or is_of_data or self._keeps(source, node)
            method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
            if name is not None or not method or method in GIVES_NUMBERS or source.full_name(node.func):
                return False
            return self._is_tensor(source, node.func.value, depth - 1)  # type: ignore[union-attr]
        if isinstance(node, cst.Attribute) and node.attr.value in GIVES_NUMBERS:
            return False
        if isinstance(node, cst.Name | cst.Attribute) and parts_of(node):
            if not source.is_bound(parts_of(node)[0]):
                return False
            origins = self._flow.origins(source, node)
            return any(not self.is_dataset(s, v) and self._is_tensor(s, v, depth - 1) for s, v in origins)
        if isinstance(
            node, cst.BaseExpression | cst.Element | cst.BaseSlice | cst.SubscriptElement | cst.CompFor
        ):
            return any(self._is_tensor(source, child, depth - 1) for child in node.children)
        return False

    def _asks_for_tensor(self, source: ParsedModule, call: cst.Call) -> bool:
        """True for ``isinstance(value, type(tf.constant(0)))`` where the value goes to TensorFlow."""
        if text_of(call.func) != "isinstance" or not call.args:
            return False
        value = call.args[0].value
        if not parts_of(value) or not source.is_bound(parts_of(value)[0]):
            return False
        return any(v in self._of_data for _, v in self._flow.origins(source, value)) or self._is_tensor(
            source, value
        )

    def _read_by_data(self) -> Iterator[Place]:
        """Yields the arguments of calls that stay, and the names that functions of datasets read."""
        for source in self._program.sources:
            for call in source.calls:
                is_kept = call in self._kept and not is_below(source.dotted(call.func), "tf.config")
                if is_kept and not self.is_step(source, call):
                    yield from ((source, argument.value) for argument in call.args)
            for chain in source.chains:
                if source.owners[chain] in self.data:
                    yield from (
                        self._flow.origins(source, chain) if source.is_bound(parts_of(chain)[0]) else ()
                    )

    def _read_by_steps(self) -> Iterator[Place]:
        """Yields the values that steps read, without their arguments, of which ``run`` makes arrays."""
        for source in self._program.sources:
            for chain in source.chains:
                first = parts_of(chain)[0]
                if not source.is_bound(first) or not self.is_step(source, chain):
                    continue
                parameter = source.parameter_of(first)
                if parameter is None or parameter[0] not in self.step or first.value in ("self", "cls"):
                    yield from self._flow.origins(source, chain)

    def _closure(self, roots: set[Function]) -> frozenset[Function]:
        reached, waiting = set(roots), list(roots)
        while waiting:
            for target in self._edges.get(waiting.pop(), ()):
                if target not in reached:
                    reached.add(target)
                    waiting.append(target)
        return frozenset(reached)


def _is_looped(source: ParsedModule, value: cst.BaseExpression) -> bool:
    """True for the ``dataset`` of ``for x in dataset``, whose elements are no datasets."""
    around = source.parents[value]
    return isinstance(around, cst.For | cst.CompFor) and around.iter is value
