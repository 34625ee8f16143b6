"""Python imports this first in the processes that tests start, about a hundred: there JAX and Keras are imported in
half the time.

Keras imports scikit-learn, matplotlib and requests completely if they are installed (keras 3.15: for its scikit-learn
wrappers, plots of pictures, and a callback); here it does not find them. Keras imports attention for TPUs, and JAX's
sparse arrays import SciPy's: these modules run when a name of them is used. JAX reads the metadata of each installed
package to find plugins for ROCm (jax 0.10); here it finds none. The garbage collector would visit all imported objects
repeatedly. JAX also makes an MLIR context for each program that it compiles, and loads its dialects, which takes a
sixth of the time: programs of a thread share one.
"""

import gc
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading

_LEFT_OUT = ("sklearn", "matplotlib", "requests")
_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"
_RUN_WHEN_USED = (
    "jax.experimental.pallas",
    _SPLASH,
    f"{_SPLASH}.splash_attention_kernel",
    f"{_SPLASH}.splash_attention_mask",
    "jax.experimental.sparse.linalg",
)
_LARGE = ("jax", "keras")
_LOOKS_FOR_ROCM = "jax._src.numpy.array_constructors"
_MAKES_CONTEXTS = "jax._src.interpreters.mlir"


def _when_used(run):
    """Runs a module when a name is requested that importing its submodules does not provide."""
    lock = threading.RLock()

    def exec_module(module):
        def run_and_get(name):
            submodule = f"{module.__name__}.{name}"
            if submodule in _RUN_WHEN_USED:
                return importlib.import_module(submodule)
            with lock:
                if vars(module).get("__getattr__") is run_and_get:
                    del module.__getattr__
                    run(module)
            return getattr(module, name)

        module.__getattr__ = run_and_get

    return exec_module


def _without_collector(run):
    def exec_module(module):
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            run(module)
        finally:
            gc.freeze()
            if was_enabled:
                gc.enable()

    return exec_module


def _without_distributions(run):
    def exec_module(module):
        import importlib.metadata  # which programs without JAX do not need

        distributions = importlib.metadata.distributions
        importlib.metadata.distributions = lambda: ()
        try:
            run(module)
        finally:
            importlib.metadata.distributions = distributions

    return exec_module


def _in_one_context(run):
    """A program made while another is made, by a function called during tracing, would be part of that one."""

    def exec_module(module):
        run(module)
        make = module.make_ir_context
        of_thread = threading.local()  # a context may be used by one thread at a time

        def shared():
            if module.ir.Context.current is not None:
                return make()
            if not hasattr(of_thread, "context"):
                of_thread.context = make()
            return of_thread.context

        module.make_ir_context = shared

    return exec_module


_HOW = {
    **dict.fromkeys(_RUN_WHEN_USED, _when_used),
    **dict.fromkeys(_LARGE, _without_collector),
    _LOOKS_FOR_ROCM: _without_distributions,
    _MAKES_CONTEXTS: _in_one_context,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname in _LEFT_OUT and _importer().startswith("keras."):
            raise ImportError(f"Keras does without {fullname} in tests.")
        if fullname not in _HOW:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _HOW[fullname](spec.loader.exec_module)
        return spec


def _importer():
    """The module with the import statement."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""


sys.meta_path.insert(0, _Finder())
