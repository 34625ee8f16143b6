"""The tables of what each name of TensorFlow becomes, in Markdown."""

import re
from collections.abc import Iterable, Iterator

from replicax._migrate import table

PLACEHOLDER = re.compile(r"\{(\*?)(\w+)[^{}]*\}")


def becomes(row: table.Row) -> str:
    """The middle cell of a row, in Markdown."""
    if row.kind == "mark":
        return "marked"
    if row.kind == "remove":
        return "goes"
    if row.kind == "keep":
        step = code(row.in_step) if row.in_step else "marked"
        return f"stays; in a step {step}" if row.why or row.in_step else "stays"
    with_keras, without = target(row.with_keras), target(row.without_keras)
    text = with_keras or without
    if with_keras and without and with_keras != without:
        text = f"{with_keras}; {without} without Keras"
    elif not (with_keras and without):
        text += "; marked " + ("without Keras" if with_keras else "with Keras")
    if row.in_step:
        text += f"; in a step {target(row.in_step)}"
    return text + ("; in a step marked" if row.why else "")


def target(template: str) -> str:
    """The name of a function, or the expression."""
    if not template:
        return ""
    plain = re.fullmatch(r"([\w.]+)\((?:(?:\w+=)?\{[^{}]+\}(?:, )?)*\)", template)
    return f"`{shown(plain[1])}`" if plain else code(template)


def code(template: str) -> str:
    text = shown(PLACEHOLDER.sub(r"\1\2", template)).replace("|", r"\|")
    return f"`{text}`"


def shown(text: str) -> str:
    return re.sub(r"(?<![\w.])ops\.", "keras.ops.", text)


def source(row: table.Row) -> str:
    """The first cell: the name, which arguments the row is for, and other names."""
    defaults = {parameter.name: parameter.default for parameter in row.parameters or ()}
    given = ", ".join(f"{name}={text}" for name, text in row.when.items() if text != defaults[name])
    names = [f"`{row.name}({given})`" if given else f"`{row.name}`", *(f"`{name}`" for name in row.also)]
    return ", ".join(names)


def remark(row: table.Row) -> str:
    texts = [row.note, f"{row.why}: {row.write}" if row.why else ""]
    return "; ".join(filter(None, texts)).replace("|", r"\|")


def lines(rows: Iterable[table.Row]) -> Iterator[str]:
    """A table in Markdown. Two rows of one name that read alike are one."""
    yield "| TensorFlow | becomes | |"
    yield "|---|---|---|"
    seen = set()
    for row in rows:
        line = f"| {source(row)} | {becomes(row)} | {remark(row)} |"
        if line not in seen:
            yield line
        seen.add(line)


def section(title: str) -> str:
    """The text and the table of the section with this title."""
    (found,) = (section for section in table.sections() if section.title == title)
    return "\n".join((*found.text.strip().splitlines(), "", *lines(found.rows))).lstrip("\n")
