"""Walks through the code, measured while small programs run: the way of an argument of ``fit``, the opening of a dataset.

The profiler of Python notes each call of a function of replicax. Two things keep the numbers honest:

- A function *gets* the data if the array ``x``, or any object made of it, can be reached from one of its arguments or
  from its closure: in a dict, a tuple, a class of any kind, a partial or a bound method, ``MOST_STEPS`` references deep.
  A copy counts, because the values of ``x`` occur nowhere else. Objects that are older than the call (the model, the
  strategy) are looked at one level deep, so that data hidden in an attribute of the model is found as well.
- Three programs are walked, and a folder counts that any of them enters: a NumPy array and ``fit`` of Keras's own step,
  a dataset of ``rx.data``, and a ``train_step`` in TensorFlow's style, which ``strategy.run`` runs. A walk ends where the
  step of the model is traced.
- A *room* is a folder of ``_src`` whose functions get the data, or a file beside the folders; a part is one room. A
  *climb* is a call that gets the data, from a room to a higher one: higher by the rows of ``tests/test_layering.py``,
  or because the file that is called imports the file of the nearest caller in replicax, so that moving rows changes
  nothing. Each pair of functions counts once, so that the number of batches does not matter.

A review counted 18 rooms and 7 climbs by hand, for one name: the dict of the arguments in ``keras/models.py``. The
profiler counts fewer, for two reasons. The review read all branches of the code, also those of parameter servers and of
messages about TensorFlow, which these programs do not take; and it took functions for rooms that are only asked about
the strategy and see no data. The profiler counts more in one way: it follows the objects that are made of ``x``, on all
threads, past the end of the dict. Of the opening of a dataset the review counted five entries: those by return too, and
two that only datasets of files in several processes make.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, final

from house.source import AT_RUN_TIME, House

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "src" / "replicax"
# The function that says what every kind of dataset is, so that it can be opened: the file that defines it is the one whose
# entries are counted. An adapter that calls back into it is an entry too.
OPENER: Final = "describe"
# Every public call goes through this file, which only shortens the traces of errors: a call from it is no climb.
BOUNDARY: Final = "_src/user/tracebacks.py"
MOST_STEPS: Final = 20
MOST_OBJECTS: Final = 50_000
LIMIT_S: Final = 240
FIT: Final = "calls of fit"
NUM_ROWS: Final = 8


def layers(path: Path = ROOT / "tests" / "test_layering.py") -> dict[str, int]:
    """The number of the layer of each folder, and of each file beside the folders, from the layer test."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            rows = ast.literal_eval(node.value)
            return {name: number for number, names in enumerate(rows) for name in names.split()}
    raise SystemExit(
        f"seams: {path} has no table LAYERS, in which the rows of folders are from the floor up."
    )


def room_of(file: str) -> str:
    """``keras`` for ``_src/keras/models.py``, ``hooks`` for ``_src/hooks.py``, ``_ps`` for any file of that part."""
    parts = Path(file).with_suffix("").parts
    if parts[0] != "_src":
        return parts[0] if parts[0].startswith("_") else "public"
    return parts[1]


@final
@dataclass(frozen=True)
class Call:
    """A call of a function of replicax that got the data: its place, and the nearest caller's in replicax."""

    caller: str  # a file relative to the package; "" for the user's program
    caller_function: str
    file: str
    function: str


@final
@dataclass
class Walk:
    """The calls that were noted, without repetitions, in their order."""

    calls: dict[Call, None] = field(default_factory=dict)

    @property
    def rooms(self) -> list[str]:
        return list(dict.fromkeys(room_of(call.file) for call in self.calls))

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(call.file for call in self.calls))

    def climbs(self, layer_of: Mapping[str, int], below: Mapping[str, set[str]]) -> list[Call]:
        """The calls that go up.

        Args:
          layer_of: The number of each room's layer. Parts and public modules are above all layers.
          below: The files that each file imports, directly or not.
        """

        def height(file: str) -> int:
            return layer_of.get(room_of(file), len(layer_of))

        return [
            call
            for call in self.calls
            if call.caller not in ("", BOUNDARY) and room_of(call.file) != room_of(call.caller)
            if height(call.file) > height(call.caller) or call.caller in below.get(call.file, ())
        ]

    def entries(self, function: str) -> list[Call]:
        """The calls that enter the file that defines a function, from another file."""
        files = {call.file for call in self.calls if call.function == function}
        if len(files) != 1:
            raise SystemExit(
                f"seams: no function {function}() opened the dataset, or two did. If it has another name now, say so in "
                "OPENER of tools/house/walks.py."
            )
        return [call for call in self.calls if call.file in files and call.caller not in files]


@final
class Recorder:
    """Notes the calls of functions of replicax, in this thread and in those that start meanwhile.

    Args:
      gets: True for the arguments of calls to note; called with the values of a frame.
    """

    def __init__(self, gets: Callable[[dict[str, Any]], bool]):
        self.walk = Walk()
        self._gets = gets
        self._files: dict[CodeType, str | None] = {}
        self._is_on = False
        self._lock = threading.Lock()

    def __enter__(self) -> Recorder:
        self._is_on = True
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._is_on = False
        sys.setprofile(None)
        threading.setprofile(None)

    def _file_of(self, code: CodeType) -> str | None:
        if code not in self._files:
            path = Path(code.co_filename)
            is_ours = path.is_relative_to(PACKAGE)
            self._files[code] = path.relative_to(PACKAGE).as_posix() if is_ours else None
        return self._files[code]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if not self._is_on or event != "call":
            return
        file = self._file_of(frame.f_code)
        if file is None or frame.f_code.co_name in (
            "<module>",
            "<genexpr>",
            "<listcomp>",
            "<dictcomp>",
            "<setcomp>",
        ):
            return
        with self._lock:
            if not self._gets(frame.f_locals):
                return
            above, caller = frame.f_back, None
            while above is not None and (caller := self._file_of(above.f_code)) is None:
                above = above.f_back
            place = ("", "") if above is None else (caller or "", above.f_code.co_qualname)
            call = Call(*place, file, frame.f_code.co_qualname)
            self.walk.calls.setdefault(call)


@final
class Reach:
    """Finds out if values reach the data: an array that has the values of ``x``.

    Args:
      is_data: True for such an array.
      given: The user's own objects. These are followed although they are older than the call.
    """

    def __init__(self, is_data: Callable[[object], bool], given: tuple[object, ...] = ()):
        self._is_data = is_data
        self._given = set(map(id, given))
        gc.collect()
        everything = gc.get_objects()
        self._old = {id(each) for each in everything} - self._given
        self._kept = everything  # or another object could get the same id

    def __call__(self, values: dict[str, Any]) -> bool:
        seen: set[int] = set()
        # The arguments, with what old objects among them have gained.
        level = [value for value in values.values() if not is_opaque(value)]
        for each in [value for value in level if id(value) in self._old]:
            level += [new for new in parts_of(each) if id(new) not in self._old and not is_opaque(new)]
        for _ in range(MOST_STEPS):
            below: list[Any] = []
            for value in level:
                if self._is_data(value):
                    return True
                if id(value) in seen or id(value) in self._old or is_opaque(value):
                    continue
                seen.add(id(value))
                below += gc.get_referents(value)
            if not below or len(seen) > MOST_OBJECTS:
                return False
            level = below
        return False


def is_opaque(value: object) -> bool:
    """True for what holds no data, or more than its owner meant to pass."""
    opaque = (type, ModuleType, CodeType, FrameType, str, bytes, int, float, bool, type(None))
    return isinstance(value, opaque)


def parts_of(value: object) -> Iterator[object]:
    """What an object holds itself, and in its attributes."""
    for each in gc.get_referents(value):
        yield each
        if isinstance(each, dict):
            yield from each.values()


def printed_alone(function: str) -> Any:
    """Returns what a function of this module returns in a process of its own, in which nothing has been imported."""
    environment = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "REPLICAX_PROGRESS": "0"}
    program = f"import json; from house import walks; print(json.dumps(walks.{function}()))"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if run.returncode:
        raise SystemExit(f"seams: {function} of the walks failed with {run.returncode}:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def measured(house: House) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Runs the programs in processes of their own. Returns the rows that they measure, each with what was counted."""
    found = printed_alone("walk")
    found["import hooks"] = printed_alone("import_hooks")
    fits = Walk({Call(*call): None for call in found.pop(FIT)})
    climbs = [
        f"{call.caller} {call.caller_function} -> {call.file} {call.function}"
        for call in fits.climbs(layers(), files_below(house))
    ]
    return {
        "folders that a fit argument passes through": (len(fits.rooms), tuple(fits.rooms)),
        "files that a fit argument passes through": (len(fits.files), tuple(fits.files)),
        "times that a fit argument is handed up a layer": (len(climbs), tuple(climbs)),
        **{name: (len(members), tuple(members)) for name, members in found.items()},
    }


def files_below(house: House) -> dict[str, set[str]]:
    """The files that each file imports when a program runs, directly or not, by their paths in the package."""
    graph = {
        module: {edge.target for edge in edges if edge.kind in AT_RUN_TIME}
        for module, edges in house.edges.items()
    }
    paths = {module: house.place_of(module).removeprefix(f"{house.package}/") for module in graph}
    found = {}
    for module in graph:
        reached: set[str] = set()
        nodes = list(graph[module])
        while nodes:
            node = nodes.pop()
            if node not in reached:
                reached.add(node)
                nodes += graph.get(node, ())
        found[paths[module]] = {paths[each] for each in reached}
    return found


def walk() -> dict[str, list[Any]]:
    """Runs the programs in this process, in which nothing else has been imported."""
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    import keras
    import numpy as np

    from house.foreign import attributes_of, filled_hooks, patched_attributes

    before = attributes_of(keras)
    import replicax as rx

    strategy = rx.MirroredStrategy()
    hot, cold = files_of_runs(strategy)
    import flax.nnx  # noqa: F401
    import optax  # noqa: F401

    x = (0.7109375 + np.arange(NUM_ROWS * 2).reshape(NUM_ROWS, 2) / 4096).astype(
        "float32"
    )  # exact, and nowhere else
    data = rx.data.from_arrays((x, np.zeros((NUM_ROWS, 1), "float32"))).batch(NUM_ROWS)
    opening = opening_of(strategy, data).entries(OPENER)
    fits = Walk()
    for case in fit_cases(strategy, x, data):
        fits.calls |= case.calls
    return {
        FIT: [dataclasses.astuple(call) for call in fits.calls],
        "times that opening a dataset enters the file that opens it": [
            f"{call.caller} {call.caller_function} -> {call.function}" for call in opening
        ],
        "files entered by a hot run": hot,
        "files entered by a cold run": cold,
        "attributes of Keras that are patched": sorted(patched_attributes(before, attributes_of(keras))),
        "containers of hooks that are filled at import": sorted(filled_hooks()),
    }


def import_hooks() -> list[str]:
    """The finders of replicax in Python's import machinery, before Keras is imported and after it."""
    import replicax  # noqa: F401

    found = set(_finders_of_replicax())
    import keras  # noqa: F401

    return sorted(found.union(_finders_of_replicax()))


def _finders_of_replicax() -> Iterator[str]:
    for finder in (*sys.meta_path, *sys.path_hooks):
        if finder.__module__.partition(".")[0] == "replicax":
            yield f"{finder.__module__}.{getattr(finder, '__qualname__', type(finder).__qualname__)}"


def files_of_runs(strategy: Any) -> tuple[list[str], list[str]]:
    """The files that a ``run`` enters whose program is in the cache, and one that traces it."""
    import jax
    import keras

    import replicax as rx

    with strategy.scope():
        variable = rx.Variable(1.0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)  # type: ignore[arg-type]

    def step(x: Any) -> Any:
        variable.assign_add(x)
        return variable + x

    value = strategy.replicate(jax.numpy.float32(1.0))
    files = []
    for _ in ("cold", "hot"):
        with Recorder(lambda _: True) as recorder:
            strategy.run(step, (value,))
        files.append(recorder.walk.files)
    return files[1], files[0]


def opening_of(strategy: Any, data: Any) -> Walk:
    """The calls that open one dataset and take its first batch."""
    with Recorder(lambda _: True) as recorder:
        next(iter(strategy.experimental_distribute_dataset(data)))
    return recorder.walk


def fit_cases(strategy: Any, x: Any, data: Any) -> Iterator[Walk]:
    """The walks of ``x`` from three calls of ``fit`` to the step."""
    import jax
    import keras
    import numpy as np
    from jax.core import Tracer

    import replicax as rx

    marks = frozenset(map(float, x.ravel()))

    def is_x(value: object) -> bool:
        if isinstance(value, jax.Array):
            if isinstance(value, Tracer) or value.is_deleted() or not value.is_fully_addressable:
                return False
            value = np.asarray(value) if value.dtype == x.dtype else None
        return (
            isinstance(value, np.ndarray)
            and value.dtype.kind == "f"
            and value.size > 0
            and float(value.flat[0]) in marks
        )

    recorders: list[Recorder] = []

    class EndOfWalk(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame.f_code.co_name != "train_step":
                frame = frame.f_back
            if frame is not None and recorders:
                recorders[-1].stop()
            return inputs

    class InTensorFlowsStyle(keras.Model):
        def train_step(self, batch: Any) -> Any:
            inputs, targets = batch
            with rx.GradientTape() as tape:
                loss = self.compute_loss(y=targets, y_pred=self(inputs, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    targets = np.zeros((len(x), 1), "float32")
    for kind, arguments in (
        (keras.Model, {"x": x, "y": targets, "batch_size": len(x)}),
        (keras.Model, {"x": data}),
        (InTensorFlowsStyle, {"x": x, "y": targets, "batch_size": len(x)}),
    ):
        with strategy.scope():
            inputs = keras.Input((2,))
            model = kind(inputs, keras.layers.Dense(1)(EndOfWalk()(inputs)))
            model.compile(keras.optimizers.SGD(), "mse")
        recorders.append(Recorder(Reach(is_x, (x, data))))
        with recorders[-1]:
            model.fit(**arguments, epochs=1, verbose=0)  # type: ignore[arg-type]
        yield recorders[-1].walk
        recorders.clear()
