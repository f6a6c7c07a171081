"""What is derived from the code is up to date, and what is written about commands is true."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from posttrain_cli.cli.app import COMMANDS, build
from posttrain_cli.diagnostics import CODES
from posttrain_cli.schema import settings

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """scripts/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "scripts" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_up_to_date(
    generate: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().out + "run `make generate`"


def test_check_names_what_is_stale_and_writes_nothing(
    generate: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["--check"]) == 1
    out, err = capsys.readouterr()
    assert "stale: docs/cli.md\n" in out
    assert "run `make generate`" in err
    assert list(tmp_path.iterdir()) == []
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    (tmp_path / "docs" / "config.md").write_text("old")
    capsys.readouterr()
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == "stale: docs/config.md\n"
    assert generate.main(["--nonsense"]) == 2


def test_references_cover_commands_settings_and_codes() -> None:
    commands = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    config = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    codes = (ROOT / "docs" / "codes.md").read_text(encoding="utf-8")
    assert all(f"## ptc {row.name}\n" in commands for row in COMMANDS)
    assert all(f"| `{row.name}` |" in config for row in settings().values())
    assert all(f"## {code}: " in codes for code in CODES)


def test_the_json_schema_knows_every_key_and_the_aliases() -> None:
    schema = json.loads((ROOT / "docs" / "config.schema.json").read_text(encoding="utf-8"))
    for row in settings().values():
        section = schema["properties"][row.section]["$ref"].split("/")[-1]
        assert row.name in schema["$defs"][section]["properties"]
        assert schema["$defs"][section]["additionalProperties"] is False
    assert "path" in schema["$defs"]["ModelConfig"]["properties"]


def command_lines() -> list[tuple[str, str]]:
    """Every `ptc …` line of the help and of the written documentation, with where it stands."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = []
    for file in files:
        text = file.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = re.findall(r"^ *(?:\$ )?(?:cat \S+ \| )?(ptc [a-z-]+.*)", text, re.MULTILINE)
        found += [(file.name, line) for line in lines]
    return found


@pytest.mark.parametrize(("where", "line"), command_lines())
def test_every_command_line_that_is_written_down_can_be_parsed(where: str, line: str) -> None:
    words = shlex.split(re.split(r" [|>] ?", line)[0].split("  #")[0])
    name, arguments = words[1], words[2:]
    group = get_command(build([name]))
    assert name in group.commands, f"{where}: {line}"  # type: ignore[attr-defined]
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, arguments, resilient_parsing=False)


def test_there_are_command_lines_to_check() -> None:
    assert len(command_lines()) >= 20
