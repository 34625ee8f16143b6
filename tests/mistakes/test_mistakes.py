"""Users' mistakes get a message that says what to do: the programs of this folder, their outputs, and the table."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import recording
import verdicts

TABLE = verdicts.read_table()
PROGRAMS = {f"{program.parent.name}/{program.stem}": program for program in recording.all_programs()}
RUN_HERE = [name for name, program in PROGRAMS.items() if not recording.needs_tensorflow(program)]
# They start clusters; other tests of processes have the same errors, or another program.
LONG = {
    "tensorflow/another_program_on_the_port_of_worker_0",
    "tensorflow/launch_of_a_worker_that_finds_no_data",
    "tensorflow/one_worker_of_two_started",
    "tensorflow/two_workers_with_index_0",
    "tensorflow/worker_0_saves_the_checkpoint_alone",
}


def recorded(name):
    return recording.output_file(PROGRAMS[name]).read_text()


@pytest.fixture(scope="module")
def outputs(request):
    """Of all programs that are chosen, two at a time."""
    chosen = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.fspath == request.fspath and hasattr(item, "callspec")
    }
    return dict(recording.run_all([PROGRAMS[name] for name in RUN_HERE if name in chosen]))


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in RUN_HERE]
)
def test_a_mistake_gets_the_message_of_the_table(outputs, name):
    recording.check(outputs[PROGRAMS[name]], TABLE[name], recorded(name))


def test_each_program_has_a_row_and_an_output_that_fits_it():
    assert TABLE.keys() == PROGRAMS.keys()
    for name, verdict in TABLE.items():
        recording.check(recorded(name), verdict, recorded(name))


def test_outputs_name_no_folder_of_this_machine():
    for name in PROGRAMS:
        assert str(Path(__file__).parents[2]) not in recorded(name)
        assert not re.search(r"/tmp/|/root/|mistake-", recorded(name)), name


def test_nine_of_ten_mistakes_are_right_or_have_a_message_that_says_what_to_do():
    assert len(TABLE) >= 100
    assert sum(verdict.is_good for verdict in TABLE.values()) >= 0.9 * len(TABLE)


def test_wrong_numbers_without_a_word_stand_in_sharp_bits():
    page = (Path(__file__).parents[2] / "docs/explanation/sharp_bits.md").read_text()
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    for name, verdict in TABLE.items():
        if verdict.came == "silent":
            assert verdict.score in (0, "right"), name
            assert verdict.sharp_bits in headings, (name, verdict.sharp_bits)


def test_a_reader_scored_each_program():
    reader = verdicts.read_reader()
    assert reader.keys() == TABLE.keys()
    assert set(reader.values()) <= {0, 1, 2, "right"}
    assert sum(score in (2, "right") for score in reader.values()) >= 0.9 * len(reader)


def test_readme_is_made_from_the_table():
    assert (Path(__file__).parent / "README.md").read_text() == verdicts.page()
