"""Completion scripts: complete, well formed, and right when a shell runs them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from posttrain_cli.cli.app import COMMANDS
from posttrain_cli.cli.completion import Shell as ShellName
from posttrain_cli.cli.completion import script, verbs

Shell = Callable[..., Any]


@pytest.mark.parametrize("name", get_args(ShellName))
def test_a_script_names_every_command_and_option(shell: Shell, name: Any) -> None:
    answer = shell("completion", name)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == script(name)
    for verb in verbs():
        assert verb.name in answer.out
        for option in verb.options:
            for spelled in option.names:
                word = spelled.lstrip("-") if name == "fish" else spelled
                assert word in answer.out


def test_an_unknown_shell_is_a_usage_mistake(shell: Shell) -> None:
    answer = shell("completion", "tcsh")
    assert answer.code == 2
    assert "tcsh" in answer.err


def test_json_holds_the_script(shell: Shell) -> None:
    answer = shell("completion", "bash", "--json")
    assert answer.json() == {"ok": True, "shell": "bash", "script": script("bash")}


def complete(folder: Path, *words: str) -> list[str]:
    """What bash offers for `words`, the last of which is being typed."""
    file = folder / "ptc.bash"
    file.write_text(script("bash"))
    listed = " ".join(f"'{word}'" for word in words)
    code = (
        f"source '{file}'; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; "
        'compopt() { :; }; _ptc; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-eu", "-c", code], capture_output=True, text=True, check=False, timeout=20
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_and_choices(tmp_path: Path) -> None:
    names = [row.name for row in COMMANDS]
    assert complete(tmp_path, "ptc", "") == [*names, "--help", "--version"]
    assert complete(tmp_path, "ptc", "res") == ["resume"]
    assert complete(tmp_path, "ptc", "-q", "doc") == ["doctor"]
    assert complete(tmp_path, "ptc", "sft", "--lora-r") == ["--lora-rank"]
    assert complete(tmp_path, "ptc", "sft", "--no-pa") == ["--no-packing"]
    assert complete(tmp_path, "ptc", "sft", "--overlong", "") == [
        "keep", "drop", "truncate", "error",
    ]  # fmt: skip
    assert complete(tmp_path, "ptc", "sft", "--template", "ch") == ["chatml"]
    assert complete(tmp_path, "ptc", "sft", "--gpus", "") == ["auto"]
    assert complete(tmp_path, "ptc", "completion", "f") == ["fish"]
    assert complete(tmp_path, "ptc", "sft", "--train", "x") == []  # bash's own file names
    assert complete(tmp_path, "ptc", "sft", "--overlong", "zzz") == []
