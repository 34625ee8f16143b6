"""Attributes that an object has for a while, in place of those of its class; ``threading.local`` objects too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def overridden(owner: Any, **attributes: Any) -> Iterator[None]:
    """Inside, ``owner`` has these attributes. Keras, which tracks what is set, sees none of it."""
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
    """Inside, these methods of ``owner`` do nothing."""
    return overridden(owner, **dict.fromkeys(names, _nothing))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a method."""
