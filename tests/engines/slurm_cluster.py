"""``SlurmCluster``: a real Slurm of two nodes on this machine, in a folder of its own: munged, slurmctld, two slurmd."""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = (
    "127.0.1.1",
    "127.0.1.2",
)  # the names resolve without a line in /etc/hosts, and each has an address of its own

# cred_expire is also the delay of a requeue; 5 is the least that munge accepts. The rest makes the scheduler quick.
CONFIGURATION = """\
ClusterName=rx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=5
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[0]} CPUs=2 RealMemory=4000
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[1]} CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing():
    """Returns why Slurm cannot run here; empty if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)" if absent else ""


class SlurmCluster:
    """Starts the daemons as children of this process; ``close`` ends them, and all jobs.

    Attributes:
      environ: The variables with which Slurm's commands find this cluster.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen] = {}
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        for name in ("munge.key", "."):
            (folder / name).chmod(0o700 if name == "." else 0o400)
        controller_port, *ports = _free_ports(3)
        text = CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname(),
            user=pwd.getpwuid(os.getuid()).pw_name,
            nodes=NODES,
            controller_port=controller_port,
            ports=ports,
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        try:
            self._start("munged", "-F", "--force", *self._munge_files())
            _wait_until((folder / "munge.socket").exists, "munged to listen")
            self._start("slurmctld", "-D", "-f", self.environ["SLURM_CONF"])
            for node in NODES:
                self.start_node(node)
            self.wait_for_nodes()
        except BaseException:
            self.close()
            raise

    def start_node(self, node):
        """Starts the daemon of a node."""
        (self._folder / node).mkdir(exist_ok=True)
        self._start("slurmd", "-D", "-N", node, "-f", self.environ["SLURM_CONF"], key=node)

    def wait_for_nodes(self):
        """Waits until all nodes are idle."""
        wanted = [f"{node} idle" for node in NODES]
        _wait_until(
            lambda: self.ask("sinfo", "-N", "-h", "-p", "all", "-o", "%N %T").split("\n") == wanted,
            "all nodes to be idle",
        )

    def lose_node(self, node):
        """Ends all that runs for a node, as if the machine were gone. Slurm is told, as a site's health check tells it;
        alone it would notice after 27 s."""
        self._daemons[node].kill()
        self._daemons.pop(node).wait()
        tasks = [pid for pid in self.processes() if _environ(pid).get("SLURMD_NODENAME") == node]
        for pid in [*{_parent(pid) for pid in tasks if _name(_parent(pid)) == "slurmstepd"}, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def ask(self, *command):
        """Returns what a command of Slurm prints; nothing if it fails."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip()

    def state(self, job):
        """Returns the state of a job, such as RUNNING."""
        return self.ask("squeue", "-h", "-j", job, "-t", "all", "-o", "%T")

    def processes(self):
        """Returns the processes of jobs of this cluster."""
        found = {int(name): _environ(name) for name in os.listdir("/proc") if name.isdecimal()}
        return [
            pid
            for pid, environ in found.items()
            if environ.get("SLURM_CONF") == self.environ["SLURM_CONF"] and "SLURM_JOB_ID" in environ
        ]

    def end_jobs(self):
        """Cancels all jobs, and waits until their processes are gone and the nodes are idle."""
        self.ask("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
        _wait_until(lambda: not self.ask("squeue", "-h"), "the jobs to end")
        _wait_until(lambda: not self.processes(), "the processes of the jobs to end")
        self.wait_for_nodes()

    def close(self):
        """Ends the jobs and the daemons."""
        if NODES[1] in self._daemons:
            with contextlib.suppress(TimeoutError):
                self.end_jobs()
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in reversed(self._daemons.values()):
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _munge_files(self):
        names = {
            "socket": "socket",
            "key-file": "key",
            "log-file": "log",
            "pid-file": "pid",
            "seed-file": "seed",
        }
        return [f"--{option}={self._folder}/munge.{end}" for option, end in names.items()]

    def _start(self, *command, key=None):
        with (self._folder / f"{key or command[0]}.out").open("ab") as output:
            self._daemons[key or command[0]] = subprocess.Popen(
                command, env=self.environ, stdout=output, stderr=output, cwd=self._folder
            )


def _wait_until(is_true, what, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Waited {timeout_s} s for {what}.")
        time.sleep(0.1)


def _free_ports(number):
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in held:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in held]


def _path():
    return (
        f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin"  # a user's PATH may lack the daemons'
    )


def _environ(pid):
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it is gone, or another user's
        return {}
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


def _stat(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "0 () X 0"


def _name(pid):
    return _stat(pid).partition("(")[2].rpartition(")")[0]


def _parent(pid):
    return int(_stat(pid).rpartition(")")[2].split()[1])
