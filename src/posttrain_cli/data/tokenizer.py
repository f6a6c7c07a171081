"""A tokenizer folder read without transformers: `tokenizer.json`, its chat template, its end ids.

Templates are rendered by a sandboxed Jinja environment that holds no clock: a template that
prints today's date would give other ids tomorrow, so `strftime_now` is left undefined and
templates fall back to their fixed date.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from posttrain_cli.errors import UsageError

Message = dict[str, Any]  # {"role": str, "content": str, ...}

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{{ bos_text }}{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


class TemplateRefusal(UsageError):
    """The template raised on a conversation (roles out of order, content it cannot print)."""


@dataclass(frozen=True)
class Tokenizer:
    """Ids and template of one model.

    Attributes:
        folder: where it was read from.
        backend: the `tokenizers` object; encodes without adding special tokens.
        template: Jinja source; `template_name` says which (tokenizer, chatml, plain or a file).
        tokens: `bos_token`, `eos_token` … as the template sees them.
        end_id: the id that ends an answer when the template does not say so itself.
        end_ids: every id that stops generation.
        bos_id: id of the begin token, or None.
        pad_id: id used to fill rows in generation.
        control_texts: texts that the tokenizer turns into control tokens.
        sha256: over the tokenizer files and the template.
    """

    folder: Path
    backend: Backend
    template: str
    template_name: str
    tokens: dict[str, str]
    end_id: int | None
    end_ids: frozenset[int]
    bos_id: int | None
    pad_id: int
    control_texts: tuple[str, ...]
    sha256: str

    def encode(self, texts: list[str], literal: bool = False) -> list[list[int]]:
        """Ids of each text, no special tokens added; `literal` keeps control texts plain text."""
        self.backend.encode_special_tokens = literal
        try:
            found = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        finally:
            self.backend.encode_special_tokens = False
        return [encoding.ids for encoding in found]

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of `ids`."""
        return str(self.backend.decode(ids, skip_special_tokens=skip_special))

    def has_control_text(self, text: str) -> str | None:
        """The first control text inside `text`, or None."""
        return next((control for control in self.control_texts if control in text), None)

    def render(self, messages: list[Message], generation_prompt: bool) -> str:
        """The template's text for `messages`."""
        from jinja2 import TemplateError

        try:
            text: str = self._compiled.render(
                messages=messages, add_generation_prompt=generation_prompt, **self.tokens
            )
            return text
        except (TemplateError, TypeError, ValueError, AttributeError) as error:
            raise TemplateRefusal(
                f"the chat template `{self.template_name}` refuses this conversation: {error}",
                hint="choose another template with --template chatml, plain or a file",
            ) from error

    @property
    def portable_template(self) -> str:
        """The template's source with nothing in it that only this module knows."""
        return self.template.replace("{{ bos_text }}", self.tokens.get("bos_text", ""))

    @cached_property
    def anchor(self) -> str:
        """Text to put before a part so that its ids are those it has in mid-text.

        Empty for byte-level vocabularies; a control text where the tokenizer would otherwise
        prepend a space to every text it is given (SentencePiece style).
        """
        first, second = self.encode(["a", "b"])
        clean = self.decode(first + second, skip_special=False) == "ab"
        return "" if clean or self.end_id is None else str(self.backend.id_to_token(self.end_id))

    @cached_property
    def _compiled(self) -> Any:
        return compile_template(self.template, self.template_name)


def compile_template(source: str, name: str) -> Any:
    """A sandboxed Jinja template; a syntax error names the template and its line."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks answers elsewhere; here it is its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(["name:endgeneration"], True)
            return body

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise UsageError(
            f"the chat template `{name}` is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def load_tokenizer(folder: Path | str, template: str = "tokenizer") -> Tokenizer:
    """Read a tokenizer folder.

    Args:
        folder: a folder with `tokenizer.json` (a Hugging Face model folder, a run's `model/`).
        template: `tokenizer` (its own chat template, `plain` if it has none), `chatml`,
            `plain`, or the path of a Jinja file.

    Raises:
        UsageError: a file is missing or cannot be used.
    """
    folder = Path(folder)
    backend = _read_backend(folder)
    settings = _read_json(folder / "tokenizer_config.json")
    tokens = _token_texts(settings, _read_json(folder / "special_tokens_map.json"))
    name, source = _template_source(folder, settings, template)
    if name == "plain":
        tokens["bos_text"] = _bos_text(backend, tokens)
    im_end = backend.token_to_id("<|im_end|>")
    if name == "chatml" and im_end is None:
        raise UsageError(
            f"the tokenizer of `{folder}` has no `<|im_end|>` token, which chatml needs",
            hint="use --template plain, or a file with a template of your own",
        )
    added = backend.get_added_tokens_decoder()
    end_id = backend.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
    end_ids = _end_ids(folder, end_id, im_end if name == "chatml" else None)
    pad = tokens.get("pad_token", tokens.get("eos_token", ""))
    return Tokenizer(
        folder=folder,
        backend=backend,
        template=source,
        template_name=name,
        tokens=tokens,
        end_id=end_id,
        end_ids=frozenset(end_ids),
        bos_id=backend.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None,
        pad_id=backend.token_to_id(pad) or 0,
        control_texts=tuple(token.content for token in added.values() if token.special),
        sha256=_identity(folder, source),
    )


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UsageError(
            f"no tokenizer at `{path.absolute()}`",
            hint="name a Hugging Face folder that holds a tokenizer.json",
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"`{path.absolute()}` is not a readable tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"`{path.absolute()}` is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_texts(settings: dict[str, Any], extra: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … as text, whichever of the two files and spellings hold them."""
    texts: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name, extra.get(name))
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            texts[name] = value
    return texts


def _template_source(folder: Path, settings: dict[str, Any], choice: str) -> tuple[str, str]:
    """(name, Jinja source) of the template the user chose."""
    if choice == "chatml":
        return "chatml", CHATML
    own = folder / "chat_template.jinja"
    if choice == "plain":
        return "plain", PLAIN
    if choice != "tokenizer":
        path = Path(choice)
        if not path.is_file():
            raise UsageError(
                f"no template at `{path.absolute()}`",
                hint="give tokenizer, chatml, plain or the path of a Jinja file",
            )
        return str(path), path.read_text(encoding="utf-8")
    if own.is_file():
        return "tokenizer", own.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named templates: the default one
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    return ("tokenizer", source) if isinstance(source, str) else ("plain", PLAIN)


def _bos_text(backend: Backend, tokens: dict[str, str]) -> str:
    """The begin token, if this tokenizer puts it before plain text by itself."""
    bos = tokens.get("bos_token")
    first = backend.encode("a").tokens[:1]
    return bos if bos is not None and first == [bos] else ""


def _end_ids(folder: Path, *known: int | None) -> set[int]:
    """Ids that stop generation: the known ones and the model's own list."""
    own = _read_json(folder / "generation_config.json").get("eos_token_id")
    listed = own if isinstance(own, list) else [own]
    return {i for i in [*known, *listed] if isinstance(i, int)}


def _identity(folder: Path, template: str) -> str:
    digest = hashlib.sha256(template.encode())
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
    return digest.hexdigest()
