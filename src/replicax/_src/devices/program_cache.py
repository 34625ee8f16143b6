"""Where JAX keeps the compiled programs of this process, so that a restart need not compile them again."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import jax

from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.machine_layout import CHECKPOINT_DIR_VARIABLE
from replicax._src.devices.program_files import ProgramFiles
from replicax._src.jax_internals import jax_compat
from replicax._src.untrusted.file_access import writers_above, writers_of

log = logging.getLogger("replicax")

CACHE_DIR_VARIABLE: Final = "REPLICAX_CACHE_DIR"
CACHE_BYTES_VARIABLE: Final = "REPLICAX_CACHE_MAX_BYTES"
NO_CACHE: Final = "off"
_CPUINFO: Final = Path("/proc/cpuinfo")
_DEFAULT_BYTES: Final = 10 * 10**9
_JAX_DIR_VARIABLE: Final = "JAX_COMPILATION_CACHE_DIR"
_JAX_SECONDS: Final = "jax_persistent_cache_min_compile_time_secs"

# For each folder set here: the folder whose size is bounded, and its limit in bytes.
_ours: dict[str, tuple[Path, int]] = {}


def keep_programs(*, is_task: bool) -> None:
    """Makes JAX keep compiled programs in a folder that ``cache_root`` names, unless the user has configured JAX's.

    Every process keeps those for CPUs. Call it before the first program.

    Args:
      is_task: True if a launcher started this process as a task of a cluster.

    Raises:
      ClusterEnvironmentError: ``REPLICAX_CACHE_MAX_BYTES`` is not a number of bytes.
    """
    jax_compat.keep_programs(_open)
    root = cache_root(os.environ, is_task=is_task)
    config: Any = jax.config
    if root is None or _JAX_DIR_VARIABLE in os.environ or config.jax_compilation_cache_dir is not None:
        return
    folder, max_bytes = root / host_folder(), cache_bytes(os.environ)
    try:
        for each in (root, folder):  # programs of others could run as this user
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            if writers := writers_of(each.stat()) or writers_above(each):
                _warn_of_writers(each, writers)
                return
        tempfile.TemporaryFile(dir=folder).close()  # it may exist and be read-only
    except OSError as error:
        log.warning(
            "Compiled programs are not kept: %s. Set %s to another folder.", error, CACHE_DIR_VARIABLE
        )
        return
    _ours[str(folder)] = root, max_bytes
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if _JAX_SECONDS.upper() not in os.environ:
        jax.config.update(_JAX_SECONDS, 0.0)


@functools.cache
def _warn_of_writers(folder: Path, writers: str) -> None:
    """Warns once for each folder."""
    log.warning(
        "Compiled programs are not kept in %s: %s. Who may write there can run code in this process: make the folder "
        "yours alone (chmod 700), or set %s to another one.",
        folder,
        writers,
        CACHE_DIR_VARIABLE,
    )


def cache_root(environ: Mapping[str, str], *, is_task: bool) -> Path | None:
    """Returns the folder of compiled programs of all versions; None if none are kept.

    >>> cache_root({"REPLICAX_CHECKPOINT_DIR": "/shared/run"}, is_task=False)
    PosixPath('/shared/run/.compiled')
    >>> cache_root({"XDG_CACHE_HOME": "/caches"}, is_task=True)
    PosixPath('/caches/replicax/programs')
    >>> cache_root({"REPLICAX_CACHE_DIR": "off"}, is_task=True), cache_root({}, is_task=False)
    (None, None)
    """
    said, checkpoints = environ.get(CACHE_DIR_VARIABLE), environ.get(CHECKPOINT_DIR_VARIABLE)
    if said == NO_CACHE:
        return None
    if said:
        return Path(said).expanduser().absolute()
    if checkpoints:
        return Path(checkpoints).absolute() / ".compiled"
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(f"{caches}/replicax/programs").expanduser() if is_task else None


def cache_bytes(environ: Mapping[str, str]) -> int:
    """Returns the largest size of the folder.

    Raises:
      ClusterEnvironmentError: The variable is not a whole number of bytes.

    >>> cache_bytes({"REPLICAX_CACHE_MAX_BYTES": "2000000000"})
    2000000000
    """
    text = environ.get(CACHE_BYTES_VARIABLE) or str(_DEFAULT_BYTES)
    if not text.isdecimal() or not int(text):
        raise ClusterEnvironmentError(
            f"{CACHE_BYTES_VARIABLE}={text!r} in the environment must be a number of bytes above 0, such as 2000000000. "
            f"Correct it, or leave it out for {_DEFAULT_BYTES}. {CACHE_DIR_VARIABLE}=off keeps no programs."
        )
    return int(text)


def host_folder() -> str:
    """Returns the name of the folder for this JAX and kind of CPU, such as ``jax-0.10.2-jaxlib-0.10.2-cpu-5f0c9a1e``.

    XLA compiles for the instructions of the CPU, and only logs an error if a program is loaded where they are missing.
    Programs for accelerators lie there too, because their processes also compile for the CPU.
    """
    try:
        cpu = cpu_of(_CPUINFO.read_text())
    except OSError:  # not Linux
        cpu = f"{platform.processor()} {platform.node()}"
    kind = hashlib.sha256(f"{platform.machine()}\n{cpu}".encode()).hexdigest()[:8]
    return f"jax-{jax_compat.VERSION}-jaxlib-{metadata.version('jaxlib')}-cpu-{kind}"


def cpu_of(cpuinfo: str) -> str:
    """Returns the lines of ``/proc/cpuinfo`` that tell kinds of CPU apart: model and instructions, of the first core.

    >>> cpu_of("processor : 0\\nmodel : 1\\ncpu MHz : 2100.3\\nflags : avx2 fma\\n\\nprocessor : 1\\nmodel : 1\\n")
    'flags : avx2 fma\\nmodel : 1'
    """
    names = (
        r"(vendor_id|cpu family|model|flags|CPU (implementer|architecture|variant|part)|Features|isa|uarch)"
    )
    first = cpuinfo.strip().partition("\n\n")[0].splitlines()
    return "\n".join(sorted(line.strip() for line in first if re.match(rf"{names}\s*:", line)))


def _open(path: str) -> ProgramFiles:
    """Opens the files when JAX compiles its first program, so that the accelerator is known."""
    if path not in _ours:
        return ProgramFiles(path)
    root, max_bytes = _ours[path]
    device = jax.local_devices()[0]
    told = f"{device.device_kind} {device.client.platform_version}"
    return ProgramFiles(
        Path(path) / re.sub(r"[^A-Za-z0-9.]+", "-", told)[:80].strip("-"), root, max_bytes, is_private=True
    )
