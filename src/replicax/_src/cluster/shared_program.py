"""A compiled function that several processes run together: agreed on before its first run, and guarded in each."""

from __future__ import annotations

from typing import Any, final

import jax

from replicax._src.cluster.peers import Peers


@final
class SharedProgram:
    """What ``jax.jit`` gave, for several processes. All must call it in the same order as each other's programs.

    Args:
      compiled: The function.
      name: For people.
      peers: The processes.
      has_one_form: It is always called with arrays of the same shapes and dtypes.
    """

    def __init__(self, compiled: Any, name: str, peers: Peers, *, has_one_form: bool = False):
        self._compiled, self._name, self._peers = compiled, name, peers
        self._has_one_form = has_one_form
        self._labels: dict[Any, str] = {}

    def lower(self, *args: Any) -> Any:
        """As ``jax.jit(...).lower``."""
        return self._compiled.lower(*args)

    def __call__(self, *args: Any) -> Any:
        """Runs it, and waits for the result where the devices are CPUs: an error of them has to be met here.

        Raises:
          ProgramMismatchError: The others are about to run something else.
          ClusterFailureError: Another process is gone.
        """
        # (To look at thirty arrays takes 20 µs.)
        form = None if self._has_one_form else tuple(map(_form, jax.tree_util.tree_leaves(args)))
        label = self._labels.get(form)
        is_new = label is None
        if label is None:
            # It has nothing of this process: a call back into Python stands there as its number in the program.
            text = self._compiled.lower(*args).as_text()
            label = self._labels[form] = self._peers.agree(self._name, text)
        with self._peers.running(label, is_new=is_new):
            results = self._compiled(*args)
            if self._peers.waits:
                _wait_for(results)
            return results


def _wait_for(results: Any) -> None:
    """One result is there when all of its program are."""
    for leaf in jax.tree_util.tree_leaves(results):
        if isinstance(leaf, jax.Array):
            leaf.block_until_ready()
            return


def _form(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else type(leaf)
