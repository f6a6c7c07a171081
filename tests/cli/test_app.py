"""The conventions of SPEC §1: streams, exit codes, JSON, names, help, speed."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from posttrain_cli import __version__
from posttrain_cli.cli import app, console
from posttrain_cli.cli.app import COMMANDS, Command
from posttrain_cli.diagnostics import Finding
from posttrain_cli.errors import DataError, Interrupted, PtcError, RunError, UsageError

HEAVY = ("torch", "transformers", "datasets", "polars", "vllm", "pyarrow", "peft", "pydantic")

Shell = Callable[..., Any]


# A command that does what a test tells it to.
_deed: Callable[..., Any] = list


def act(
    count: Annotated[int, typer.Option("--some-count", min=0, help="a number")] = 0,
    label: Annotated[str, typer.Option(help="a text")] = "",
) -> Any:
    """Do what the test says.

    Args:
        count: not shown in the help.

    Examples:
      ptc act --some-count 3
    """
    return _deed(count, label)


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> Callable[..., Any]:
    """`acting(deed, *args)`: `ptc act ARGS` with a body that calls `deed(count, label)`."""
    monkeypatch.setattr(
        app, "COMMANDS", (*COMMANDS, Command("act", act.__module__, "act", "do it"))
    )
    monkeypatch.setitem(sys.modules, act.__module__, sys.modules[__name__])

    def run(deed: Callable[..., Any], *args: str) -> Any:
        monkeypatch.setattr(sys.modules[act.__module__], "_deed", deed)
        return shell(*args)

    return run


def failing(error: BaseException) -> Callable[..., Any]:
    def deed(count: int, label: str) -> None:
        raise error

    return deed


def test_ptc_alone_prints_help_and_ends_with_2(shell: Shell) -> None:
    answer = shell()
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("Usage: ptc [OPTIONS] COMMAND")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command_with_its_summary(shell: Shell, flag: str) -> None:
    answer = shell(flag)
    assert (answer.code, answer.err) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^  {command.name} +{re.escape(command.summary)}$", answer.out, re.M)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda row: row.name)
def test_every_command_has_examples_and_a_first_line(shell: Shell, command: Command) -> None:
    answer = shell(command.name, "-h")
    assert answer.code == 0
    text = answer.out
    assert f"\n    ptc {command.name}" in text.split("Examples:")[1]
    assert "Args:" not in text
    for line in text.splitlines():
        assert len(line) <= 104, line
    for name in ("--json", "-q, --quiet", "-v, --verbose", "--debug", "--no-color", "--version"):
        assert name in text


@pytest.mark.parametrize("args", [("--version",), ("sft", "--version"), ("--version", "sft")])
def test_version_before_and_after_the_command(shell: Shell, args: tuple[str, ...]) -> None:
    answer = shell(*args)
    assert (answer.code, answer.out, answer.err) == (0, f"ptc {__version__}\n", "")


def test_unknown_names_get_a_suggestion(shell: Shell) -> None:
    answer = shell("srf")
    assert answer.code == 2
    assert answer.err == "error: unknown command `srf`\n\nhint: did you mean `sft`?\n"
    answer = shell("sft", "--lora-rnk", "3")
    assert answer.code == 2
    assert answer.err == "error: unknown option `--lora-rnk`\n\nhint: did you mean `--lora-rank`?\n"
    answer = shell("sft", "--zzz")
    assert answer.err.endswith("hint: `ptc sft --help` shows what there is\n")


def test_bad_values_name_what_was_given_and_what_is_taken(shell: Shell) -> None:
    answer = shell("gen-synthetic", "--kind", "sfft", "--out", "x.jsonl")
    assert answer.code == 2
    assert answer.err == (
        "error: invalid value for '--kind': 'sfft' is not one of 'sft', 'preference', 'prompt'\n"
        "\nhint: did you mean `sft`?\n"
    )
    answer = shell("gen-synthetic", "--n", "0", "--out", "x.jsonl")
    assert answer.code == 2
    assert answer.err.startswith(
        "error: invalid value for '--n': input should be greater than or equal to 1, got `0`\n"
    )


def test_other_usage_mistakes_are_told_in_lower_case(acting: Shell) -> None:
    answer = acting(print, "act", "--some-count", "many")
    assert answer.code == 2
    assert answer.err.startswith("error: invalid value for '--some-count'")
    answer = acting(print, "act", "--some-count")
    assert answer.err.startswith("error: option '--some-count' requires an argument\n")
    answer = acting(print, "act", "stray")
    assert answer.code == 2
    assert "stray" in answer.err


def test_underscores_in_option_names_but_not_in_values(acting: Shell) -> None:
    seen: list[tuple[int, str]] = []
    answer = acting(lambda *given: seen.append(given), "act", "--some_count=3", "--label", "a_b-c")
    assert answer.code == 0
    assert acting(lambda *given: seen.append(given), "act", "--label", "--some_count").code == 0
    assert seen == [(3, "a_b-c"), (0, "--some_count")]


def test_the_exit_status_is_what_the_command_returns(acting: Shell) -> None:
    assert acting(lambda *_: None, "act").code == 0
    assert acting(lambda *_: 1, "act").code == 1
    assert acting(failing(typer.Exit(1)), "act").code == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("the data is bad"), 1),
        (UsageError("the data is bad"), 2),
        (RunError("the data is bad"), 3),
        (Interrupted(15, "the data is bad"), 143),
    ],
)
def test_errors_end_with_their_code_and_no_traceback(
    acting: Shell, error: PtcError, code: int
) -> None:
    error.hint = "mend it"
    answer = acting(failing(error), "act")
    assert answer.code == code
    assert answer.out == ""
    assert answer.err == "error: the data is bad\n\nhint: mend it\n"


def test_debug_shows_the_traceback_before_the_error(acting: Shell) -> None:
    answer = acting(failing(DataError("bad")), "act", "--debug")
    assert answer.err.startswith("Traceback (most recent call last)")
    assert answer.err.endswith("error: bad\n")
    assert acting(failing(DataError("bad")), "--debug", "act").err.startswith("Traceback")


def test_problems_are_told_line_by_line(acting: Shell) -> None:
    answer = acting(failing(UsageError("a; b", problems=["a", "b"])), "act")
    assert answer.err == "error: a\nerror: b\n"
    answer = acting(failing(UsageError("two files are gone", problems=["a", "b"])), "act")
    assert answer.err == "error: two files are gone\n  a\n  b\n"


def test_json_errors_are_one_object_on_stdout(acting: Shell) -> None:
    answer = acting(failing(UsageError("bad", "mend", ["x", "y"])), "act", "--json")
    assert answer.code == 2
    assert answer.json() == {
        "ok": False,
        "error": {
            "exit_code": 2,
            "message": "bad",
            "hint": "mend",
            "problems": ["x", "y"],
            "findings": [],
        },
    }
    assert acting(print, "act", "--nope", "--json").json()["error"]["exit_code"] == 2
    assert acting(print, "--json", "--nope").json()["error"]["exit_code"] == 2


def test_a_data_error_shows_its_findings_up_to_a_hundred(acting: Shell) -> None:
    places = [Finding("t.jsonl", "PTC104", "not an object", line=row) for row in range(1, 121)]
    answer = acting(failing(DataError("120 bad rows", findings=places)), "act")
    assert answer.code == 1
    lines = answer.err.splitlines()
    assert lines[0] == str(places[0])
    assert len(lines) == 102
    assert lines[-2:] == ["... and 20 more", "error: 120 bad rows"]
    found = acting(failing(DataError("bad", findings=places)), "act", "--json").json()
    assert len(found["error"]["findings"]) == 120
    assert found["error"]["findings"][6]["line"] == 7
    assert found["error"]["findings"][6]["severity"] == "error"


def test_an_unexpected_error_is_one_line_and_how_to_report_it(acting: Shell) -> None:
    answer = acting(failing(KeyError("x")), "act")
    assert answer.code == 3
    assert answer.err.startswith("error: unexpected KeyError: 'x'\n\nhint: this is a fault of ptc")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.txt"), 2,
         "error: no such file or directory: `a.txt`\n"),
        (PermissionError(errno.EACCES, "Permission denied", "a.txt"), 2,
         "error: permission denied: `a.txt`\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 3,
         "error: no space left on device\n"),
    ],
)  # fmt: skip
def test_errors_of_the_system_are_no_faults_of_ours(
    acting: Shell, error: OSError, code: int, message: str
) -> None:
    answer = acting(failing(error), "act")
    assert (answer.code, answer.err) == (code, message)


def test_a_missing_package_names_the_extra(acting: Shell) -> None:
    answer = acting(failing(ModuleNotFoundError("No module named 'vllm'", name="vllm.x")), "act")
    assert answer.code == 2
    assert answer.err == (
        "error: this needs the package `vllm`, which is not installed\n\n"
        "hint: pip install 'posttrain-cli[vllm]'\n"
    )
    answer = acting(failing(ModuleNotFoundError("No module named 'foo'", name="foo")), "act")
    assert "hint: pip install foo" in answer.err
    own = ModuleNotFoundError("No module named", name="posttrain_cli.x")
    assert acting(failing(own), "act").code == 3


def test_ctrl_c_ends_with_130(acting: Shell) -> None:
    assert acting(failing(KeyboardInterrupt()), "act").code == 130


def test_quiet_hides_what_is_said_but_no_results_and_no_warnings(acting: Shell) -> None:
    def deed(count: int, label: str) -> None:
        console.out("result")
        console.say("said")
        console.detail("detail")
        console.warn("warned")

    assert acting(deed, "act") == type(acting(deed, "act"))(
        0, "result\n", "said\nwarning: warned\n"
    )
    quiet = acting(deed, "act", "-q")
    assert (quiet.out, quiet.err) == ("result\n", "warning: warned\n")
    assert acting(deed, "-q", "act").err == "warning: warned\n"
    assert acting(deed, "act", "-v").err == "said\ndetail\nwarning: warned\n"


class Terminal:
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console.reset([])
    terminal: Any = Terminal()
    assert console.paint("x", "31", terminal) == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.paint("x", "31", terminal) == "x"
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert console.paint("x", "31", terminal) == "x"
    monkeypatch.setenv("TERM", "xterm")
    console.modes.color = False
    assert console.paint("x", "31", terminal) == "x"
    console.reset([])
    assert console.paint("x", "31") == "x"  # pytest's stderr is no terminal


def test_no_color_flag_reaches_the_console(acting: Shell) -> None:
    seen: list[bool] = []
    acting(lambda *_: seen.append(console.modes.color), "act", "--no-color")
    acting(lambda *_: seen.append(console.modes.color), "act")
    assert seen == [False, True]


def test_progress_is_silent_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("reading", total=3) as advance:
        advance()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", ["sft --help", "completion zsh"])
@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_a_closed_pipe_is_quiet_success(words: str, reader: str) -> None:
    command = f"'{sys.executable}' -m posttrain_cli {words} | {reader}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_broken_pipe_elsewhere_is_a_failure(acting: Shell) -> None:
    answer = acting(failing(BrokenPipeError(errno.EPIPE, "Broken pipe")), "act")
    assert answer.code == 3
    assert answer.err == "error: a pipe or socket was closed by the other side\n"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from posttrain_cli.cli.app import run; assert run(['--help']) == 0; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run_python(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda row: row.name)
def test_help_of_a_command_imports_no_torch_and_no_data_frames(command: Command) -> None:
    heavy = [name for name in HEAVY if name != "pydantic"]
    code = (
        f"import sys; from posttrain_cli.cli.app import run; run(['{command.name}', '--help']); "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert run_python(code).splitlines()[-1] == "[]"


def test_help_takes_less_than_twice_the_time_of_its_libraries() -> None:
    def seconds(code: str) -> float:
        begin = time.perf_counter()
        run_python(code)
        return time.perf_counter() - begin

    libraries = "import typer, rich"
    own = "from posttrain_cli.cli.app import run; run(['--help'])"
    rounds = [(seconds(libraries), seconds(own)) for _ in range(7)]  # alternating, against noise
    assert min(b for _, b in rounds) < 2 * min(a for a, _ in rounds)


def test_python_dash_m_runs_the_same_app(ptc: Shell, tmp_path: Path) -> None:
    done = ptc("--version", cwd=tmp_path)
    assert (done.code, done.stdout, done.stderr) == (0, f"ptc {__version__}\n", "")


def test_the_reader_of_stdout_is_there() -> None:
    reader, writer = os.pipe()
    saved = os.dup(1)
    try:
        os.dup2(writer, 1)
        assert app._reader_gone() is False
        os.close(reader)
        assert app._reader_gone() is True
    finally:
        os.dup2(saved, 1)
        for descriptor in (saved, writer):
            os.close(descriptor)
