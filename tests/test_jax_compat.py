"""replicax's changes to JAX."""

import ast
import errno
import pathlib
import threading

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax._src import compilation_cache, distributed

import replicax as rx
from checks import in_a_process_of_its_own, message
from replicax._src.devices.program_files import ProgramFiles
from replicax._src.jax_internals import jax_compat, jax_compat_names


@pytest.fixture
def programs(tmp_path):
    """The folder of JAX's persistent cache, which takes programs that compile quickly too."""
    jax.devices()  # before a test says that there are several processes
    options = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("number", [0, 1])
def test_each_process_keeps_what_it_compiles_for_cpus(number, programs, monkeypatch):
    monkeypatch.setattr(distributed.global_state, "process_id", number)
    monkeypatch.setattr(distributed.global_state, "client", object())
    jax_compat.keep_programs(ProgramFiles)
    jax.jit(lambda x: x * 3 + number)(1.0)
    assert len(list(programs.glob("*-cache"))) == 1
    with jax_compat.not_in_persistent_cache():
        jax.jit(lambda x: x * 5 + number)(1.0)
    assert len(list(programs.glob("*-cache"))) == 1


def test_a_program_that_cannot_be_kept_runs_all_the_same(programs, monkeypatch, caplog):
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    monkeypatch.setattr(distributed.global_state, "client", object())
    jax_compat.keep_programs(ProgramFiles)
    jax.jit(lambda x: x * 7)(1.0)
    monkeypatch.setattr(pathlib.Path, "write_bytes", _disk_is_full)
    with caplog.at_level("WARNING", "replicax"):
        assert float(jax.jit(lambda x: x * 9)(1.0)) == 9
    assert "No space left" in caplog.text


def _disk_is_full(path, data):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_copies_share_no_buffer(is_replicated, size):
    """Programs donate the copies; a holder of the array must not see it change."""
    value = jnp.arange(size, dtype=jnp.float32)
    if is_replicated:
        mesh = jax.sharding.Mesh(jax.devices()[:2], ("replica",))
        value = jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    copy = jax_compat.copied(value)
    assert copy.sharding == value.sharding
    pointers = [{s.data.unsafe_buffer_pointer() for s in array.addressable_shards} for array in (copy, value)]
    assert pointers[0].isdisjoint(pointers[1])
    assert copy.tolist() == value.tolist()


def test_a_copy_of_a_numpy_array_shares_no_memory():
    value = np.ones((512, 512), np.float32)
    copy = jax_compat.copied(value)
    value[:] = 2
    assert copy[0, 0] == 1


def test_another_thread_takes_the_options_that_are_set_for_this_one():
    def run(options):
        def look():
            with jax_compat.with_thread_options(options):
                found.append(
                    (jax.config.jax_enable_x64, jax.config.jax_default_device, jnp.asarray(2.5).dtype)
                )

        found = []
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return found[0]

    device = jax.devices()[1]
    with jax.enable_x64(True), jax.default_device(device):
        options = jax_compat.thread_options()
        assert run(options) == (True, device, jnp.float64)
    assert run(options) == (True, device, jnp.float64)
    assert run(jax_compat.thread_options()) == (False, None, jnp.float32)


def test_whether_what_is_computed_ends_up_in_a_jaxpr():
    found = []

    def look(x):
        found.append((jax_compat.is_staging(), jax_compat.is_evaluating()))
        return x

    look(1.0)
    jax.jit(look)(1.0)
    jax.jit(jax.grad(look))(1.0)
    jax.vmap(look)(jnp.ones(2))
    with jax.ensure_compile_time_eval():
        look(1.0)

    assert found == [(False, True), (True, False), (True, False), (False, False), (False, True)]


@pytest.mark.parametrize("transformed", [jax.jit, jax.checkpoint, jax.custom_jvp])
def test_inner_functions_are_traced_again_when_jax_shall_forget_them(transformed):
    found = []

    def inner(x):
        found.append(x)
        return x * 2

    inner_of_jax = transformed(inner)
    if transformed is jax.custom_jvp:
        inner_of_jax.defjvp(lambda primals, tangents: (inner_of_jax(*primals), tangents[0]))
    remembered = transformed is not jax.custom_jvp

    def outer(x):
        x = inner_of_jax(inner_of_jax(x))
        assert len(found) == (1 if remembered else 2)
        with jax_compat.forgetting_inner_traces():
            x = inner_of_jax(x)
        with jax_compat.forgetting_inner_traces():
            return inner_of_jax(x)

    jax.make_jaxpr(outer)(1.0)
    assert len(found) == (3 if remembered else 4)


# What jax_compat.py does without: an older JAX's, names that it looks for, and those of one function, imported there.
NOT_NEEDED = {"jax.core.eval_jaxpr", "jax.__file__", "jax.__version__"}
IN_FUNCTIONS = (
    "jax._src.compilation_cache",
    "jax._src.compiler",
    "jax.experimental.topologies",
)


def used_names():
    """The dotted names of JAX in jax_compat.py."""
    tree = ast.parse(pathlib.Path(jax_compat.__file__).read_text())
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.partition(".")[0]
                imported[name.asname or top] = name.name if name.asname else top
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax"):
            imported |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}

    def dotted(node):
        if isinstance(node, ast.Name):
            found = imported.get(node.id, "")
            return found if found.startswith("jax") else None
        before = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return before and f"{before}.{node.attr}"

    found = {name for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (name := dotted(node))}
    found |= {name for name in imported.values() if name.startswith("jax")}
    return {name for name in found if name not in NOT_NEEDED and not name.startswith(IN_FUNCTIONS)}


def test_each_name_that_is_used_is_checked():
    checked = {f"{module}.{name}" for module, names in jax_compat_names.NAMES.items() for name in names}
    checked |= set(jax_compat_names.NAMES)
    used = used_names()
    begun = {name.rsplit(".", n)[0] for name in used | checked for n in range(1, name.count(".") + 1)}
    assert used - checked - begun == set(), "add them to NAMES in jax_compat_names.py"
    assert checked - used - begun == set(), "jax_compat.py does not use them"


def test_names_that_are_missing_are_named_with_the_versions(monkeypatch):
    jax_compat_names.check_names()
    monkeypatch.delattr(jax._src.core, "top_axis_env")
    monkeypatch.delattr(jax.sharding, "use_abstract_mesh")
    message(
        rx.errors.JaxVersionError,
        jax_compat_names.check_names,
        f"replicax {rx.__version__} does not work with jax {jax.__version__} and jaxlib {jaxlib.__version__}: it uses ",
        "jax.sharding.use_abstract_mesh, jax._src.core.top_axis_env, which this JAX does not have",
        "a newer replicax",
    )


@pytest.mark.rest
def test_they_are_checked_before_something_else_fails():
    program = """
    import sys
    import jax
    del jax._src.core.top_axis_env
    sys.modules["jax._src.tree_util"] = None
    import replicax as rx
    try:
        rx.MirroredStrategy
    except ImportError as error:
        print(type(error).__name__, error)
    """
    printed = in_a_process_of_its_own(program, "-W", "error")
    assert printed.startswith("JaxVersionError ")
    assert "it uses jax._src.core.top_axis_env, " in printed
    assert " jax._src.tree_util, " in printed


def counted_operation(binds):
    """A function of one array whose operation notes each time that JAX binds it."""
    operation = jax.extend.core.Primitive("counted")
    operation.def_abstract_eval(lambda aval: aval.update(weak_type=False))
    bind = operation.bind
    operation.bind = lambda *args, **params: binds.append(args) or bind(*args, **params)
    return operation.bind


@pytest.mark.skipif(not jax_compat._adds_equations(), reason="this JAX binds equations again")
def test_a_trace_takes_equations_without_binding_them():
    binds = []
    counted = counted_operation(binds)
    vector, shorter = jax.ShapeDtypeStruct((3,), np.float32), jax.ShapeDtypeStruct((2,), np.float32)
    jaxpr, _ = jax_compat.trace(lambda x: [counted(x * x + 2.0)], [vector])
    binds.clear()
    copied, _ = jax_compat.trace(lambda x: jax_compat.eval_jaxpr(jaxpr, [x]), [vector])
    assert not binds
    assert str(copied) == str(jaxpr)
    lines = [[jax_compat.equation_line(eqn) for eqn in one.eqns] for one in (copied, jaxpr)]
    assert lines[0] == lines[1]
    again, _ = jax_compat.trace(lambda x: jax_compat.eval_jaxpr(jaxpr, [x]), [shorter])
    assert len(binds) == 1, "JAX derives the shapes of other operands"
    assert again.outvars[0].aval.shape == (2,)


@pytest.mark.parametrize("operand", [np.float32(0.25), jnp.float32(0.25)])
def test_a_trace_takes_equations_of_known_values(operand):
    jaxpr, _ = jax_compat.trace(lambda x, y: [x * y + 1], [jax.ShapeDtypeStruct((), np.float32)] * 2)
    staged = jax.jit(lambda y: jax_compat.eval_jaxpr(jaxpr, [operand, y]))
    np.testing.assert_allclose(staged(8.0), [3.0])
    gradient = jax.jit(jax.grad(lambda y: jax_compat.eval_jaxpr(jaxpr, [operand, y])[0]))
    np.testing.assert_allclose(gradient(8.0), 0.25)


def test_a_trace_takes_equations_with_effects(capfd):
    def printed(x):
        jax.debug.print("it is {}", x, ordered=True)
        return [x + 1]

    jaxpr, _ = jax_compat.trace(printed, [jax.ShapeDtypeStruct((), np.float32)])
    np.testing.assert_allclose(jax.jit(lambda x: jax_compat.eval_jaxpr(jaxpr, [x]))(1.0), [2.0])
    jax.effects_barrier()
    assert capfd.readouterr().out == "it is 1.0\n"
