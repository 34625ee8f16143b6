"""What each program of this folder does, and how good its message is: ``table.toml``, and ``README.md`` made from it.

``python tests/mistakes/verdicts.py`` writes README.md.
"""

import dataclasses
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
CAME = {
    "error": "an error",
    "warning": "a warning",
    "right": "the right numbers",
    "silent": "other numbers, without a word",
}
GROUPS = {
    "tensorflow": "Users of TensorFlow and tf.distribute",
    "keras": "Users of Keras",
    "jax": "Users of JAX, flax and optax",
}
HEAD = """# Mistakes

Programs with mistakes that users of TensorFlow, Keras and JAX make, one in each file of `programs`. `outputs` has what
a user sees in a terminal, without folders, addresses and times. Each program has two scores: that of the messages'
writers, and that of a reader who saw only the program and its output:

- 0: the message is raw or misleading, or there is none and the numbers are not what the user wants
- 1: it says half: what is wrong, or what to do
- 2: it says what to do
- right: the program does what the user wants

{num_good} of {num_all} programs have a 2 or are right by the writers' scores, and {num_good_of_reader} by the reader's.
Where the reader's is lower, the message has changed since the reading, or the writers disagree. A program without a
word whose numbers are not what the user wants has its paragraph in `docs/explanation/sharp_bits.md`.

`test_mistakes.py` runs the programs and compares their messages with this table and with `outputs`. After a change of a
message, write the outputs again, read them, and correct `table.toml`. This page is made from it and from `reader.toml`,
which only a new reading changes:

```bash
.venv/bin/python tests/mistakes/recording.py            # or with names of programs
.venv-peers/bin/python tests/mistakes/recording.py      # the programs that import TensorFlow
.venv/bin/python tests/mistakes/verdicts.py             # this page
```
"""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One row of the table.

    Attributes:
      mistake: The mistake, in words of the user.
      came: What came of it, a key of ``CAME``.
      says: Words, or first digits of numbers, that the output has.
      score: 0, 1, 2, or "right", by the writers of the messages.
      message_of: Whose code wrote the message.
      error: The class of the error.
      sharp_bits: The heading under which ``sharp_bits.md`` warns of it.
    """

    mistake: str
    came: str
    says: list[str]
    score: int | str
    message_of: str
    error: str = ""
    sharp_bits: str = ""

    @property
    def is_good(self):
        return is_good(self.score)


def is_good(score):
    return score in (2, "right")


def read_table():
    """A dict from ``"tensorflow/tf_print_left"`` to ``Verdict``."""
    table = tomllib.loads((FOLDER / "table.toml").read_text())
    return {name: Verdict(**fields) for name, fields in table.items()}


def read_reader():
    """A dict from ``"tensorflow/tf_print_left"`` to the score of a reader who saw only program and output."""
    return tomllib.loads((FOLDER / "reader.toml").read_text())


def page():
    table, reader = read_table(), read_reader()
    num_good = sum(verdict.is_good for verdict in table.values())
    num_good_of_reader = sum(map(is_good, reader.values()))
    lines = [
        HEAD.format(num_good=num_good, num_all=len(table), num_good_of_reader=num_good_of_reader),
    ]
    for group, title in GROUPS.items():
        lines += [
            f"## {title}\n",
            "| program | mistake | what came | of | writers | reader |",
            "|---|---|---|---|---|---|",
        ]
        for name, verdict in table.items():
            if name.startswith(f"{group}/"):
                came = f"`{verdict.error}`" if verdict.error else CAME[verdict.came]
                scores = (verdict.score, reader[name])
                cells = (name.partition("/")[2], verdict.mistake, came, verdict.message_of, *scores)
                lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page())
