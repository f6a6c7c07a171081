from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain_cli.data.validate import ValidateOptions, validate
from posttrain_cli.diagnostics import CODES, Finding, select_codes
from posttrain_cli.errors import UsageError

ERRORS = {
    *(f"PTC{n}" for n in (101, 102, 103, 104, 105, 108, 109, 110, 111)),
    *(f"PTC{n}" for n in (201, 202, 203, 204, 205, 302, 309, 402, 403, 404, 405, 501)),
}
WARNINGS = {f"PTC{n}" for n in (106, 107, 206, 301, 303, 304, 305, 306, 307, 308, 401, 502)}


def test_the_table_holds_every_code_with_its_severity() -> None:
    assert {code for code, row in CODES.items() if row.severity == "error"} == ERRORS
    assert {code for code, row in CODES.items() if row.severity == "warning"} == WARNINGS
    assert list(CODES) == sorted(CODES)
    for code, row in CODES.items():
        assert row.code == code
        assert all((row.title, row.why, row.fix, row.example))
    assert Finding("a", "PTC204", "m").severity == "error"


EXAMPLES = {code: row.example for code, row in CODES.items() if row.example[0] in "{["}


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_shows_its_code(code: str, tmp_path: Path) -> None:
    lines = EXAMPLES[code].split(" and {")
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([lines[0], *("{" + line for line in lines[1:]), '{"x": 1}']) + "\n")
    kind = "preference" if "rejected" in EXAMPLES[code] else "sft"
    report = validate([str(path)], ValidateOptions(kind=kind, workers=1))
    assert {finding.code for finding in report.findings if finding.line != 1 + len(lines)} == {code}
    assert len(EXAMPLES) >= 15


def test_codes_are_selected_by_their_beginning() -> None:
    assert select_codes() == frozenset(CODES)
    assert select_codes(["ptc20"], ["PTC206"]) == {f"PTC{n}" for n in range(201, 206)}
    assert select_codes([], ["PTC"]) == frozenset()
    with pytest.raises(UsageError) as caught:
        select_codes(["PTC1001"], ["", "X"])
    assert caught.value.problems[0] == "unknown code `PTC1001`; did you mean `PTC101`?"
    assert len(caught.value.problems) == 3
    assert json.dumps(caught.value.hint)
