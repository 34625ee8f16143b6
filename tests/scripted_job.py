"""Jobs of the launcher whose tasks are small scripts, which write their status files as replicax does."""

import json
import sys

from replicax._launch.display import Display
from replicax._launch.supervisor import Start, Supervisor, SupervisorOptions
from replicax._src.cluster.spec import Task

LIMIT_S = 60
WORKERS = [Task("worker", index) for index in range(3)]

TASK = """
import json, os, signal, subprocess, sys, time
task, folder = sys.argv[1], sys.argv[2]
restart = int(os.environ["REPLICAX_RESTART_COUNT"])

def tell(state="running", tolerates_failures=True, **more):
    path = os.environ["REPLICAX_STATUS_FILE"]
    status = {"step": 3, "time": time.time(), "state": state, "tolerates_failures": tolerates_failures, **more}
    with open(path + ".new", "w") as file:
        json.dump(status, file)
    os.replace(path + ".new", path)

def note(name, text=""):
    with open(os.path.join(folder, name + ".new"), "w") as file:
        file.write(text)
    os.replace(file.name, os.path.join(folder, name))

def wait(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)

def wait_for_state(task, text):
    # Waits until the table of the launcher shows this.
    states = {}
    while text not in states.get(task, ""):
        time.sleep(0.01)
        if os.path.exists(os.path.join(folder, "states")):
            with open(os.path.join(folder, "states")) as file:
                states = json.load(file)

def wait_until_shown(text):
    # Waits until the launcher has said this.
    while text not in open(os.path.join(folder, "shown")).read():
        time.sleep(0.01)

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""

WAITS_UNTIL_ALL_HAVE_JOINED = """
tell()
is_again = restart > 0
note(f"joined {task} {is_again}")
for index in range(3):
    wait(f"joined worker {index} {is_again}")
"""


class Notes:
    """The display of the supervisor, whose rows are kept. The tasks read the newest states in a file."""

    def __init__(self, display, folder):
        self._display, self._folder, self.rows = display, folder, []

    def update(self, rows):
        self.rows.append({str(row.task): row for row in rows})
        fresh = self._folder / "states.new"
        fresh.write_text(json.dumps({str(row.task): row.state for row in rows}))
        fresh.replace(self._folder / "states")

    def __getattr__(self, name):
        return getattr(self._display, name)


class ScriptedJob:
    """Runs one script as three workers."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, source, *, tasks=WORKERS, **options):
        """Returns the exit code, what the launcher has shown, and the rows of its table."""
        path = self.folder / "script.py"
        path.write_text(TASK + source)
        command = [sys.executable, "-I", "-S", str(path)]
        starts = [
            Start(
                task,
                [*command, str(task), str(self.folder)],
                {"REPLICAX_TOKEN": "t"},
                is_awaited=task.type == "worker",
            )
            for task in tasks
        ]
        shown = self.folder / "shown"
        with shown.open("w") as stream:
            display = Display(tasks, stream, stream, {}, is_plain=True)
            notes = Notes(display, self.folder)
            try:
                code = Supervisor(starts, notes, SupervisorOptions(**{"grace_s": LIMIT_S, **options})).run()
            finally:
                display.close()
        return code, shown.read_text(), notes.rows
