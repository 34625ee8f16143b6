"""Python imports this first in the processes that tests start: there Keras does not find scikit-learn and matplotlib.

It imports both, whole, if they are installed (keras 3.15: for its scikit-learn wrappers, and plots of pictures), which is half
of the time that Keras takes to import, in every one of some hundred processes. What imports them by itself finds them.
"""

import importlib.abc
import sys

_LEFT_OUT = ("sklearn", "matplotlib")


class _NotForKeras(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname in _LEFT_OUT and _importer().startswith("keras."):
            raise ImportError(f"Keras does without {fullname} in tests.")
        return None


def _importer():
    """The module with the import statement."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""


sys.meta_path.insert(0, _NotForKeras())
