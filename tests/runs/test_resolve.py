from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain_cli.errors import UsageError
from posttrain_cli.paths import looks_like_path
from posttrain_cli.runs.resolve import newest_checkpoint, resolve_model


def make_adapter(folder: Path, base: object, *, tokenizer: bool = False) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def make_run(folder: Path, model: object, template: str = "tokenizer") -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    settings = {"model": {"partial_pretrain": model}, "data": {"template": template}}
    (folder / "config.yaml").write_text(json.dumps(settings))
    return folder


def make_checkpoint(run: Path, step: int, *, whole: bool = True) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    if whole:
        (folder / "MANIFEST.json").write_text("{}")
    return folder


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.exit_code == 2
    return caught.value.message, caught.value.hint


def test_a_hugging_face_folder_is_its_own_weights_and_tokenizer(tiny_model: Path) -> None:
    source = resolve_model(str(tiny_model))
    assert (source.kind, source.form, source.template) == ("hf", "full", "tokenizer")
    assert source.path == source.weights == source.tokenizer == tiny_model
    assert source.base is source.adapter is source.run is None


def test_an_adapter_brings_its_base_and_its_own_tokenizer_first(
    tmp_path: Path, tiny_model: Path
) -> None:
    with_own = resolve_model(make_adapter(tmp_path / "a", str(tiny_model), tokenizer=True))
    without = resolve_model(make_adapter(tmp_path / "b", str(tiny_model)))
    assert (with_own.kind, with_own.form) == ("adapter", "adapter")
    assert (with_own.base, with_own.adapter) == (tiny_model, tmp_path / "a")
    assert with_own.tokenizer == tmp_path / "a"
    assert without.tokenizer == tiny_model


def test_base_replaces_the_stored_one(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tmp_path / "a", "/gone/on/another/machine")
    assert resolve_model(adapter, base=tiny_model).base == tiny_model
    message, hint = refusal(lambda: resolve_model(adapter))
    assert "stored as `/gone/on/another/machine`" in message
    assert "--base DIR" in hint


def test_a_relative_base_is_looked_up_beside_the_adapter_and_then_here(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    beside = make_adapter(tmp_path / "x" / "a", "../../models/tiny")
    assert resolve_model(beside).base == tmp_path / "models" / "tiny"
    monkeypatch.chdir(tmp_path)
    here = make_adapter(tmp_path / "y" / "a", "models/tiny")
    assert resolve_model(here).base == tmp_path / "models" / "tiny"


@pytest.mark.parametrize("stored", [None, "", 3])
def test_an_adapter_that_names_no_base_says_so(tmp_path: Path, stored: object) -> None:
    adapter = make_adapter(tmp_path / "a", stored)
    message, hint = refusal(lambda: resolve_model(adapter))
    assert message == f"adapter `{adapter}` does not name its base"
    assert hint == "name it with --base DIR"


def test_an_adapter_on_an_adapter_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    lower = make_adapter(tmp_path / "lower", str(tiny_model))
    upper = make_adapter(tmp_path / "upper", str(lower))
    message, hint = refusal(lambda: resolve_model(upper))
    assert f"is `{lower}`, which is no whole model" in message
    assert "ptc export --merge" in hint


def test_an_adapter_without_weights_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tmp_path / "a", str(tiny_model))
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refusal(lambda: resolve_model(adapter))[0]


def test_a_run_means_its_result(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path / "run", str(tiny_model))
    make_adapter(run / "model", str(tiny_model), tokenizer=True)
    source = resolve_model(run)
    assert (source.kind, source.form) == ("run", "adapter")
    assert (source.path, source.run, source.weights) == (run, run, run / "model")
    assert source.base == tiny_model


def test_a_run_without_a_result_names_its_newest_whole_checkpoint(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = make_run(tmp_path / "run", str(tiny_model))
    message, hint = refusal(lambda: resolve_model(run))
    assert "has no result yet" in message
    assert hint == f"go on with `ptc resume {run}`"
    make_checkpoint(run, 90)
    newest = make_checkpoint(run, 1000)
    make_checkpoint(run, 2000, whole=False)
    assert f"newest checkpoint: `{newest}`" in refusal(lambda: resolve_model(run))[1]
    assert newest_checkpoint(run) == newest


def test_a_checkpoint_stands_on_what_its_run_started_from(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path / "run", str(tiny_model), template="plain")
    source = resolve_model(make_checkpoint(run, 5))
    assert (source.kind, source.form, source.template) == ("checkpoint", "sharded", "plain")
    assert (source.base, source.tokenizer, source.adapter) == (tiny_model, tiny_model, None)
    assert (source.run, source.weights) == (run, run / "checkpoints" / "step_00000005")


def test_a_checkpoint_of_a_further_trained_adapter_knows_both(
    tmp_path: Path, tiny_model: Path
) -> None:
    adapter = make_adapter(tmp_path / "a", "/gone")
    checkpoint = make_checkpoint(make_run(tmp_path / "run", str(adapter)), 5)
    assert "cannot be used" in refusal(lambda: resolve_model(checkpoint))[0]
    source = resolve_model(checkpoint, base=tiny_model)
    assert (source.form, source.base, source.adapter) == ("sharded", tiny_model, adapter)


def test_a_checkpoint_cut_off_or_alone_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run(tmp_path / "run", str(tiny_model))
    torso = make_checkpoint(run, 5, whole=False)
    assert "is not whole: it has no MANIFEST.json" in refusal(lambda: resolve_model(torso))[0]
    alone = make_checkpoint(tmp_path / "elsewhere", 5)
    message, hint = refusal(lambda: resolve_model(alone))
    assert "is outside its run" in message
    assert "RUN/checkpoints/" in hint


@pytest.mark.parametrize("text", ["a: [", "3"])
def test_a_broken_run_config_is_named(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run", "x")
    (run / "config.yaml").write_text(text)
    checkpoint = make_checkpoint(run, 1)
    assert f"`{run / 'config.yaml'}` is not" in refusal(lambda: resolve_model(checkpoint))[0]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_adapter_config_is_named(tmp_path: Path, text: str) -> None:
    adapter = make_adapter(tmp_path / "a", "x")
    (adapter / "adapter_config.json").write_text(text)
    assert "adapter_config.json` is not" in refusal(lambda: resolve_model(adapter))[0]


def test_a_base_under_a_whole_model_is_refused(tiny_model: Path) -> None:
    message, _ = refusal(lambda: resolve_model(tiny_model, base=tiny_model))
    assert message.endswith("is a whole model, a base cannot be put under it")


def test_folders_that_hold_no_usable_model_say_what_is_missing(
    tmp_path: Path, tiny_model: Path
) -> None:
    message, _ = refusal(lambda: resolve_model(tmp_path))
    assert "holds no model: expected config.json" in message
    (tmp_path / "inner").symlink_to(tiny_model)
    assert refusal(lambda: resolve_model(tmp_path))[1] == f"did you mean `{tmp_path / 'inner'}`?"
    (tmp_path / "config.json").write_text("{}")
    assert (
        "no weights in safetensors format: found none"
        in refusal(lambda: resolve_model(tmp_path))[0]
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "`pytorch_model.bin`, a pickle" in refusal(lambda: resolve_model(tmp_path))[0]
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert refusal(lambda: resolve_model(tmp_path))[0] == f"`{tmp_path}` has no tokenizer.json"


def test_what_looks_like_a_path_never_becomes_a_hub_id(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    for name in ("/a/b", "./a", "../a", "~/a", "a/b/c", "models/gone", Path("a"), "a b"):
        assert looks_like_path(name), name
    for name in ("org/name", "gpt2", "Qwen/Qwen2.5-0.5B-Instruct"):
        assert not looks_like_path(name), name
    message, hint = refusal(lambda: resolve_model("models/tinny", allow_download=True))
    assert message == f"model `{tmp_path / 'models' / 'tinny'}` does not exist"
    assert hint == "did you mean `tiny`?"
    (tmp_path / "file").write_text("")
    assert "is a file, expected a folder" in refusal(lambda: resolve_model("file"))[0]
    assert "empty text" in refusal(lambda: resolve_model(" "))[0]


def test_a_hub_id_is_looked_up_in_the_cache_and_not_on_the_network(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    message, hint = refusal(lambda: resolve_model("org/name"))
    assert f"`{tmp_path / 'org' / 'name'}`" in message
    assert f"local cache (`{tmp_path / 'home' / 'hub'}`)" in message
    assert "--allow-download" in hint
    repository = tmp_path / "home" / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc").symlink_to(tiny_model)
    assert resolve_model("org/name").weights == repository / "snapshots" / "abc"


def test_a_download_happens_only_on_request_and_fetches_no_pickle(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def download(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        if hub_id == "org/gone":
            raise OSError("no network\nmore")
        return str(tiny_model)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name", allow_download=True).weights == tiny_model
    assert asked == [("org/name", ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"])]
    message, _ = refusal(lambda: resolve_model("org/gone", allow_download=True))
    assert message == "model `org/gone` could not be downloaded: no network"
