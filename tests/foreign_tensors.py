"""Stand-ins for tensors of other libraries."""

import jax.numpy as jnp
import numpy as np


class Shaped:
    """A shape, and a dtype that NumPy does not know."""

    def __init__(self, array):
        self._array = np.asarray(array)

    @property
    def shape(self):
        return list(self._array.shape)

    @property
    def dtype(self):
        return f"other.{self._array.dtype}"


class Tensor(Shaped):
    """Like tensors of TensorFlow and torch, also with a conversion."""

    def __array__(self, dtype=None, copy=None):
        return self._array


class OnlyDlpack(Shaped):
    """Like tensors of a library without NumPy support."""

    def __dlpack__(self, **options):
        return jnp.asarray(self._array).__dlpack__(**options)

    def __dlpack_device__(self):
        return jnp.asarray(self._array).__dlpack_device__()


class OutOfReach(OnlyDlpack):
    """Like tensors of a dtype that NumPy lacks, or on a GPU."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("not on this device.")


class Recorded(Tensor):
    """Like torch.nn.Parameter."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


def class_like(library, name):
    """A class of another library with everything that a tensor has."""
    return type(name, (Tensor,), {"__module__": f"{library}.of.theirs"})


class Wide(OnlyDlpack):
    """Keeps its 64 bits."""

    def __dlpack__(self, **options):
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


REFUSED = {
    "h5py.Dataset": (class_like("h5py", "Dataset"), "dataset[start:stop]"),
    "zarr.Array": (class_like("zarr", "Array"), "array[start:stop]"),
    "netCDF4.Variable": (class_like("netCDF4", "Variable"), "variable[start:stop]"),
    "tensorstore.TensorStore": (class_like("tensorstore", "TensorStore"), "store[start:stop].read()"),
    "pandas.DataFrame": (class_like("pandas", "DataFrame"), ".to_numpy()"),
    "pandas.Series": (class_like("pandas", "Series"), ".to_numpy()"),
}
