from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain_cli.data.tokenizer import TemplateRefusal, Tokenizer, load_tokenizer
from posttrain_cli.errors import UsageError
from tests.data import zoo
from tests.data.zoo import assistant, user


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return zoo.load(tmp_path_factory.mktemp("tokenizer"))


def rendered(tokenizer: Tokenizer, template: str, *messages: Any) -> str:
    return replace(tokenizer, template=template).render(list(messages), generation_prompt=False)


def test_ids_and_texts_of_a_folder(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.end_id) == (zoo.BOS, zoo.PAD, zoo.IM_END)
    assert tokenizer.end_ids == {zoo.IM_END}
    assert tokenizer.control_texts == zoo.SPECIAL
    assert tokenizer.template_name == "tokenizer"
    assert tokenizer.tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.encode(["<|im_end|>", ""]) == [[zoo.IM_END], []]


def test_no_special_token_is_added_and_nothing_is_cut_or_padded(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    folder = zoo.folder(tmp_path)
    backend = Backend.from_str(zoo.backend_json("bytes"))
    backend.post_processor = TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    text = "What is the capital of France?"
    (ids,) = load_tokenizer(folder).encode([text])
    assert load_tokenizer(folder).decode(ids, skip_special=False) == text


def test_special_tokens_come_from_either_file_and_spelling(tmp_path: Path) -> None:
    folder = zoo.folder(tmp_path, settings={"bos_token": None, "eos_token": {"content": "</s>"}})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": {"content": "<pad>"}}))
    tokenizer = load_tokenizer(folder, "plain")
    assert tokenizer.tokens == {"eos_token": "</s>", "unk_token": "<pad>", "bos_text": ""}
    assert tokenizer.bos_id is None
    assert tokenizer.end_id == zoo.EOS
    assert tokenizer.pad_id == zoo.EOS  # no pad token of its own: the end token fills rows


@pytest.mark.parametrize("listed", [zoo.EOT, [zoo.EOT, zoo.EOS]])
def test_end_ids_are_the_tokenizers_and_the_models_own(
    tmp_path: Path, listed: int | list[int]
) -> None:
    tokenizer = zoo.load(tmp_path, generation={"eos_token_id": listed})
    models_own = {listed} if isinstance(listed, int) else set(listed)
    assert tokenizer.end_ids == {zoo.IM_END} | models_own
    assert set(tokenizer.end_texts) == {zoo.SPECIAL[i] for i in tokenizer.end_ids}


def test_the_control_token_that_the_template_ends_answers_with_is_an_end_id(tmp_path: Path) -> None:
    base_model = {"eos_token": "</s>"}
    tokenizer = zoo.load(tmp_path / "base", settings=base_model)  # the template says <|im_end|>
    assert tokenizer.end_ids == {zoo.EOS, zoo.IM_END}
    known = zoo.load(tmp_path / "known", zoo.INSTRUCT, settings=base_model)
    assert known.end_ids == {zoo.EOS}
    for name, template in {"none": zoo.WITHOUT_END, "refuses": "{{ messages[7].role }}"}.items():
        assert zoo.load(tmp_path / name, template, settings=base_model).end_ids == {zoo.EOS}
    silent = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"  # prints no answer
    assert zoo.load(tmp_path / "silent", silent, settings=base_model).end_ids == {zoo.EOS}


def test_template_is_the_file_then_the_config_then_plain(tmp_path: Path) -> None:
    messages = [user("hi"), assistant("yo")]

    def text(folder: Path, choice: str = "tokenizer") -> str:
        return load_tokenizer(folder, choice).render(messages, generation_prompt=False)

    in_config = {"chat_template": "C{{ messages[0].content }}"}
    assert text(zoo.folder(tmp_path / "a", "F{{ messages[0].content }}", settings=in_config)) == (
        "Fhi"
    )
    assert text(zoo.folder(tmp_path / "b", None, settings=in_config)) == "Chi"
    several = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    assert text(zoo.folder(tmp_path / "c", None, settings={"chat_template": several})) == "D"
    bare = zoo.folder(tmp_path / "d", None)
    assert load_tokenizer(bare).template_name == "plain"
    assert text(bare) == "hiyo<|im_end|>"
    assert text(bare, "chatml") == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    )
    own = tmp_path / "own.jinja"
    own.write_text("own {{ messages[1].content }}", encoding="utf-8")
    assert text(bare, str(own)) == "own yo"
    assert load_tokenizer(bare, str(own)).template_name == str(own)


def test_plain_template_begins_as_the_tokenizer_begins_texts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    folder = zoo.folder(tmp_path, None)
    backend = Backend.from_str(zoo.backend_json("bytes"))
    backend.post_processor = TemplateProcessing("<s> $A", None, [("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    turns = [user("hi"), assistant("yo")]
    assert tokenizer.render(turns, generation_prompt=False) == "<s>hiyo<|im_end|>"
    # What is exported must say the same to a reader that does not know `bos_text`.
    portable = replace(tokenizer, template=tokenizer.portable_template, tokens={"eos_token": "E"})
    assert portable.render(turns, generation_prompt=False) == "<s>hiyoE"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "access to attribute '__class__'"),
        ("{{ raise_exception.__globals__.os }}", "access to attribute '__globals__'"),
        ("{{ self.__init__.__globals__ }}", "access to attribute '__init__'"),
        ("{{ cycler.__init__.__globals__.os }}", "access to attribute '__init__'"),
        ("{{ ('{0.__class__.__mro__}').format(messages) }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ messages[0].update(role='x') }}", "access to attribute 'update'"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{{ raise_exception('two users in a row') }}", "two users in a row"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ],
)
def test_template_can_neither_escape_nor_crash(
    tokenizer: Tokenizer, template: str, message: str
) -> None:
    with pytest.raises(TemplateRefusal, match="refuses this conversation") as caught:
        rendered(tokenizer, template, user("hi"))
    assert message in caught.value.message
    assert "--template" in caught.value.hint
    assert caught.value.exit_code == 2


def test_template_has_no_clock(tokenizer: Tokenizer) -> None:
    template = (
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024{% endif %}"
    )
    assert rendered(tokenizer, template, user("hi")) == "26 Jul 2024"


def test_template_sees_what_transformers_shows_it(tokenizer: Tokenizer) -> None:
    assert rendered(tokenizer, "{{ tools is none }} {{ documents is none }}") == "True True"
    text = rendered(tokenizer, "{{ messages | tojson }}", user("<é&'数>"))
    assert text == '[{"role": "user", "content": "<é&\'数>"}]'
    options = "tojson(indent=1, ensure_ascii=True, separators=(',', ':'), sort_keys=True)"
    assert rendered(tokenizer, "{{ {'b': 'é', 'a': 1} | " + options + " }}") == (
        '{\n "a":1,\n "b":"\\u00e9"\n}'
    )
    loop = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
    assert rendered(tokenizer, loop) == "13"
    blocks = "{% generation %}a{% endgeneration %}\n  {% if true %}\nb\n{% endif %}"
    assert rendered(tokenizer, blocks) == "ab\n"


def test_errors_of_a_folder_name_the_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"no tokenizer at `{tmp_path}/gone/tokenizer.json`"):
        load_tokenizer("gone")
    folder = zoo.folder(tmp_path / "bad")
    with pytest.raises(UsageError, match=f"no template at `{tmp_path}/my.jinja`"):
        load_tokenizer(folder, "my.jinja")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}\n{% if %}", encoding="utf-8")
    with pytest.raises(UsageError, match="template `tokenizer` is not valid Jinja: line 2: "):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=r"`/.*tokenizer_config.json` is not valid JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match=r"`/.*tokenizer.json` is not a readable tokenizer"):
        load_tokenizer(folder)


def test_chatml_needs_its_end_token(tmp_path: Path) -> None:
    folder = zoo.folder(tmp_path)
    text = zoo.backend_json("bytes").replace("<|im_end|>", "<|other|>")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"no `<.im_end.>` token") as caught:
        load_tokenizer(folder, "chatml")
    assert "--template plain" in caught.value.hint


def test_identity_follows_every_file_and_the_template(tmp_path: Path) -> None:
    folder = zoo.folder(tmp_path)
    seen = [load_tokenizer(folder).sha256]
    assert load_tokenizer(folder).sha256 == seen[0]
    seen.append(load_tokenizer(folder, "plain").sha256)
    for name in ("special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja"):
        path = folder / name
        path.write_text((path.read_text() if path.exists() else "{}") + " ")
        seen.append(load_tokenizer(folder).sha256)
    (folder / "tokenizer.json").write_text(zoo.backend_json("greedy"), encoding="utf-8")
    seen.append(load_tokenizer(folder).sha256)
    assert len(set(seen)) == len(seen) == 6


@pytest.mark.parametrize("kind", ["bytes", "greedy", "first", "always", "legacy"])
def test_pieces_get_the_ids_that_they_have_in_mid_text(tmp_path: Path, kind: str) -> None:
    tokenizer = zoo.load(tmp_path, kind=kind)
    texts = [["Hel", "lo there,", " how\n", "\nare", "  you"], ["Fra", "nce"], [], ["x"]]
    encoded = tokenizer.encode_pieces(texts)
    assert [len(ids) for ids in encoded] == [5, 2, 0, 1]
    for pieces, ids in zip(texts, encoded, strict=True):
        joined = [i for piece in ids for i in piece]
        assert tokenizer.decode(joined, skip_special=False) == "".join(pieces)
    assert encoded[3][0] == tokenizer.encode(["x"])[0]


def test_an_anchor_that_merges_with_its_piece_is_left_out(tmp_path: Path) -> None:
    folder = zoo.folder(tmp_path, kind="legacy")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    for token in ("\n", "\n\n"):
        vocabulary[token] = len(vocabulary)
    merges.insert(0, ["\n", "\n"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.anchor[0] == "\n"
    (ids,) = tokenizer.encode_pieces([["a", "\nb", "c"]])
    assert ids[1] == tokenizer.encode(["\nb"])[0]
    assert tokenizer.decode(ids[0] + ids[2]) == "ac"
