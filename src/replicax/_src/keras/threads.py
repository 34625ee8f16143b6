"""Carries Keras' settings, which it keeps per thread, into the threads of an eager run, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

# What belongs to the scopes that a thread is in, not to its settings.
_SCOPES = frozenset(
    {
        "autocast_scope",
        "current_call_ctx",
        "name_scope_stack",
        "remat_scope_stack",
        "stateless_scope",
        "symbolic_scope",
        "uninitialized_variables",
    }
)


def carry_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Takes the settings of this thread: the dtype policy, the global seed generator, the names given so far.

    Returns:
      What makes a context with these settings in another thread. Settings that are new there (a seed generator that
      was needed for the first time) come back to the thread that called this.
    """
    settings = _settings()
    policy = keras.config.dtype_policy()

    @contextlib.contextmanager
    def with_state() -> Iterator[None]:
        own = _settings()
        if own is None or settings is None:  # without the private name the policy is all that can be carried
            keras.config.set_dtype_policy(policy)
            yield
            return
        own.update({name: value for name, value in settings.items() if name not in _SCOPES})
        try:
            yield
        finally:
            for name, value in own.items():
                if name not in _SCOPES and settings.get(name) is None:
                    settings[name] = value

    return with_state


def _settings() -> dict[str, Any] | None:
    """Where Keras keeps this thread's settings. No public name reaches the global seed generator (Keras 3.15)."""
    try:
        from keras.src.backend.common import global_state

        return global_state.GLOBAL_STATE_TRACKER.__dict__
    except (ImportError, AttributeError):
        return None
