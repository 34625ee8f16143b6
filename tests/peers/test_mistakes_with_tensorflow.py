"""Users who leave some of TensorFlow in a program get a message that says what to do: ``tests/mistakes``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "mistakes"))
import recording
import verdicts

PROGRAMS = {
    f"{program.parent.name}/{program.stem}": program
    for program in recording.all_programs()
    if recording.needs_tensorflow(program)
}


@pytest.fixture(scope="module")
def outputs():
    return dict(recording.run_all(list(PROGRAMS.values())))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_with_tensorflow_gets_the_message_of_the_table(outputs, name):
    program = PROGRAMS[name]
    recorded = recording.output_file(program).read_text()
    recording.check(outputs[program], verdicts.read_table()[name], recorded)
