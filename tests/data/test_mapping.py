from __future__ import annotations

import pytest

from posttrain_cli.data.mapping import Rename, carried, parse_maps, rename
from posttrain_cli.errors import UsageError


def test_names_and_paths_are_renamed() -> None:
    record = {"a": 1, "b": {"c": [10, {"d": "deep"}]}, "e.f": "literal", "z": 0}
    renames = parse_maps(["x=a", "deep=b.c.1.d", "last=b.c.-2", "dotted=e.f"])
    assert rename(record, renames) == {
        "b": {"c": [10, {"d": "deep"}]},
        "z": 0,
        "x": 1,
        "deep": "deep",
        "last": 10,
        "dotted": "literal",
    }


def test_fields_can_change_places() -> None:
    assert rename({"a": 1, "b": 2}, parse_maps(["a=b", "b=a"])) == {"a": 2, "b": 1}


@pytest.mark.parametrize("path", ["b.x", "b.c.9", "b.c.-9", "b.c.x", "a.b", "nothing", "b..c"])
def test_a_path_that_leads_nowhere_adds_nothing(path: str) -> None:
    record = {"a": "text", "b": {"c": [1]}}
    assert "new" not in rename(record, (Rename("new", path),))


def test_a_field_that_is_overwritten_by_nothing_is_gone() -> None:
    assert rename({"prompt": "old"}, parse_maps(["prompt=missing"])) == {}


def test_all_bad_maps_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_maps(["prompt", "=x", "a=b", "a=c"])
    assert caught.value.problems == (
        "`--map prompt` is not of the form new=old",
        "`--map =x` is not of the form new=old",
        "`--map a=c` gives the field `a` a second time",
    )


def test_carried_fields() -> None:
    source = {"prompt": "p", "id": 1, "score": 2, "metadata": {}}
    assert carried(source, {"prompt"}, None) == {"id": 1, "score": 2}
    assert carried(source, {"prompt"}, ("score", "absent", "prompt")) == {"score": 2}
    assert carried(source, {"prompt"}, ()) == {}
