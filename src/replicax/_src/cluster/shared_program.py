"""``SharedProgram``: a compiled function that several processes run together, after they agreed on it."""

from __future__ import annotations

from typing import Any, final

import jax

from replicax._src.cluster.peers import Peers


@final
class SharedProgram:
    """Wraps a ``jax.jit`` function for several processes. All processes must call their programs in the same order.

    Args:
      compiled: The jitted function.
      name: The name in messages.
      peers: The processes.
      has_one_form: True if all calls have arrays of the same shapes and dtypes.
      is_read: True if one process may call it alone by mistake, as one may read a variable. The processes then agree
        before each call, also on the name, so that it never meets another program. That costs one message and its
        answer.
    """

    def __init__(
        self, compiled: Any, name: str, peers: Peers, *, has_one_form: bool = False, is_read: bool = False
    ):
        self._compiled, self._name, self._peers = compiled, name, peers
        self._has_one_form, self._is_read = has_one_form, is_read
        self._labels: dict[Any, str] = {}

    def lower(self, *args: Any) -> Any:
        """Lowers like ``jax.jit(...).lower``."""
        return self._compiled.lower(*args)

    def __call__(self, *args: Any) -> Any:
        """Runs the function. On CPUs it also waits for the result, so that an error of the devices is raised here.

        Raises:
          ProgramMismatchError: The other processes are about to run a different program.
          ClusterFailureError: Another process is gone.
        """
        # (The forms of thirty arrays take 20 µs.)
        form = None if self._has_one_form else tuple(map(_form, jax.tree_util.tree_leaves(args)))
        label = self._labels.get(form)
        is_new = label is None
        if label is None:
            # The text is the same in all processes: a Python callback appears as its number in the program.
            text = self._compiled.lower(*args).as_text()
            text = f"{self._name}\n{text}" if self._is_read else text
            label = self._labels[form] = self._peers.agree(self._name, text)
        with self._peers.running(label, is_new=is_new, agrees=self._is_read):
            results = self._compiled(*args)
            if self._peers.waits:
                _wait_for(results)
            return results


def _wait_for(results: Any) -> None:
    """Waits for one result: all results of a program become available together."""
    for leaf in jax.tree_util.tree_leaves(results):
        if isinstance(leaf, jax.Array):
            leaf.block_until_ready()
            return


def _form(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else type(leaf)
