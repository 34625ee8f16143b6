"""A simple terminal for progress bars: carriage return, backspace, colours, and lines that wrap like xterm's."""

import re

_TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n\b]|[^\x1b\r\n\b]")


class Terminal:
    """Lines of a screen of this width, without a bottom.

    A character in the last column leaves the cursor there; only the next one goes to the next line.
    """

    def __init__(self, columns):
        self._columns, self._rows, self._row, self._column = columns, [[]], 0, 0

    @property
    def lines(self):
        found = ["".join(row).rstrip() for row in self._rows]
        while found and not found[-1]:
            found.pop()
        return found

    def feed(self, text):
        for token in _TOKEN.findall(text):
            if token == "\r":
                self._column = 0
            elif token == "\b":
                self._column = max(0, min(self._column, self._columns - 1) - 1)
            elif token == "\n":
                self._down()
            elif token.startswith("\x1b"):
                if token.endswith("K"):
                    del self._rows[self._row][self._column :]
            else:
                self._put(token)

    def _put(self, character):
        if self._column == self._columns:
            self._down()
            self._column = 0
        row = self._rows[self._row]
        row.extend(" " * (self._column + 1 - len(row)))
        row[self._column] = character
        self._column += 1

    def _down(self):
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])
