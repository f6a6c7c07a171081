"""A tokenizer folder read without transformers: `tokenizer.json`, its chat template, its end ids.

Templates are rendered by a sandboxed Jinja environment that holds no clock: a template that
prints today's date would give other ids tomorrow, so `strftime_now` is left undefined and
templates fall back to their fixed date.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
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
_PROBE = "\ufdd0"  # stands for an answer; no text holds this noncharacter
# What a template may run into beside Jinja's own errors.
_TEMPLATE_FAULTS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


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

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, no special tokens added."""
        found = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def encode_pieces(self, texts: list[list[str]]) -> list[list[list[int]]]:
        """Ids of each piece of each text, in one call; no token spans two pieces.

        All but the first piece of a text get the ids that they have in mid-text.
        """
        anchor, head = self.anchor
        starts = [anchor if i else "" for pieces in texts for i in range(len(pieces))]
        flat = [piece for pieces in texts for piece in pieces]
        found = self.encode([start + piece for start, piece in zip(starts, flat, strict=True)])
        for i, ids in enumerate(found):
            if starts[i] and ids[: len(head)] == head:
                found[i] = ids[len(head) :]
            elif starts[i]:  # the anchor has merged with the piece
                found[i] = self.encode([flat[i]])[0]
        left = iter(found)
        return [[next(left) for _ in pieces] for pieces in texts]

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of `ids`."""
        return str(self.backend.decode(ids, skip_special_tokens=skip_special))

    def render(self, messages: list[Message], generation_prompt: bool) -> str:
        """The template's text for `messages`."""
        from jinja2 import TemplateError

        try:
            text: str = self._compiled.render(
                messages=messages,
                add_generation_prompt=generation_prompt,
                tools=None,
                documents=None,
                **self.tokens,
            )
            return text
        except (TemplateError, *_TEMPLATE_FAULTS) as error:
            raise TemplateRefusal(
                f"the chat template `{self.template_name}` refuses this conversation: {error}",
                hint="choose another template with --template chatml, plain or a file",
            ) from error

    @property
    def portable_template(self) -> str:
        """The template's source with nothing in it that only this module knows."""
        return self.template.replace("{{ bos_text }}", self.tokens.get("bos_text", ""))

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """The texts of `end_ids`."""
        texts = (self.backend.id_to_token(i) for i in sorted(self.end_ids))
        return tuple(text for text in texts if text)

    @cached_property
    def anchor(self) -> tuple[str, list[int]]:
        """Text to put before a piece so that its ids are those it has in mid-text, and its ids.

        Empty for byte-level vocabularies. Where the tokenizer prepends a space to every text
        (SentencePiece style) it is a control text, or a line feed if the space is prepended
        behind control texts, too.
        """
        for text in ("", *self.end_texts, "\n"):
            head, first, second = self.encode([text, text + "a", text + "b"])
            ids = first[len(head) :] + second[len(head) :]
            if self.decode(ids, skip_special=False) == "ab":
                return text, head
        return "", []

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


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' templates get it, with its parameters in their order."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


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
    end_id = backend.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
    pad = tokens.get("pad_token", tokens.get("eos_token", ""))
    tokenizer = Tokenizer(
        folder=folder,
        backend=backend,
        template=source,
        template_name=name,
        tokens=tokens,
        end_id=end_id,
        end_ids=frozenset(_end_ids(folder, end_id, im_end if name == "chatml" else None)),
        bos_id=backend.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None,
        pad_id=backend.token_to_id(pad) or 0,
        control_texts=tuple(_control_tokens(backend).values()),
        sha256=_identity(folder, source),
    )
    own_end = _template_end(tokenizer)
    if own_end is None:
        return tokenizer
    return replace(tokenizer, end_ids=tokenizer.end_ids | {own_end})


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


def _control_tokens(backend: Backend) -> dict[int, str]:
    added = backend.get_added_tokens_decoder()
    return {i: token.content for i, token in added.items() if token.special}


def _end_ids(folder: Path, *known: int | None) -> set[int]:
    """Ids that stop generation: the known ones and the model's own list."""
    own = _read_json(folder / "generation_config.json").get("eos_token_id")
    listed = own if isinstance(own, list) else [own]
    return {i for i in [*known, *listed] if isinstance(i, int)}


def _template_end(tokenizer: Tokenizer) -> int | None:
    """The control token that the template prints behind an answer, if no known end does.

    Base models often bring a chat template whose end token is none of their own end ids.
    """
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = tokenizer.render(turns, generation_prompt=False)
    except TemplateRefusal:
        return None
    _, found, tail = text.rpartition(_PROBE)
    printed = tokenizer.encode([tail])[0]
    if not found or tokenizer.end_ids & set(printed):
        return None
    control = _control_tokens(tokenizer.backend)
    return next((i for i in printed if i in control), None)


def _identity(folder: Path, template: str) -> str:
    digest = hashlib.sha256(template.encode())
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
    return digest.hexdigest()
