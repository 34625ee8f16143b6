"""Compiled programs are kept between starts: where, by whom, up to which size, and whole after kills."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax._src.cluster.machine_layout import free_ports
from replicax._src.devices import program_cache, program_files
from replicax._src.devices.program_files import ProgramFiles

OTHERS = ("JAX_", "XLA_", "PJRT_", "REPLICAX_", "TF_CONFIG", "SLURM_", "OMPI_")


def environment(tmp_path, **given):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    return {**clean, "XDG_CACHE_HOME": str(tmp_path / "home"), **given}


# --- files --------------------------------------------------------------------------------------------


def test_program_is_complete_or_absent(tmp_path, monkeypatch):
    """A process killed while writing it leaves the old file; a damaged file is replaced."""

    def killed(path, data):
        with open(path, "wb") as file:
            file.write(data[:1])
        raise KeyboardInterrupt

    files = ProgramFiles(tmp_path)
    assert files.get("f") is None
    files.put("f", b"damaged")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            files.put("f", b"program")
    assert files.get("f") == b"damaged"
    (left,) = tmp_path.glob("*.part-*")
    ProgramFiles(tmp_path)
    assert left.exists(), "somebody may be writing it"
    os.utime(left, (0, 0))
    ProgramFiles(tmp_path)
    assert not left.exists()
    files.put("f", b"program")
    assert files.get("f") == b"program"
    assert len(list(tmp_path.iterdir())) == 1


def test_programs_not_used_for_longest_are_removed_first(tmp_path):
    """This also holds for those of other versions, which nobody reads any more."""
    ProgramFiles(tmp_path / "old version").put("f", bytes(300))
    files = ProgramFiles(tmp_path / "new version", tmp_path, 1000)
    for number in range(3):
        files.put(str(number), bytes(200))
    for age, path in enumerate(["old version/f", "new version/0", "new version/1", "new version/2"]):
        os.utime(tmp_path / f"{path}-cache", (age + 1, age + 1))
    assert files.get("0") == bytes(200), "now it is the newest"
    files.put("3", bytes(200))
    assert not (tmp_path / "old version" / "f-cache").exists()
    files.put("4", bytes(300))
    assert files.get("1") is None
    assert [files.get(key) is None for key in "0234"] == [False] * 4
    files.put("5", bytes(2000))
    assert files.get("5") is None, "it alone is too large"
    assert [files.get(key) is None for key in "0234"] == [False] * 4
    ProgramFiles(tmp_path, tmp_path, 500)
    assert [files.get(key) is None for key in "0234"] == [True, True, True, False]


WRITER = """
import hashlib, os, random, sys
from pathlib import Path
from replicax._src.devices.program_files import ProgramFiles

files = ProgramFiles(sys.argv[1], Path(sys.argv[1]), 400_000)
numbers = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    key, value = f"f{numbers.randrange(40)}", os.urandom(numbers.randrange(40_000))
    files.put(key, hashlib.sha256(value).digest() + value)
    got = files.get(f"f{numbers.randrange(40)}")
    if got is not None and hashlib.sha256(got[32:]).digest() != got[:32]:
        print("broken", flush=True)
        sys.exit(1)
"""


@pytest.mark.timeout(120)
def test_killed_writers_leave_no_broken_program(tmp_path):
    """Three processes write, read and remove at once; `kill -9` ends them at any moment."""
    numbers, broken = random.Random(0), []
    for round_number in range(4):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(tmp_path), str(3 * round_number + number)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(3)
        ]
        try:
            assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 3
            for writer in writers:
                time.sleep(numbers.uniform(0.05, 0.3))
                writer.send_signal(signal.SIGKILL)
        finally:
            for writer in writers:
                writer.kill()
                broken += [line for line in writer.communicate()[0].splitlines() if line == "broken"]
    assert not broken
    found = list(tmp_path.glob("*-cache"))
    assert found
    for path in found:
        value = path.read_bytes()
        assert hashlib.sha256(value[32:]).digest() == value[:32]
    assert sum(path.stat().st_size for path in found) <= 400_000 * 1.3, "three writers and one program each"


# --- tests --------------------------------------------------------------------------------------------


def test_tests_and_the_processes_that_they_start_keep_their_programs_for_the_next_run():
    """In one folder of bounded size, however short compiling takes; switched off, in one of this run alone."""
    folder, root = Path(jax.config.jax_compilation_cache_dir), os.environ["REPLICAX_CACHE_DIR"]
    if root == "off":
        assert folder.name.startswith("programs")
    else:
        assert folder == Path(root) / program_cache.host_folder()
        assert program_cache.cache_bytes(os.environ) <= 10**9

    def small_program(x):
        return 3.25 * jnp.sin(x)

    jax.jit(small_program)(jnp.ones(7)).block_until_ready()
    assert any(path.name.startswith("jit_small_program-") for path in programs(folder))
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    flags = os.environ.get("XLA_FLAGS", "").split()
    assert len(set(flags)) == len(flags), (
        "the keys of programs have them; workers of pytest-xdist inherit them"
    )


# --- where --------------------------------------------------------------------------------------------


CPUS = {
    "x86": "processor : 0\nmodel : 85\nmodel name : Xeon\nstepping : 7\ncpu MHz : 2100.1\nflags : avx2 avx512f\n",
    "older": "processor : 0\nmodel : 79\nmodel name : Xeon\nstepping : 7\ncpu MHz : 2100.1\nflags : avx2\n",
    "arm": "processor : 0\nBogoMIPS : 50\nFeatures : fp asimd sve\nCPU implementer : 0x41\nCPU part : 0xd40\n",
}


def test_folder_names_versions_and_the_instructions_of_the_cpu(tmp_path, monkeypatch):
    """XLA only logs an error when it loads a program with instructions that the CPU lacks."""
    names, cpuinfo = {}, tmp_path / "cpuinfo"
    monkeypatch.setattr(program_cache, "_CPUINFO", cpuinfo)
    for kind, text in CPUS.items():
        cpuinfo.write_text(text)
        names[kind] = program_cache.host_folder()
    assert len(set(names.values())) == 3
    cpuinfo.write_text(CPUS["x86"].replace("2100.1", "3000.0") + "\nprocessor : 1\nmodel : 79\n")
    assert program_cache.host_folder() == names["x86"]
    assert all(name.startswith("jax-") and "jaxlib-" in name for name in names.values())
    assert not any(os.uname().nodename in name for name in names.values())


@pytest.mark.parametrize("text", ["10GB", "-1", "0", "1.5"])
def test_size_that_is_no_number_of_bytes(text):
    with pytest.raises(rx.errors.ClusterEnvironmentError, match="number of bytes above 0"):
        program_cache.cache_bytes({"REPLICAX_CACHE_MAX_BYTES": text})


PROGRAM = """
import collections, json, os, pathlib
import jax
{before}
import replicax as rx

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
strategy = rx.MirroredStrategy()
with strategy.scope():
    total = rx.Variable(0.0)
strategy.run(lambda: total.assign_add(1.0))
told = {{
    "folder": jax.config.jax_compilation_cache_dir,
    "seconds": jax.config.jax_persistent_cache_min_compile_time_secs,
    "compiled": events["compile_requests_use_cache"] - events["cache_hits"],
}}
print(json.dumps(told))
"""


def run(tmp_path, before="", **given):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env=environment(tmp_path, **given),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr}


def programs(folder):
    return [path.relative_to(folder) for path in folder.rglob("*-cache")]


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param("REPLICAX_CACHE_DIR", "", marks=pytest.mark.rest),
        ("REPLICAX_CHECKPOINT_DIR", ".compiled"),
    ],
    ids=str,
)
def test_second_start_compiles_nothing(tmp_path, name, place):
    first = run(tmp_path, **{name: str(tmp_path / "run")})
    root = tmp_path / "run" / place
    assert first["folder"] == str(root / program_cache.host_folder())
    assert first["compiled"] == len(programs(root)) > 0
    assert {path.parts[1] for path in programs(root)} == {"cpu-cpu"}
    assert root.stat().st_mode & 0o777 == 0o700
    assert run(tmp_path, **{name: str(tmp_path / "run")})["compiled"] == 0


@pytest.mark.rest
@pytest.mark.timeout(250)
def test_programs_of_other_flags_are_not_used(tmp_path):
    counts = [
        run(tmp_path, REPLICAX_CACHE_DIR=str(tmp_path / "run"), XLA_FLAGS=flags)["compiled"]
        for flags in ("", "--xla_backend_optimization_level=0", "--xla_force_host_platform_device_count=2")
    ]
    assert counts[0] == counts[1] > 0
    assert counts[2] > 0


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("before", "given", "folder"),
    [
        ("", {}, None),
        ("", {"REPLICAX_CHECKPOINT_DIR": "run", "REPLICAX_CACHE_DIR": "off"}, None),
        ("", {"REPLICAX_CACHE_DIR": "run", "JAX_COMPILATION_CACHE_DIR": "mine"}, "mine"),
        (
            "jax.config.update('jax_compilation_cache_dir', os.environ['XDG_CACHE_HOME'])",
            {"REPLICAX_CACHE_DIR": "run"},
            "home",
        ),
    ],
    ids=["nothing", "off", "environment", "config"],
)
def test_nothing_that_the_user_configured_is_changed(tmp_path, before, given, folder):
    given = {name: value if value == "off" else str(tmp_path / value) for name, value in given.items()}
    told = run(tmp_path, before, **given)
    assert told["folder"] == (folder and str(tmp_path / folder))
    assert told["seconds"] == 1.0
    assert not (tmp_path / "run").exists()


def test_folder_that_cannot_be_written_is_only_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    told = run(tmp_path, REPLICAX_CACHE_DIR=str(tmp_path / "file" / "run"))
    assert told["folder"] is None
    assert "Compiled programs are not kept" in told["said"]


def opened_by_all(folder):
    folder.chmod(0o777)


def of_another_user(folder):
    os.chown(folder, 65534, -1)


def below_an_open_folder(folder):
    folder.parent.chmod(0o777)


def tell(monkeypatch, root):
    """Returns the folder that JAX would get, without a backend."""
    set_to = []
    config = types.SimpleNamespace(
        jax_compilation_cache_dir=None, update=lambda name, value: set_to.append(value)
    )
    monkeypatch.setattr(program_cache, "_ours", {})
    monkeypatch.setattr(program_cache, "jax", types.SimpleNamespace(config=config))
    monkeypatch.setattr(program_cache.jax_compat, "keep_programs", lambda open_files: None)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("REPLICAX_CACHE_DIR", str(root))
    for _ in range(2):
        program_cache.keep_programs(is_task=True)
    return set_to[0] if set_to else None


@pytest.mark.parametrize(
    "open_it",
    [
        opened_by_all,
        pytest.param(
            of_another_user, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
        ),
        below_an_open_folder,
    ],
)
def test_folder_that_others_may_write_is_not_used_and_one_warning_says_so(
    tmp_path, monkeypatch, caplog, open_it
):
    """Who may write there runs code in this process."""
    root = tmp_path / "above" / "programs"
    root.mkdir(parents=True)
    assert tell(monkeypatch, root) == str(root / program_cache.host_folder())
    (root / program_cache.host_folder()).rmdir()
    open_it(root)
    assert tell(monkeypatch, root) is None
    (text,) = [record.getMessage() for record in caplog.records if str(root) in record.getMessage()]
    assert "may write" in text or "another user" in text
    assert list(root.iterdir()) == []


def test_folder_below_a_sticky_one_is_used(tmp_path, monkeypatch):
    """Such as /tmp, where users cannot replace each other's folders."""
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(0o1777)
    root = tmp_path / "above" / "programs"
    assert tell(monkeypatch, root) == str(root / program_cache.host_folder())


def test_program_of_another_user_is_not_loaded(tmp_path, monkeypatch):
    """The folder may have been open before, or be replaced while this process runs."""
    files = ProgramFiles(tmp_path, is_private=True)
    files.put("f", b"program")
    assert files.get("f") == b"program"
    assert (tmp_path / "f-cache").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(program_files, "is_own", lambda about: False)
    assert files.get("f") is None
    assert ProgramFiles(tmp_path).get("f") == b"program", "the user's own folder of JAX"


@pytest.mark.rest
@pytest.mark.timeout(250)
def test_tasks_of_a_launcher_keep_their_programs(tmp_path):
    """Each process keeps its own programs for CPUs, without any variable of ours."""
    port, counts = free_ports(1)[0], []
    for _ in range(2):
        tasks = []
        for rank in range(2):
            of_torchrun = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "none",
            }
            program = PROGRAM.format(before="").replace("Mirrored", "MultiWorkerMirrored")
            tasks.append(
                subprocess.Popen(
                    [sys.executable, "-c", program],
                    env=environment(tmp_path, REPLICAX_TOKEN="a secret", **of_torchrun),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            said = [task.communicate(timeout=100) for task in tasks]
        finally:
            for task in tasks:
                task.kill()
                task.wait()
        assert [task.returncode for task in tasks] == [0, 0], said
        counts.append([json.loads(out.splitlines()[-1])["compiled"] for out, _ in said])
    assert min(counts[0]) > 0
    assert counts[1] == [0, 0]
    assert len(programs(tmp_path / "home" / "replicax" / "programs")) > max(counts[0])
