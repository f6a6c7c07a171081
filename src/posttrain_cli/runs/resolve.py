"""From what the user calls a model to the folders that hold it.

A model is named by a run, a checkpoint of a run, a PEFT adapter, a Hugging Face folder or a
hub id. Nothing is loaded here and torch is not needed. Whatever looks like a path is looked up
on disk only; a hub id is looked up in the local cache, and on the network only on request.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from posttrain_cli.errors import UsageError, did_you_mean
from posttrain_cli.paths import looks_like_path

Kind = Literal["run", "checkpoint", "adapter", "hf"]
Form = Literal["full", "adapter", "sharded"]

_STEP = re.compile(r"step_\d{8,}")
# All that a model needs: no pickled weights, no code.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's parts are.

    Attributes:
        kind: what the user named.
        path: the folder the user named, absolute.
        form: what `weights` holds: a whole model, a PEFT adapter, or the sharded trainable
            tensors of a checkpoint.
        weights: folder of the weights.
        base: Hugging Face folder below an adapter or a checkpoint; None for a whole model.
        tokenizer: folder of tokenizer.json, template and generation config.
        adapter: folder whose adapter_config.json gives the LoRA shape: `weights` for an
            adapter; for a checkpoint the adapter its run started from, if any.
        run: the run directory of a run or checkpoint.
        template: the template the run was trained with (`data.template`), for a checkpoint;
            everywhere else the folder's own, `tokenizer`.
    """

    kind: Kind
    path: Path
    form: Form
    weights: Path
    base: Path | None
    tokenizer: Path
    adapter: Path | None = None
    run: Path | None = None
    template: str = "tokenizer"


def resolve_model(
    name: str | Path,
    base: str | Path | None = None,
    *,
    folder: Path | None = None,
    allow_download: bool = False,
) -> ModelSource:
    """Find the folders behind `name`.

    Args:
        name: run, checkpoint, adapter, Hugging Face folder or hub id.
        base: the base model of an adapter or checkpoint, instead of the one stored in it.
        folder: what relative paths are relative to (default: the working directory).
        allow_download: whether a hub id may be fetched from the network.

    Raises:
        UsageError: nothing there, nothing usable there, or the base is gone.
    """
    path = find_folder(name, folder=folder, allow_download=allow_download)
    if (path / "run.json").is_file():
        return _from_run(path, base, allow_download)
    if (path / "MANIFEST.json").is_file() or _STEP.fullmatch(path.name):
        return _from_checkpoint(path, base, allow_download)
    if (path / "adapter_config.json").is_file():
        return _from_adapter(path, base, allow_download)
    source = _from_hf(path)
    if base is not None:
        raise UsageError(
            f"`{path}` is a whole model, a base cannot be put under it",
            hint="leave --base out, or name an adapter with --model",
        )
    return source


def find_folder(
    name: str | Path, *, folder: Path | None = None, allow_download: bool = False
) -> Path:
    """The absolute folder that `name` means; see `resolve_model`."""
    if not str(name).strip():
        raise UsageError("the model is an empty text, expected a folder or a hub id")
    if looks_like_path(name, folder):
        place = (folder or Path.cwd()) / Path(name).expanduser()
        path = Path(os.path.abspath(place))  # noqa: PTH100 (links keep their names)
        if path.is_dir():
            return path
        what = "is a file, expected a folder" if path.exists() else "does not exist"
        near = did_you_mean(path.name, _names(path.parent)) if not path.exists() else ""
        raise UsageError(
            f"model `{path}` {what}",
            hint=near or "name a run, a checkpoint, an adapter or a Hugging Face folder",
        )
    cached = _cached_snapshot(str(name))
    if cached is not None:
        return cached
    if allow_download:
        return _download(str(name))
    place = (folder or Path.cwd()) / str(name)
    raise UsageError(
        f"model `{name}` is neither a folder (`{place}`) nor in the local cache (`{_cache()}`)",
        hint="check the path, or pass --allow-download to fetch it from the hub",
    )


def _from_hf(path: Path) -> ModelSource:
    """A Hugging Face folder: config.json and safetensors."""
    if not (path / "config.json").is_file():
        raise UsageError(
            f"`{path}` holds no model: expected config.json (Hugging Face folder), "
            "adapter_config.json (adapter), run.json (run) or MANIFEST.json (checkpoint)",
            hint=_inside_hint(path),
        )
    if not any(path.glob("*.safetensors")):
        pickled = sorted(file.name for file in path.glob("*.bin"))
        found = f"only `{pickled[0]}`, a pickle, which can run code" if pickled else "none"
        raise UsageError(
            f"`{path}` has no weights in safetensors format: found {found}",
            hint="convert the weights to safetensors, or download the folder again",
        )
    _require_tokenizer(path)
    return ModelSource("hf", path, "full", path, None, path)


def _from_adapter(path: Path, base: str | Path | None, allow_download: bool) -> ModelSource:
    """A PEFT adapter on a base that it names itself, unless `base` says otherwise."""
    if not (path / "adapter_model.safetensors").is_file():
        raise UsageError(
            f"adapter `{path}` has no adapter_model.safetensors",
            hint="its training did not finish, or it was saved as a pickle: save it again",
        )
    owner = f"adapter `{path}`"
    stored = _read_json(path / "adapter_config.json").get("base_model_name_or_path")
    here = path if isinstance(stored, str) and (path / stored).exists() else None
    below = _resolve_below(owner, stored, base, here, allow_download)
    if below.form != "full":
        raise UsageError(
            f"the base of {owner} is `{below.path}`, which is no whole model",
            hint="merge it into one with `ptc export --merge`, and name the result with --base",
        )
    tokenizer = path if (path / "tokenizer.json").is_file() else below.tokenizer
    return ModelSource("adapter", path, "adapter", path, below.weights, tokenizer, adapter=path)


def _from_run(path: Path, base: str | Path | None, allow_download: bool) -> ModelSource:
    """A run: its result in RUN/model."""
    model = path / "model"
    if not model.is_dir():
        hint = f"go on with `ptc resume {path}`"
        newest = newest_checkpoint(path)
        if newest is not None:
            hint += f", or use its newest checkpoint: `{newest}`"
        raise UsageError(f"run `{path}` has no result yet: `{model}` is missing", hint=hint)
    result = resolve_model(model, base, allow_download=allow_download)
    return replace(result, kind="run", path=path, run=path)


def _from_checkpoint(path: Path, base: str | Path | None, allow_download: bool) -> ModelSource:
    """A checkpoint: trainable tensors in shards, over the model its run started from."""
    if not (path / "MANIFEST.json").is_file():
        raise UsageError(
            f"checkpoint `{path}` is not whole: it has no MANIFEST.json",
            hint="it was cut off while being written: use another one",
        )
    run = path.parent.parent
    if not (run / "config.yaml").is_file():
        raise UsageError(
            f"checkpoint `{path}` is outside its run: `{run / 'config.yaml'}` is missing",
            hint="a checkpoint holds only what was trained: keep it at RUN/checkpoints/",
        )
    config = _read_yaml(run / "config.yaml")
    stored = _entry(config, "model", "partial_pretrain")
    start = _resolve_below(f"checkpoint `{path}`", stored, base, run, allow_download)
    return ModelSource(
        "checkpoint",
        path,
        "sharded",
        path,
        start.base or start.weights,
        start.tokenizer,
        adapter=start.adapter,
        run=run,
        template=_entry(config, "data", "template") or "tokenizer",
    )


def _resolve_below(
    owner: str, stored: object, base: str | Path | None, folder: Path | None, allow_download: bool
) -> ModelSource:
    """The model under `owner`: the one stored in it, or the `base` that the user gives instead.

    A checkpoint may be of a run that trained an adapter further: `base` then goes under that.
    """
    if base is not None:
        start = (folder or Path.cwd()) / str(stored)
        adapters = (start / "adapter_config.json", start / "model" / "adapter_config.json")
        if any(config.is_file() for config in adapters):
            return resolve_model(start, base, allow_download=allow_download)
        return resolve_model(base, allow_download=allow_download)
    if not isinstance(stored, str) or not stored:
        raise UsageError(f"{owner} does not name its base", hint="name it with --base DIR")
    try:
        return resolve_model(stored, folder=folder, allow_download=allow_download)
    except UsageError as error:
        raise UsageError(
            f"the base of {owner} cannot be used, it is stored as `{stored}`: {error.message}",
            hint="name the base with --base DIR",
        ) from None


def newest_checkpoint(run: Path) -> Path | None:
    """The whole checkpoint of the highest step below RUN/checkpoints, or None."""
    whole = (path.parent for path in (run / "checkpoints").glob("step_*/MANIFEST.json"))
    steps = (path for path in whole if _STEP.fullmatch(path.name))
    return max(steps, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _require_tokenizer(path: Path) -> None:
    if not (path / "tokenizer.json").is_file():
        raise UsageError(
            f"`{path}` has no tokenizer.json",
            hint="save the fast tokenizer into it: AutoTokenizer…save_pretrained(DIR)",
        )


def _inside_hint(path: Path) -> str:
    """Name a model one level below `path`, if there is one."""
    marks = ("run.json", "adapter_config.json", "config.json")
    inside = sorted(file.parent for mark in marks for file in path.glob(f"*/{mark}"))
    return f"did you mean `{inside[0]}`?" if inside else "name the folder that holds those files"


def _entry(config: dict[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"`{path}` is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"`{path}` is not a JSON object")
    return content


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"`{path}` is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"`{path}` is not a YAML mapping")
    return content


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _cache() -> Path:
    """Where the Hugging Face tools keep downloads, by their own environment variables."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(home).expanduser() / "hub"


def _cached_snapshot(hub_id: str) -> Path | None:
    """The folder of `hub_id` at `main` in the local cache, if it was ever downloaded."""
    repository = _cache() / ("models--" + hub_id.replace("/", "--"))
    reference = repository / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = repository / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def _download(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            "downloading a model needs the package `huggingface_hub`",
            hint="pip install 'posttrain-cli[train]'",
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises a dozen kinds, none of them a fault of ours
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"model `{hub_id}` could not be downloaded: {lines[0]}",
            hint="check the id and the network, or name a folder on disk",
        ) from None
