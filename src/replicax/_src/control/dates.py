"""The dates of what the members of a training with fault tolerance do between and in its steps. Pure numbers.

A *date* is a version: the number of steps that all have committed. A newcomer comes with another past than the others,
so nothing may be counted from the start of a process. What is counted begins again at each date:

- An all-gather has the date at which it begins. It completes over the members that *take part* since that date. A
  member that enters at a version takes part from the next one on. Until then it is *solo*, and its all-gathers are its
  own.
- The *position* of a program is its date, and the count of programs before it at this date. So members that began at
  different times agree on it. Without fault tolerance all positions have the date 0.
- The count of batches that members read together is dated in the same way.
"""

from __future__ import annotations

from typing import Final

_PER_DATE: Final = 2**24
"""More than the programs, or batches, of one date."""


def first_at(date: int) -> int:
    """Returns the position of the first program at a date."""
    return date * _PER_DATE


def date_of(position: int) -> int:
    """Returns the date of a position."""
    return max(0, position) // _PER_DATE


def position_in_words(position: int) -> str:
    """Returns a position for messages.

    >>> position_in_words(7)
    '7'
    >>> position_in_words(first_at(41) + 2)
    '2 after step 41'
    """
    date = date_of(position)
    return f"{position - first_at(date)} after step {date:,}" if date else str(position)
