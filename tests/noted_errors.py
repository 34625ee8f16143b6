"""Notes of errors, and a notebook's shell that shows errors."""

import traceback

import pytest


def note_of(call):
    """The notes of the AttributeError that ``call`` raises."""
    with pytest.raises(AttributeError) as caught:
        call()
    return " ".join(getattr(caught.value, "__notes__", ()))


class Shell:
    """IPython's shell, as far as errors of cells concern it."""

    custom_exceptions = ()

    def __init__(self):
        self.shown = []

    def set_custom_exc(self, kinds, handler):
        self.custom_exceptions, self.handler = kinds, handler

    def showtraceback(self, exc_tuple, tb_offset=None):
        self.shown.append("".join(traceback.format_exception(*exc_tuple)))

    def run_cell(self, cell):
        try:
            cell()
        except self.custom_exceptions as error:
            self.handler(self, type(error), error, error.__traceback__, tb_offset=1)
