"""``replicax`` itself: its summary, its version, and its answers to unknown words."""

import pytest

import replicax as rx
from replicax.__main__ import COMMANDS, main


def test_bare_command_prints_a_summary(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  replicax {command.__name__.rpartition('.')[2].replace('_', '-')}" in printed
    assert rx.__version__ in printed


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"replicax {rx.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lauch"], "there is no command 'lauch'. Did you mean 'launch'?"),
        (["run", "train.py"], "replicax launch --workers 2 train.py; in one: python train.py"),
        (["docter", "--json"], "Did you mean 'doctor'?"),
        (
            ["launch", "--worker", "2", "train.py"],
            "unrecognized arguments: --worker. Did you mean '--workers'?",
        ),
        (["launch", "--worker=2", "train.py"], "Did you mean '--workers'?"),
        (["doctor", "--jsn"], "Did you mean '--json'?"),
        (["top", "--onec"], "Did you mean '--once'?"),
        (["launch", "--zzz", "train.py"], "unrecognized arguments: --zzz\n"),
    ],
)
def test_a_mistyped_word_gets_the_right_one(capsys, arguments, says):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["launch", "server", "top", "plan", "export", "migrate", "doctor"])
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: replicax {command}" in capsys.readouterr().out
