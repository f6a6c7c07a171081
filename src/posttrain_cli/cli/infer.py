"""`ptc infer`: prompts, files of questions or a chat, with template and end ids of training."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from posttrain_cli.cli import console
from posttrain_cli.errors import UsageError

if TYPE_CHECKING:
    from posttrain_cli.rollout.protocol import Sampling
    from posttrain_cli.rollout.session import Session
    from posttrain_cli.runs.resolve import ModelSource

Model = Annotated[
    str, typer.Option("--model", metavar="DIR", help="run, checkpoint, adapter or model folder")
]
Base = Annotated[
    str | None, typer.Option("--base", metavar="DIR", help="base of an adapter, if it moved")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="what to ask (repeatable; - is stdin)"),
]
Input = Annotated[
    str | None, typer.Option("--input", metavar="FILE", help="questions, one a record; - is stdin")
]
Out = Annotated[
    str, typer.Option("--out", metavar="FILE", help="answers as JSON lines; - is stdout")
]
System = Annotated[
    str, typer.Option("--system", metavar="TEXT", help="system turn in front of each question")
]
Raw = Annotated[bool, typer.Option("--raw", help="no chat template: complete the text")]
Compare = Annotated[
    str | None, typer.Option("--compare", metavar="DIR", help="a second model, asked the same")
]
Reward = Annotated[
    Literal["math"] | None,
    typer.Option("--reward", help="score answers: math compares final numbers (GSM8K accuracy)"),
]
Many = Annotated[int, typer.Option("--n", metavar="N", min=1, help="answers a question")]
NewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="tokens an answer may have")]
Temperature = Annotated[float, typer.Option(metavar="X", min=0, help="0 is greedy")]
TopP = Annotated[float, typer.Option(metavar="X", min=0, max=1, help="share of probability kept")]
TopK = Annotated[int, typer.Option(metavar="N", min=0, help="tokens kept; 0 keeps all")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="same seed, same answers")]
BatchSize = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="sequences at once (default: 16; on a GPU 64)"),
]
Engine = Annotated[Literal["auto", "hf", "vllm"], typer.Option(help="what generates")]
Gpus = Annotated[str, typer.Option("--gpus", metavar="N|auto|0", help="GPUs; 0 is the CPU")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="compute type: auto is bfloat16 on a GPU, float32 on a CPU"),
]
PromptKey = Annotated[str, typer.Option(metavar="NAME", help="field with the prompt")]
ResponseKey = Annotated[str, typer.Option(metavar="NAME", help="field with the right answer")]
MessagesKey = Annotated[str, typer.Option(metavar="NAME", help="field with the conversation")]
Chat = Annotated[bool, typer.Option("--chat", help="accept chat lists in prompt")]
Download = Annotated[
    bool, typer.Option("--allow-download", help="let a hub id be fetched from the network")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace the file --out")]


def infer(
    model: Model,
    base: Base = None,
    prompt: Prompts = None,
    input_file: Input = None,
    out: Out = "-",
    system: System = "",
    raw: Raw = False,
    compare: Compare = None,
    reward: Reward = None,
    n: Many = 1,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 42,
    batch_size: BatchSize = None,
    engine: Engine = "auto",
    gpus: Gpus = "auto",
    dtype: Dtype = "auto",
    prompt_key: PromptKey = "prompt",
    response_key: ResponseKey = "response",
    messages_key: MessagesKey = "messages",
    chat: Chat = False,
    allow_download: Download = False,
    overwrite: Overwrite = False,
) -> None:
    """Ask a model: one prompt, a file of questions, or a chat on a terminal.

    The model is a run, a checkpoint of a run, an adapter or a Hugging Face folder. Template and
    end tokens are those it was trained with. Answers are drawn by coordinates (seed, row, answer,
    position): the same whatever the batch size or the order.

    A file may hold prompts (`prompt` or `question`), or conversations (`messages`). Its records
    come out in order with all their fields and a `response`; a `response` of the input is kept
    as `reference`. Killed and started again, the command goes on where it was.

    In a chat: /reset forgets, /system TEXT sets the system turn, /save FILE keeps, /quit ends.

    Examples:
      ptc infer --model runs/first --prompt "What is 17 + 25?"
      ptc infer --model runs/first
      ptc infer --model runs/first --input test.jsonl --out answers.jsonl --temperature 0
      ptc infer --model runs/first --input test.jsonl --out scored.jsonl --reward math
      ptc infer --model models/smollm2 --compare runs/first --prompt "Who are you?" --temperature 0
      cat questions.jsonl | ptc infer --model runs/first --input - > answers.jsonl
    """
    from posttrain_cli.data.records import Keys
    from posttrain_cli.rollout.protocol import Sampling

    mode = _mode(prompt, input_file)
    _refuse_contradictions(
        {
            "`--prompt` and `--input`": mode == "prompt" and input_file is not None,
            "`--out` without `--input`": out != "-" and input_file is None,
            "`--reward` without `--input`": reward is not None and input_file is None,
            "a chat and `--compare`": mode == "chat" and compare is not None,
            "a chat and `--n`": mode == "chat" and n > 1,
            "a chat and `--raw`": mode == "chat" and raw,
            "`--raw` and `--system`": raw and bool(system),
            "`--top-p` and 0": top_p == 0,
        }
    )
    models = [(model, base), *([(compare, None)] if compare else [])]
    device = _choose_engine(engine, gpus)
    sources = [_resolve(name, below, allow_download) for name, below in models]
    sessions = [_open(source, raw, device, dtype, batch_size) for source in sources]
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, n, seed)
    if mode == "chat":
        from posttrain_cli.cli.chat import talk

        talk(sessions[0], sampling, system)
    elif mode == "prompt":
        _answer_prompts(sessions, prompt or [], system, sampling)
    else:
        from posttrain_cli.cli.infer_file import Job, answer_file

        keys = Keys(prompt=prompt_key, response=response_key, messages=messages_key, chat=chat)
        source = input_file or "-"
        answer_file(Job(sessions, sampling, source, out, keys, system, reward, overwrite))


def _mode(prompt: list[str] | None, input_file: str | None) -> Literal["prompt", "file", "chat"]:
    if prompt:
        return "prompt"
    if input_file is not None:
        return "file"
    if sys.stdin.isatty() and sys.stdout.isatty() and not console.modes.json:
        return "chat"
    raise UsageError(
        "nothing to answer: there is no prompt, and no terminal for a chat",
        hint="pass --prompt TEXT (- reads stdin), or --input FILE --out FILE",
    )


def _refuse_contradictions(pairs: dict[str, bool]) -> None:
    problems = [f"{name} cannot go together" for name, found in pairs.items() if found]
    if problems:
        raise UsageError(
            problems[0], hint="`ptc infer --help` has an example of each use", problems=problems
        )


def _choose_engine(engine: str, gpus: str) -> str:
    """The device; says what generates and why. Only `hf` does so in this version."""
    from posttrain_cli.rollout.session import choose_device

    if engine == "vllm":
        installed = importlib.util.find_spec("vllm") is not None
        raise UsageError(
            "the engine `vllm` is not part of this version"
            if installed
            else "the engine `vllm` needs the package `vllm`, which is not installed",
            hint="use `--engine auto` or `--engine hf`, which need nothing more"
            + ("" if installed else ", or pip install 'posttrain-cli[vllm]' on a GPU machine"),
        )
    device = choose_device(gpus)
    why = "as asked" if engine == "hf" else "the one that is here"
    console.say(f"engine hf ({why}) on {'a GPU' if device == 'cuda' else 'the CPU'}")
    return device


def _resolve(name: str, base: str | None, allow_download: bool) -> ModelSource:
    from posttrain_cli.runs.resolve import resolve_model

    return resolve_model(name, base, allow_download=allow_download)


def _open(
    source: ModelSource, raw: bool, device: str, dtype: str, batch_size: int | None
) -> Session:
    from posttrain_cli.rollout.session import open_session

    session = open_session(source, raw=raw, device=device, dtype=dtype, batch_size=batch_size)
    for changed in session.changes():
        console.warn(
            f"`{source.path}` was trained with another {changed}: "
            "answers may be worse than it can give"
        )
    return session


def _answer_prompts(
    sessions: list[Session], prompts: list[str], system: str, sampling: Sampling
) -> None:
    """Answer the prompts of the command line: text, or one JSON line a prompt."""
    from posttrain_cli.cli.infer_file import answer_fields
    from posttrain_cli.data.questions import with_system

    texts = [sys.stdin.read() if text == "-" else text for text in prompts]
    if not all(text.strip() for text in texts):
        raise UsageError("the prompt is empty", hint="write what the model is to answer")
    asked = [with_system([{"role": "user", "content": text}], system) for text in texts]
    ids = [[session.prompt_ids(turns) for turns in asked] for session in sessions]
    answers = []
    for session, rows in zip(sessions, ids, strict=True):
        warn_if_idle(session)
        found = session.answer(list(enumerate(rows)), sampling)
        answers.append([[session.text(one) for one in row] for row in found])
    for row, text in enumerate(texts):
        responses = [found[row] for found in answers]
        if console.modes.json:
            console.emit({"prompt": text, **answer_fields(responses)})
            continue
        if len(texts) > 1:
            console.out(f"> {text}")
        for session, given in zip(sessions, responses, strict=True):
            if len(sessions) > 1:
                console.out(console.paint(f"── {session.source.path}", "1", sys.stdout))
            console.out("\n---\n".join(given))


def warn_if_idle(session: Session) -> None:
    """Load the weights, and say so when an adapter among them changes nothing."""
    if session.adapter_is_idle:
        console.warn(
            f"the adapter `{session.source.path}` changes nothing (all its B matrices are zero): "
            "the answers are those of its base"
        )
