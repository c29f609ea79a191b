"""Conversations to tokens, and which of these are targets: what the assistant says.

A template lays a conversation out. Its special tokens are put in by id and never read out of text,
so that no message can forge the end of its turn or another's role. Each piece of text is encoded
on its own: where a model begins to answer, training and generation then see the same tokens.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.readers import input_error, valid_text
from jaxpar.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
ASSISTANT = "assistant"


class Special(str):
    """A special token of a template, by its text; `EOS` for the tokenizer's own end of text."""


EOS = Special("")


class Template(NamedTuple):
    """How a conversation is written: special tokens, and text."""

    head: tuple[str, ...]
    """Before a message's text; {role} is its role."""
    end: Special
    """After a message's text: a target where the text is one."""
    tail: tuple[str, ...] = ()
    """After that."""
    begin: tuple[str, ...] = ()
    """Before the first message."""
    strip: bool = False
    """Whether spaces around a message's text are left out."""


#: chatml is Qwen's, llama3 that of Llama 3 Instruct; plain needs no special token but the end.
TEMPLATES = {
    "plain": Template(("{role}:\n",), EOS),
    "chatml": Template((Special("<|im_start|>"), "{role}\n"), Special("<|im_end|>"), tail=("\n",)),
    "llama3": Template(
        (Special("<|start_header_id|>"), "{role}", Special("<|end_header_id|>"), "\n\n"),
        Special("<|eot_id|>"),
        begin=(Special("<|begin_of_text|>"),),
        strip=True,
    ),
}


class Conversation(NamedTuple):
    """A conversation as tokens."""

    ids: np.ndarray
    """int32 [tokens]."""
    targets: np.ndarray
    """bool [tokens]: what the assistant says, and the ends of its turns."""


class ChatEncoder:
    """Encodes conversations by one template."""

    def __init__(self, name: str, tokenizer: Tokenizer):
        """Look up the template's special tokens.

        Raises:   ConfigError("--template", ...) when the tokenizer lacks one of them.
        """
        self._template, self._tokenizer = TEMPLATES[name], tokenizer
        used = self._template
        self._ids = {
            piece: self._id_of(name, piece)
            for piece in (*used.begin, *used.head, used.end, *used.tail)
            if isinstance(piece, Special)
        }

    def _id_of(self, name: str, piece: Special) -> int:
        found = self._tokenizer.eos_id if piece == EOS else self._tokenizer.id_of(piece)
        if found is None:
            rule = f"needs the token {piece}, which the tokenizer does not have"
            fix = "use --template plain, or the tokenizer of a chat model"
            raise ConfigError("--template", name, rule, fix)
        return found

    def encode(self, messages: list[dict[str, str]]) -> Conversation:
        """The tokens of messages that `check_messages` has let through."""
        pieces = list(self._pieces(messages))
        texts = [piece for piece, _ in pieces if not isinstance(piece, Special)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        ids = [
            np.array([self._ids[piece]], np.int32) if isinstance(piece, Special) else next(encoded)
            for piece, _ in pieces
        ]
        flags = [np.full(len(part), flag) for part, (_, flag) in zip(ids, pieces, strict=True)]
        return Conversation(np.concatenate(ids), np.concatenate(flags))

    def _pieces(self, messages: list[dict[str, str]]) -> Iterator[tuple[str, bool]]:
        """Special tokens and texts, in order, each with whether it is a target."""
        template = self._template
        yield from ((piece, False) for piece in template.begin)
        for message in messages:
            role, text = message["role"], message["content"]
            for piece in template.head:
                special = isinstance(piece, Special)
                yield piece if special else piece.replace("{role}", role), False
            said = role == ASSISTANT
            yield text.strip() if template.strip else text, said
            yield template.end, said
            yield from ((piece, False) for piece in template.tail)


def check_messages(record: Any, field: str, where: str) -> list[dict[str, str]]:
    """The messages of a line of chat data.

    Raises:   ConfigError naming the line, for anything but a list of {"role", "content"} of text
              with something said by the assistant.
    """
    messages = record.get(field) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        rule = f"is not a JSON object with a list of messages in {field!r}"
        raise input_error(where, rule, "name the field of messages with --messages-field")
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            rule = f"message {number} has role {role!r}, not one of {', '.join(ROLES)}"
            raise input_error(where, rule, "rename the role, or remove the line")
        what, fix = f"message {number}'s content", "make it text, or remove the line"
        valid_text(message.get("content"), where, what, fix)
    if not any(message["role"] == ASSISTANT for message in messages):
        raise input_error(where, "has no message of the assistant to learn", "remove the line")
    return messages
