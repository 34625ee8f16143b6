"""The parts of a display that jobs have beside each other."""

from replicax._launch.display import TaskRow
from replicax._launch.display_of_job import DisplayOfJob
from replicax._src.cluster.spec import Task

WORKERS = [Task("worker", 0), Task("worker", 1)]


class Shown:
    """Notes what a display is told."""

    is_full = is_broken = False

    def __init__(self):
        self.rows, self.told = [], []

    def update(self, rows):
        self.rows = [(row.task, row.state) for row in rows]

    def note(self, text):
        self.told.append(text)

    def line(self, task, text):
        self.told.append((task, text))


def test_jobs_share_a_table_and_have_names_of_their_own():
    shown, table = Shown(), {"group 0": (), "group 1": ()}
    first, second = (
        DisplayOfJob(shown, job, {task: f"{job} {task}" for task in WORKERS}, table) for job in table
    )
    second.update([TaskRow(task, "running") for task in WORKERS])
    first.update([TaskRow(WORKERS[0], "exited with code 1")])
    assert shown.rows == [
        ("group 0 worker 0", "exited with code 1"),
        ("group 1 worker 0", "running"),
        ("group 1 worker 1", "running"),
    ]
    second.line(WORKERS[1], "hello")
    first.note("worker 0 has failed")
    assert shown.told == [("group 1 worker 1", "hello"), "group 0: worker 0 has failed"]
    shown.is_full = True
    assert first.is_full
    assert not first.is_broken
