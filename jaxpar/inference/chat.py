"""A conversation with a model in the terminal, or through a pipe."""

import contextlib
import math
import sys
from collections.abc import Callable, Generator, Iterator

from jaxpar.checkpoint.best import step_of
from jaxpar.config import ConfigError
from jaxpar.config.options import check_ranges
from jaxpar.data.prepare.chat import TEMPLATES, ChatEncoder
from jaxpar.inference.generation import generate
from jaxpar.inference.load import LoadedModel, load
from jaxpar.inference.options import ChatOptions
from jaxpar.runtime.processes import rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.runtime.terminal import write_generated

#: What the lines that begin with a slash do.
HELP = "/reset starts over, /system TEXT sets the instruction, /quit ends (also Ctrl-D)"


def check(options: ChatOptions) -> None:
    """Raises:   ConfigError for an option that cannot work."""
    rendezvous.require_single_process("jaxpar.sample --chat")
    check_ranges(options)
    how = options.sampling
    if not (math.isfinite(how.temperature) and how.temperature >= 0):
        fix = "use --temperature 0.8"
        raise ConfigError("--temperature", how.temperature, "must be 0 or more", fix)
    if not 0 < how.top_p <= 1:
        rule = "must be above 0 and at most 1"
        raise ConfigError("--top-p", how.top_p, rule, "use --top-p 0.95")


def template_of(model: LoadedModel) -> str:
    """Return the first template whose special tokens the tokenizer has; plain without any."""
    for name in TEMPLATES:
        if name != "plain" and ChatEncoder.fits(name, model.tokenizer):
            return name
    return "plain"


class Dialogue:
    """The messages so far, and the model that answers."""

    def __init__(self, model: LoadedModel, options: ChatOptions, log: Callable[[str], None]):
        name = template_of(model) if options.template == "auto" else options.template
        self.encoder = ChatEncoder(name, model.tokenizer)
        self._model, self._options, self._log = model, options, log
        self.system, self.messages = options.system, list[dict[str, str]]()
        log(f"[template {name}; {HELP}]")

    def reset(self) -> None:
        """Forget all messages but the instruction."""
        self.messages.clear()

    def prompt(self) -> list[int]:
        """Return the tokens before the answer, without the oldest messages if there are too many.

        The rest leaves room for the answer within the length of the training sequences.
        """
        length = self._model.cfg.data.seq_len
        most = max(length - self._options.max_tokens, length // 2)
        first = [{"role": "system", "content": self.system}] if self.system else []
        for left_out in range(0, len(self.messages), 2):
            ids = self.encoder.prompt(first + self.messages[left_out:])
            if len(ids) <= most or left_out + 2 >= len(self.messages):
                break
        if left_out:
            self._log(f"[the first {left_out} messages are left out: {length} tokens are too few]")
        if len(ids) > most:
            self._log(f"[the model sees the last {length} tokens of this message]")
        return ids

    def answer(self, text: str) -> Generator[str]:
        """Yield the answer to a message, piece by piece. An answer that is cut short is kept."""
        self.messages.append({"role": "user", "content": text})
        m, ids, shown = self._model, list[int](), ""
        made = generate(
            m.weights,
            m.cfg,
            m.mesh,
            [self.prompt()],
            self._options.sampling,
            max_tokens=self._options.max_tokens,
            vocab_size=m.tokenizer.vocab_size,
            stop={self.encoder.end_id, *m.ends},
        )
        try:
            with stage("compiling the model and reading the messages"):
                next(made)
            for (new,) in made:
                ids += new
                text = m.tokenizer.decode(ids)
                if not text.endswith("\ufffd"):  # half a character: wait for the rest
                    yield text[len(shown) :]
                    shown = text
            yield m.tokenizer.decode(ids)[len(shown) :]
        finally:
            said = {"role": "assistant", "content": m.tokenizer.decode(ids)}
            self.messages.append(said)


def chat(options: ChatOptions) -> None:
    """Answer messages until the input ends."""
    check(options)
    step = step_of(options.run, options.step)
    model = load(options.run, step, options.tensor, log, weights=options.weights, code=options.code)
    dialogue = Dialogue(model, options, log)
    for line in messages():
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command == "/reset":
            dialogue.reset()
            log("[a new conversation]")
        elif command == "/system":
            dialogue.system = rest.strip()
            dialogue.reset()
            log("[a new conversation, with this instruction]" if rest else "[no instruction]")
        elif command.startswith("/"):
            log(f"[{command} is not known: {HELP}]")
        else:
            _write(dialogue.answer(line))


def _write(pieces: Generator[str]) -> None:
    """Print an answer as it is generated. Ctrl-C ends the answer, not the program."""
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                write_generated(piece)
    except KeyboardInterrupt:
        log("\n[stopped]")
    write_generated("\n")


def messages() -> Iterator[str]:
    """Yield the lines of the input that are not empty. Ctrl-C and the end of a file end it."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            log("")
            return
        except UnicodeDecodeError:
            log("[a line that is not UTF-8 is left out]")
            continue
        if not line and not sys.stdin.isatty():
            return
        if line.strip():
            yield line.strip()


def log(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)
