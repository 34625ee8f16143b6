"""The API as pages list it, and links to it.

- ``{api} module`` is a directive: for each name below it, a line in a table and the entry from its docstring. A name that is
  another name of something gets a line that says so.
- A type that a signature names by where it is defined (``replicax._src…``, or in a part) leads to its public name.
- A name in code font that begins with ``rx.`` leads to its entry. One that does not exist is a warning.
"""

import enum
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import replicax

log = logging.getLogger(__name__)

# Members that the rest of replicax uses and users do not; of the named strategies those of Strategy.
INTERNAL = {
    "CheckpointCallback": "in_fit on_train_begin on_epoch_begin on_train_batch_end on_epoch_end on_train_end",
    "Checkpoint": "awaits parts snapshot path_in_use release restore_saved",
    "CrossDeviceOps": "sum_in_replica",
    "DistributedDataset": "source placer start reader_of",
    "DistributedIterator": "dataset take_stacked",
    "GradientTape": "record_read",
    "Mirrored": "array as_array stored donate is_shared",
    "PerReplica": "array as_array stored donate description component_shape maker",
    "ParameterServerStrategy": "run_here run_replica_here run_as_one",
    "ReplicaContext": "communicator",
    "RemoteValue": "array pytree_of settle",
    "Strategy": "view_on shards_on parts topology variable_placement bindings runner steps_runner user_ops reduce_in_replica "
    "joins_trace mirrored is_default partitions_by_spmd",
    "SummaryWriter": "keras_model",
    "Variable": "has_components",
    "Dataset": "is_batched open has is_mapped_in_batches batch_size seeds has_hint with_hint fingerprint first",
    "FileDataset": "shard_files",
    "LayoutMap": "of pattern_of entries",
    "ShardedVariable": "shards",
    "TensorBoard": "close_after",
    # Fields of a named tuple, which its docstring tells.
    "TPUSystemMetadata": "num_cores num_hosts num_of_cores_per_host topology devices",
}

# rx.a.b, also with the arguments of a call behind it or as a decorator.
WRITTEN = re.compile(r"@?(?:rx|replicax)((?:\.[A-Za-z]\w*)+)(?:\(.*\))?", re.DOTALL)
HIDDEN_COLON = "\ue000"
# Where something has several names, the first module here has the entry.
PREFERRED = ("replicax", "replicax.errors", "replicax.coordinator")


def public_modules() -> dict[str, Any]:
    """The modules that users import, by name; those that others have names of come last."""
    names = [m.name for m in pkgutil.walk_packages(replicax.__path__, "replicax.") if "._" not in m.name]
    ordered = [*PREFERRED, *sorted({*names} - {*PREFERRED})]
    return {name: importlib.import_module(name) for name in ordered}


def public_names() -> dict[str, Any]:
    """Each public name, such as ``replicax.errors.DeviceError``, and what it is. Modules are left out."""
    modules = public_modules()
    named = {
        f"{name}.{last}": getattr(module, last)
        for name, module in modules.items()
        for last in getattr(module, "__all__", ())
    }
    return {name: value for name, value in named.items() if not inspect.ismodule(value)}


def entry_of(name: str) -> str:
    """The name under which something has its entry: of several names the first one."""
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    if not callable(value):
        return name
    same = [other for other, it in public_names().items() if it is value]
    alike = [other for other in same if other.rpartition(".")[2] == getattr(value, "__name__", last)]
    return (alike or same or [name])[0]


class Api(SphinxDirective):
    """``{api} module``, and a name of the module in each line."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        names = [line.strip() for line in self.content if line.strip()]
        lines = list(self._lines(module, names))
        fence = StringList(["```{eval-rst}", *lines, "```"], source=self.get_source_info()[0])
        container = nodes.container()
        self.state.nested_parse(fence, self.content_offset, container)
        return container.children

    def _lines(self, module: str, names: list[str]) -> Iterator[str]:
        full = {name: f"{module}.{name}" for name in names}
        entries = [name for name in names if entry_of(full[name]) == full[name]]
        yield f".. currentmodule:: {module}"
        yield ""
        if len(entries) > 1:
            yield from [".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in entries), ""]
        for name in names:
            if name in entries:
                value = getattr(importlib.import_module(module), name)
                yield from [f".. {_directive(value)}:: {name}", *_options(value), ""]
            else:
                target = entry_of(full[name])
                yield from [f".. py:data:: {name}", "", f"   Another name of :py:obj:`{target}`.", ""]


def _directive(value: Any) -> str:
    if isinstance(value, type):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if callable(value) else "autodata"


def _options(value: Any) -> list[str]:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return ["   :undoc-members:"]
    if value is replicax.Strategy:  # most of its methods are in classes that it consists of
        return [*_hiding(value), "   :inherited-members:", "   :no-show-inheritance:"]
    return _hiding(value)


def _hiding(value: Any) -> list[str]:
    hidden = INTERNAL.get(getattr(value, "__name__", ""), "").split()
    hidden += getattr(value, "_fields", ())  # the docstring of a named tuple explains them
    return [f"   :exclude-members: {', '.join(hidden)}"] if hidden else []


def link_defined(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Node) -> Any:
    """A reference to ``replicax._src.values.distributed.PerReplica.values``, as one to ``replicax.PerReplica.values``."""
    if node.get("refdomain") != "py":
        return None
    target, rest = node["reftarget"], ""
    while target:
        if target in env.replicax_paths:
            name, domain = f"{env.replicax_paths[target]}{rest}", env.get_domain("py")
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)
        target, _, last = target.rpartition(".")
        rest = f".{last}{rest}"
    return None


class LinkWritten(SphinxPostTransform):
    """Makes ``rx.name`` in code font a link to its entry in the API."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        domain = self.env.get_domain("py")
        for literal in list(self.document.findall(nodes.literal)):
            match = WRITTEN.fullmatch(literal.astext())
            if match is None or _is_linked(literal):
                continue
            name = f"replicax{match[1]}"
            if name in domain.objects:
                node = addnodes.pending_xref("", refspecific=False)
                link = domain.resolve_xref(
                    self.env, self.env.docname, self.app.builder, "obj", name, node, literal.deepcopy()
                )
                literal.replace_self(link)
            elif not _exists(name):
                log.warning("there is no %s", name, location=literal, type="replicax", subtype="name")


def _is_linked(literal: nodes.Node) -> bool:
    above = literal.parent
    while above is not None:
        if isinstance(above, nodes.reference | nodes.title | addnodes.desc_signature):
            return True
        above = above.parent
    return False


def _exists(name: str) -> bool:
    value: Any = replicax
    for part in name.split(".")[1:]:
        try:
            value = getattr(value, part)
        except AttributeError:
            return False
    return True


def hide_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in an attribute's first line for its type; ours are sentences."""
    if what in ("attribute", "data", "property"):
        lines[:] = [line.replace(":", HIDDEN_COLON) for line in lines]


def show_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


def _prepare(app: Sphinx) -> None:
    paths: dict[str, str] = {}
    for name, value in public_names().items():
        if callable(value):
            defined = f"{value.__module__}.{getattr(value, '__qualname__', '')}"
            paths.setdefault(defined, entry_of(name))
    app.env.replicax_paths = {defined: name for defined, name in paths.items() if defined != name}


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("api", Api)
    app.connect("builder-inited", _prepare)
    app.connect("autodoc-process-docstring", hide_colons, priority=100)  # before napoleon, and behind it
    app.connect("autodoc-process-docstring", show_colons, priority=900)
    app.connect("missing-reference", link_defined)
    app.add_post_transform(LinkWritten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
