from __future__ import annotations

import json

from posttrain_cli.cli.render import github_line, sarif, text_line
from posttrain_cli.data.validate import Report
from posttrain_cli.diagnostics import Finding


def test_places_without_lines_are_rows() -> None:
    found = Finding("a.parquet", "PTC204", "field 'chosen' is empty", row=7, hint="fill it")
    assert text_line(found) == "a.parquet:7:1: PTC204 error: field 'chosen' is empty"
    assert github_line(found) == (
        "::error file=a.parquet,title=PTC204::row 7: field 'chosen' is empty (fill it)"
    )
    (result,) = json.loads(sarif(Report([], {}, [found], {}, ok=False)))["runs"][0]["results"]
    assert result["message"]["text"] == "row 7: field 'chosen' is empty\nfill it"
    assert "region" not in result["locations"][0]["physicalLocation"]
    assert text_line(Finding("a", "PTC110", "none")) == "a:1:1: PTC110 error: none"


def test_github_escapes_what_would_end_the_command() -> None:
    found = Finding("d:x,y.jsonl", "PTC103", "100% `a`\r\nb", line=2, column=3)
    assert github_line(found) == (
        "::error file=d%3Ax%2Cy.jsonl,line=2,col=3,title=PTC103::100%25 `a`%0D%0Ab"
    )


def test_sarif_names_files_by_uri() -> None:
    paths = ["sub dir/é.jsonl", "/abs/a b.jsonl", "s3://bucket/a.jsonl"]
    findings = [Finding(path, "PTC106", "m", line=1) for path in paths]
    results = json.loads(sarif(Report([], {}, findings, {}, ok=True)))["runs"][0]["results"]
    uris = [r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in results]
    assert uris == ["sub%20dir/%C3%A9.jsonl", "file:///abs/a%20b.jsonl", "s3://bucket/a.jsonl"]
