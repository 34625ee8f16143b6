"""Temporary attributes of an object that hide those of its class, also on ``threading.local`` objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def overridden(owner: Any, **attributes: Any) -> Iterator[None]:
    """Gives ``owner`` these attributes inside the block. Keras, which tracks attribute assignments, does not see
    them.
    """
    own: dict[str, Any] = owner.__dict__
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def muted(owner: Any, *names: str) -> contextlib.AbstractContextManager[None]:
    """Makes these methods of ``owner`` do nothing inside the block."""
    return overridden(owner, **dict.fromkeys(names, _nothing))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a muted method."""
