"""A stand-in for TensorFlow, for code of TensorFlow that is left in a program. ``tests/peers`` has the real one."""

import importlib.machinery
import inspect
import sysconfig
import types

SOURCE = """
import numpy as np

class Variable:
    dtype = shape = None
    _tf_api_names = ("Variable",)
    def __init__(self, value):
        self.value = np.asarray(value)
    def __array__(self, *args, **kwargs):
        return self.value
    def __rmul__(self, other):
        return np.asarray(other) * self.value
    def assign_add(self, value):
        self.value = np.asarray(self.value + value)

class ResourceVariable(Variable):
    pass

class Tensor:
    _tf_api_names = ("experimental.numpy.ndarray", "Tensor")
    dtype = np.dtype("float32")

class GradientTape:
    _tf_api_names = ("GradientTape", "autodiff.GradientTape")
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def gradient(self, target, sources):
        return target._id

class Function:
    def __init__(self, fn):
        self.python_function = self.__wrapped__ = fn
    def __call__(self, *args):
        return self.python_function(*map(traced, args))

def traced(value):
    return np.asarray(value) if hasattr(value, "__array__") else value

def function(fn):
    return Function(fn)

def reduce_mean(x, axis=None):
    return np.asarray(x).mean(axis)

def while_loop(cond, body, variables):
    return np.asarray(variables[0])

def constant(x):
    return Tensor()

def print(*values):
    pass

def unheard_of(x):
    return np.asarray(x)
"""


def stand_in():
    """A module ``tensorflow``, whose code seems to lie where TensorFlow's is."""
    path = f"{sysconfig.get_path('purelib')}/tensorflow/python/stand_in.py"
    names = {"__name__": "tensorflow.python.stand_in"}
    exec(compile(SOURCE, path, "exec"), names)
    module = types.ModuleType("tensorflow")
    # For JAX, which looks whether it is installed.
    module.__spec__ = importlib.machinery.ModuleSpec("tensorflow", None)
    vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})
    module.inside_function = lambda: False
    return module


def line_of(fn, text):
    """``file:line in function`` of the line of a function with a text."""
    lines, first = inspect.getsourcelines(fn)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getfile(fn)}:{first + number} in {fn.__name__}"
