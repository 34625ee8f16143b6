"""Runs programs that fail, and checks their tracebacks: they end at the user's line, in at most 15 lines."""

import os
import subprocess
import sys


def run(folder, program, **environment):
    script = folder / "script.py"
    script.write_text(program)
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1, done.stderr
    return done.stderr[done.stderr.index("Traceback (most recent") :]


def check(text, program, mark="# HERE"):
    """The text of a program, or of a traceback at the start of a text: the line with the mark is the last one before
    the message."""
    here = 1 + next(i for i, line in enumerate(program.splitlines()) if line.endswith(mark))
    lines = text.splitlines()
    end = next(i for i, line in enumerate(lines) if i and not line.startswith(" "))  # the message
    frames = [i for i, line in enumerate(lines[:end]) if line.startswith("  File ")]
    assert lines[frames[-1]].split("script.py", 1)[1].startswith(f'", line {here},'), text
    assert end - 1 <= 15, text
    assert all("script.py" in lines[i] for i in frames), text
