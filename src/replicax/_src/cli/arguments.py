"""How the commands read the values of their options."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of at least 0."""
    return _number(text, 0)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _number(text, 1)


def seconds(text: str) -> float:
    """A number of seconds of at least 0; ``inf`` is one."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return value


def _number(text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)
