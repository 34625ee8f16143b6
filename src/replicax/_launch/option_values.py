"""Reads the values of the commands' options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable


def count(text: str) -> int:
    """Returns a whole number of at least 0."""
    return _number(text, 0)


def positive(text: str) -> int:
    """Returns a whole number of at least 1."""
    return _number(text, 1)


def port(text: str) -> int:
    """Returns a port: a whole number of 1 to 65535."""
    value = positive(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, which is at most 65535")
    return value


def seconds(text: str) -> float:
    """Returns a number of seconds of at least 0, which may be ``inf``."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return value


def count_or_auto(text: str) -> int | str:
    """Returns ``"auto"``, or a whole number of at least 0."""
    return text if text == "auto" else count(text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word; empty if no known word is similar.

    >>> did_you_mean("--worker=2", ["--workers", "--ps"])
    ". Did you mean '--workers'?"
    """
    close = difflib.get_close_matches(word.partition("=")[0], list(known), n=1)
    return f". Did you mean {close[0]!r}?" if close else ""


def _number(text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)
