"""The figures of a status as text. None is unknown, and shown as –."""

from __future__ import annotations

from replicax._src.drawing.text import printable


def number_text(number: float | None) -> str:
    """
    >>> number_text(None), number_text(12345), number_text(1.25), number_text(2345.6)
    ('–', '12,345', '1.2', '2,346')
    """
    if number is None:
        return "–"
    return f"{number:,.1f}" if isinstance(number, float) and number < 100 else f"{number:,.0f}"


def bytes_text(number: float | None) -> str:
    """
    >>> bytes_text(None), bytes_text(512), bytes_text(1536), bytes_text(200 << 20), bytes_text(3 << 40)
    ('–', '512 B', '1.5 kB', '200 MB', '3,072 GB')
    """
    if number is None:
        return "–"
    unit, units = "B", ["kB", "MB", "GB"]
    while number >= 1024 and units:
        number, unit = number / 1024, units.pop(0)
    return f"{number:,.1f} {unit}" if number < 10 and unit != "B" else f"{number:,.0f} {unit}"


def duration_text(seconds: float | None) -> str:
    """
    >>> duration_text(None), duration_text(5.2), duration_text(125), duration_text(7380), duration_text(200_000)
    ('–', '5 s', '2 min 5 s', '2 h 3 min', '2 d 7 h')
    """
    if seconds is None:
        return "–"
    minutes, left_s = divmod(int(seconds), 60)
    hours, left_min = divmod(minutes, 60)
    days, left_h = divmod(hours, 24)
    if days:
        return f"{days} d {left_h} h"
    if hours:
        return f"{hours} h {left_min} min"
    return f"{minutes} min {left_s} s" if minutes else f"{left_s} s"


def share_text(share: float | None) -> str:
    """
    >>> share_text(None), share_text(0.256)
    ('–', '26 %')
    """
    return "–" if share is None else f"{100 * share:.0f} %"


def loss_text(loss: float | str | None) -> str:
    """
    >>> loss_text(None), loss_text(0.123456), loss_text("nan")
    ('–', '0.1235', 'nan')
    """
    return "–" if loss is None else printable(loss) if isinstance(loss, str) else f"{loss:.4g}"
