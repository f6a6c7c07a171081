"""A chat on the terminal: answers appear as they are drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain_cli.cli import console
from posttrain_cli.data.records import Message
from posttrain_cli.errors import PtcError
from posttrain_cli.files import atomic_write, refuse_existing

if TYPE_CHECKING:
    from posttrain_cli.rollout.protocol import Sampling
    from posttrain_cli.rollout.session import Session

_COMMANDS = "/reset forgets, /system TEXT sets the system turn, /save FILE keeps, /quit ends"


@dataclass(slots=True)
class Conversation:
    """What was said so far."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)
    answered: int = 0

    def messages(self) -> list[Message]:
        """All turns, the system turn first."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]


def talk(session: Session, sampling: Sampling, system: str) -> None:
    """Read lines from the terminal and answer them until /quit or the end of input."""
    from posttrain_cli.cli.infer import warn_if_idle

    warn_if_idle(session)
    console.say(f"{session.source.path}: {_COMMANDS}; Ctrl-C stops an answer")
    conversation = Conversation(system)
    for line in _lines():
        if line.startswith("/"):
            if not obey(conversation, line):
                return
        elif line.strip():
            _answer(session, conversation, line, sampling)


def obey(conversation: Conversation, line: str) -> bool:
    """Do what a line that starts with a slash says; False ends the chat."""
    command, _, rest = line.partition(" ")
    if command in ("/quit", "/exit"):
        return False
    if command == "/reset":
        conversation.turns.clear()
        console.say("forgotten")
    elif command == "/system":
        conversation.system = rest.strip()
        conversation.turns.clear()
        console.say("system turn set, conversation forgotten")
    elif command == "/save":
        _save(conversation, rest.strip())
    else:
        console.say(f"unknown command `{command}`: {_COMMANDS}")
    return True


def _save(conversation: Conversation, name: str) -> None:
    """Write the conversation as one record that `ptc sft` could train on."""
    if not name or not conversation.turns:
        console.say("nothing said yet" if name else "say where: /save FILE")
        return
    record = json.dumps({"messages": conversation.messages()}, ensure_ascii=False)
    try:
        refuse_existing(Path(name), overwrite=False)
        atomic_write(Path(name), record + "\n")
    except (PtcError, OSError) as error:
        console.say(f"not saved: {error}")
        return
    console.say(f"saved to {Path(name).absolute()}")


def _answer(session: Session, conversation: Conversation, line: str, sampling: Sampling) -> None:
    """Stream one answer; an answer that was stopped stays in the conversation as it is."""
    turns = [*conversation.messages(), {"role": "user", "content": line}]
    try:
        ids = session.prompt_ids(turns)
    except PtcError as error:
        console.say(f"{error.message}; /reset starts anew")
        return
    pieces: list[str] = []
    stream = session.stream(conversation.answered, ids, replace(sampling, n=1))
    try:
        for piece in stream:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()
        console.say(" (stopped)")
    print(flush=True)
    conversation.answered += 1
    conversation.turns += [
        {"role": "user", "content": line},
        {"role": "assistant", "content": "".join(pieces)},
    ]


def _lines() -> Iterator[str]:
    """Lines typed after a prompt, with editing and history; Ctrl-C and Ctrl-D end them."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() uses it once it is imported
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print(flush=True)
            return
