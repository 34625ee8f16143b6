"""Where replicax is published: the one setting, and the addresses and commands that follow from it. Pure.

Empty and False mean "not yet". Until then nothing that is printed leads there: pages link to each other's files,
messages name the file of a page in the source, and commands install from the folder of the source. After a change run
``make pages``.
"""

from __future__ import annotations

import re
from typing import Final

REPOSITORY: Final = ""
"""The address of the public repository, such as ``https://example.com/replicax``."""

SITE: Final = ""
"""The address of the public documentation, such as ``https://replicax.example.com``."""

IS_ON_INDEX: Final = False
"""True if ``pip install replicax`` finds it on the package index."""

_NEEDS_QUOTES: Final = re.compile(r"[^\w.,:=/@+-]")


def page(title: str, file: str, *, site: str = SITE) -> str:
    """Returns what a message says of a page of the documentation.

    Args:
      title: The first heading of the page.
      file: Its path below ``docs``, such as ``how_to/data.md``.
      site: The address of the documentation.

    >>> page("Sharp bits", "explanation/sharp_bits.md", site="")
    'the page "Sharp bits" (docs/explanation/sharp_bits.md in the source of replicax)'
    >>> page("Sharp bits", "explanation/sharp_bits.md", site="https://replicax.example.com")
    'https://replicax.example.com/explanation/sharp_bits.html'
    """
    if site:
        return f"{site}/{file.removesuffix('.md')}.html"
    return f'the page "{title}" (docs/{file} in the source of replicax)'


def install_command(*requirements: str) -> str:
    r"""Returns the command that installs requirements, quoted for a shell.

    >>> print(install_command("optax", "jax[cuda13]"))
    pip install optax "jax[cuda13]"
    """
    quoted = (f'"{it}"' if _NEEDS_QUOTES.search(it) else it for it in requirements)
    return " ".join(("pip install", *quoted))


def with_extras(*extras: str, is_on_index: bool = IS_ON_INDEX) -> str:
    """Returns the requirement for replicax itself with extras, where a page prints it.

    >>> with_extras("keras", "checkpoint", is_on_index=False)
    '.[keras,checkpoint]'
    >>> with_extras("keras", is_on_index=True)
    'replicax[keras]'
    """
    return f"{'replicax' if is_on_index else '.'}[{','.join(extras)}]"
