"""Each answer of the README names tests that show it, and each test exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANSWERS = re.search(r"<!-- answers -->\n(.*?)<!-- /answers -->", (ROOT / "README.md").read_text(), re.DOTALL)[
    1
]
QUESTION = re.compile(r"^- \*\*(.*?)\*\*", re.MULTILINE | re.DOTALL)

SHOWN_BY = {
    "Does Keras 3 on JAX work with `MultiWorkerMirroredStrategy`?": [
        "multi_worker/test_multi_worker_mirrored.py::test_fit_equals_one_device",
    ],
    "With a batch that does not divide by the number of devices?": [
        "keras/test_fit_equals_one_device.py::test_training_equals_one_device",
        "keras/test_rows_on_two_processes.py::test_two_processes_on_replicax_print_what_one_device_prints",
        "multi_worker/test_multi_worker_mirrored.py::test_training_equals_one_device",
    ],
    "With parameter servers?": [
        "ps/keras/test_fit_on_servers.py::test_one_worker_trains_as_one_device_does",
        "faults/test_parameter_servers.py::test_the_counter_is_exact",
    ],
    "In plain JAX, without Keras?": ["tracing/test_replication.py::test_values_proven_invariant"],
    "With the `tf.distribute` program that I have?": [
        "migrate/test_rewrite.py::test_an_idiom_prints_what_tensorflow_printed",
    ],
    "A rank is alive and hangs: do the others wait for ever?": [
        "faults/test_waiting.py::test_step_ends_after_its_timeout",
        "faults/test_stuck.py::test_job_with_a_worker_that_never_comes_to_a_step_restarts_and_completes",
        "faults/test_stuck.py::test_job_with_a_worker_that_hangs_in_a_callback_restarts_and_completes",
    ],
    "A worker is killed: can the others just go on?": [
        "faults/test_survivors.py::test_survivors_of_a_killed_chief_end_like_an_undisturbed_run",
        "faults/test_survivors.py::test_random_kills",
    ],
    "Must all wait for the slowest worker?": [
        "ps/local_updates/test_group_kills.py::test_kill_of_a_group_and_of_the_syncer_stops_nobody",
    ],
    "Does a first resume deadlock if the primary reads slowly?": [
        "faults/test_slow_restores.py::test_first_resume_completes_though_one_worker_reads_slowly",
    ],
    "Can a barrier after a restore hold all GPUs for hours?": [
        "faults/test_slow_restores.py::test_wait_after_a_restore_ends_and_names_the_worker_whose_read_hangs",
    ],
    "Keras Tuner with a strategy?": [
        "peers/test_tuners.py::test_page_prints_what_it_says",
        "peers/test_tuners.py::test_keras_tuner_builds_in_the_strategys_scope_and_scores_as_one_device_does",
    ],
}


def test_every_answer_names_its_tests():
    assert [" ".join(question.split()) for question in QUESTION.findall(ANSWERS)] == list(SHOWN_BY)


@pytest.mark.parametrize("name", [name for names in SHOWN_BY.values() for name in names])
def test_named_test_exists(name):
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
