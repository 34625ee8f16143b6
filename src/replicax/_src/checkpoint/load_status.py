"""The result of ``restore`` and ``read``: the values that were restored, and those that were not."""

from __future__ import annotations

from typing import Self, final

from replicax._src.checkpoint.errors import UnmatchedCheckpointError, listed
from replicax._src.checkpoint.restoring import Restoration


@final
class LoadStatus:
    """The outcome of a restore. As in TensorFlow, each method returns the status.

    Values of objects that do not exist yet (an optimizer that has not been built) are restored when these are made.
    If some
    are still unused at the next save, and none of these methods was called, one log line says so.

    Source: TensorFlow, ``tf.train.Checkpoint.restore``.
    """

    def __init__(self, restoration: Restoration | None):
        self._restored = restoration

    @property
    def path(self) -> str | None:
        """The path of the checkpoint; None if there was none."""
        return None if self._restored is None else self._restored.saved.path

    @property
    def _restoration(self) -> Restoration:
        """The restoration that a check is about. Reading it records that the user has asked."""
        if self._restored is None:
            raise UnmatchedCheckpointError(
                "Nothing was restored, because restore() got the path None. latest_checkpoint is None if there is no "
                "checkpoint: test it first (`if manager.latest_checkpoint:`), or use manager.restore_or_initialize()."
            )
        self._restored.is_asked = True
        return self._restored

    def assert_consumed(self) -> Self:
        """Checks that all values of the checkpoint were restored, and that it had all values of the program.

        Raises:
          UnmatchedCheckpointError: Some values have no counterpart; the message names them.
        """
        unused = self._restoration.unrestored()
        if unused:
            raise UnmatchedCheckpointError(
                f"The checkpoint {self.path!r} has values that were not restored:\n{listed(unused)}\nEither the "
                "program lacks these objects, or they are not built yet: call the model, or "
                "optimizer.build(model.trainable_variables), first. Call expect_partial() if this is intended."
            )
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> Self:
        """Checks that the checkpoint had all values of the program.

        Raises:
          UnmatchedCheckpointError: It lacks some values; the message names them.
        """
        missing = self._restoration.unsaved()
        if missing:
            raise UnmatchedCheckpointError(
                f"The checkpoint {self.path!r} does not have these, which keep their "
                f"values:\n{listed(missing)}\nIt was saved by another program, or before they were made."
            )
        return self

    def assert_nontrivial_match(self) -> Self:
        """Checks that at least one value was restored.

        Raises:
          UnmatchedCheckpointError: No value was restored.
        """
        if not self._restoration.num_restored:
            saved = listed(self._restoration.unrestored())
            has = f"has:\n{saved}" if saved else "is empty."
            raise UnmatchedCheckpointError(f"Nothing of the checkpoint {self.path!r} was restored. It {has}")
        return self

    def expect_partial(self) -> Self:
        """Accepts that values of the checkpoint stay unused, so that no log line reports them."""
        if self._restored is not None:
            self._restored.is_asked = True
        return self

    def initialize_or_restore(self, session: None = None) -> None:
        """Does nothing, because values are restored at once. TensorFlow programs may call it."""
        del session

    run_restore_ops = initialize_or_restore
