"""Tokenize conversations, and mark the assistant's tokens as targets.

A template defines the layout of a conversation. Its special tokens are inserted by id and are never
parsed from text, so that a message cannot forge the end of its turn or another role. Each piece of
text is encoded separately, so that training and generation see the same tokens at the start of an
answer.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxpar.config import ConfigError
from jaxpar.data.formats.compressed import bad_row, valid_text
from jaxpar.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
ASSISTANT = "assistant"

#: Keys of a message that are part of what was said or done: a template that leaves them out would
#: train on another conversation.
MESSAGE_PARTS = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "images",
    "audio",
)

#: The same of a line.
ROW_PARTS = ("system", "tools", "functions")


class Special(str):
    """A special token of a template, by its text; `EOS` is the tokenizer's end of text."""


EOS = Special("")


class Template(NamedTuple):
    """The layout of a conversation: special tokens and text."""

    head: tuple[str, ...]
    """Before a message's text; {role} is its role."""
    end: Special
    """After a message's text; a target if the text is one."""
    tail: tuple[str, ...] = ()
    """After `end`."""
    begin: tuple[str, ...] = ()
    """Before the first message."""
    strip: bool = False
    """Whether to strip whitespace around a message's text."""


#: chatml is for Qwen, llama3 for Llama 3 Instruct; plain needs only the end of text.
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
    """A tokenized conversation."""

    ids: np.ndarray
    """int32 [tokens]."""
    targets: np.ndarray
    """bool [tokens]: the assistant's messages, and the ends of its turns."""


class ChatEncoder:
    """Encodes conversations with a template."""

    def __init__(self, name: str, tokenizer: Tokenizer):
        """Look up the template's special tokens.

        Raises:   ConfigError("--template", ...) if the tokenizer does not have one of them.
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
        """Encode messages that `check_messages` has accepted."""
        pieces = list(self._pieces(messages))
        texts = [piece for piece, _ in pieces if not isinstance(piece, Special)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        ids = [
            np.array([self._ids[piece]], np.int32) if isinstance(piece, Special) else next(encoded)
            for piece, _ in pieces
        ]
        flags = [np.full(len(part), flag) for part, (_, flag) in zip(ids, pieces, strict=True)]
        return Conversation(np.concatenate(ids), np.concatenate(flags))

    @classmethod
    def fits(cls, name: str, tokenizer: Tokenizer) -> bool:
        """Return whether a tokenizer has the special tokens of a template."""
        used = TEMPLATES[name]
        pieces = (*used.begin, *used.head, used.end, *used.tail)
        special = (piece for piece in pieces if isinstance(piece, Special) and piece != EOS)
        return all(tokenizer.id_of(piece) is not None for piece in special)

    @property
    def end_id(self) -> int:
        """The id of the token that ends a message."""
        return self._ids[self._template.end]

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Encode messages and the beginning of the assistant's answer: what training saw there."""
        ids = self.encode(messages).ids.tolist()
        for piece in self._template.head:
            if isinstance(piece, Special):
                ids.append(self._ids[piece])
            else:
                ids += map(int, self._tokenizer.encode(piece.replace("{role}", ASSISTANT)))
        return ids

    def _pieces(self, messages: list[dict[str, str]]) -> Iterator[tuple[str, bool]]:
        """Yield special tokens and texts in order, each with whether it is a target."""
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


def check_messages(field: str, record: Any, where: str) -> list[dict[str, str]]:
    """Return the messages of a line of chat data.

    Raises:   BadRow that names the line, unless it is a list of {"role", "content"} texts with a
              message of the assistant, and nothing beside it that belongs to the conversation.
    """
    messages = record.get(field) if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        rule = f"is not a JSON object with a list of messages in {field!r}"
        raise bad_row(where, rule, "set the field of messages with --messages-field")
    messages = checked(messages, where)
    if not any(message["role"] == ASSISTANT for message in messages):
        raise bad_row(where, "has no message of the assistant", "remove the line")
    told = {message["content"].strip() for message in messages}
    for name in ROW_PARTS:
        value = record.get(name)
        if name == field or not value or (isinstance(value, str) and value.strip() in told):
            continue
        rule = f"has {name!r} beside its messages, which no template writes"
        raise bad_row(where, rule, "put it into a message, or remove it")
    return messages


def checked(messages: list[Any], where: str, place: str = "") -> list[dict[str, str]]:
    """Return a list of messages, each with a role and a text, and nothing else.

    Args:     place: what an error says before the number of the message.
    Raises:   BadRow that names the line and the message. A message may have other keys, such as an
              id, but not those of what was said or done.
    """
    found = []
    for number, message in enumerate(messages, start=1):
        what = f"{place}message {number}"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            rule = f"{what} has role {role!r}, not one of {', '.join(ROLES)}"
            raise bad_row(where, rule, "rename the role, or remove the line")
        for name in MESSAGE_PARTS:
            if message.get(name):
                rule = f"{what} has {name!r}, which no template writes"
                raise bad_row(where, rule, "put it into the content, or remove it")
        fix = "use text, or remove the line"
        text = valid_text(message.get("content"), where, f"{what}'s content", fix)
        found.append({"role": role, "content": text})
    return found
