"""Adapts a loaded model to EleutherAI's Evaluation Harness (`lm_eval`, an optional package).

The results are those of the harness's own Hugging Face model (`HFLM`) on the exported model, to
rounding: what follows its rules says so.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxpar.config import ConfigError, replace
from jaxpar.convert.hf.tokenizer import as_json
from jaxpar.inference import harness_requests
from jaxpar.inference.generation import generate
from jaxpar.inference.harness_requests import GenerationRequest, sample_numbers
from jaxpar.inference.load import LoadedModel

#: As the harness's own messages, which its option `verbosity` shows.
_log = logging.getLogger("lm_eval.jaxpar")


class HarnessModel(TemplateLM):
    """Scores and generates text with a jaxpar model.

    If a text is longer than `max_length`, only its last tokens are used, with a warning.
    """

    def __init__(
        self, model: LoadedModel, batch_size: int, max_length: int | None = None, seed: int = 0
    ):
        """
        Args:     batch_size: texts at a time; results do not depend on it. max_length: tokens that
                  the model sees at a time. None: those of its training sequences. seed: of samples.
        Raises:   ConfigError for a `max_length` that the model has no positions for.
        """
        super().__init__()
        most = model.cfg.model.max_positions
        if max_length is not None and 0 < most < max_length:
            rule = f"is more than the model's {most} positions"
            raise ConfigError("--max-length", max_length, rule, f"use --max-length {most}")
        self.model, self.rows, self.seed = model, batch_size, seed
        self.max_length = max_length or model.cfg.data.seq_len
        # Where generation takes the number of tokens that it attends to from.
        self.cfg = replace(model.cfg, **{"data.seq_len": self.max_length})
        self.scores = harness_requests.make_scores(
            model.cfg, model.mesh, model.tokenizer.vocab_size
        )
        self._text = as_json(model.tokenizer)

    @property
    def batch_size(self) -> int:
        """Texts at a time."""
        return self.rows

    @property
    def eot_token_id(self) -> int:
        """The id of the end of text."""
        return int(self.model.tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context: beginning of text, or else end of text."""
        named = self.model.chat.specials.get("bos_token")
        found = None if named is None else self.model.tokenizer.id_of(named)
        if found is not None:
            return found
        return self.model.begin[-1] if self.model.begin else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """A name for caches of the harness, which depends on the tokenizer and the template."""
        return f"jaxpar__{self.model.tokenizer.fingerprint[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's chat template; None if it is not asked for.

        Raises:   ConfigError if the model has none.
        """
        return self._template() if chat_template else None

    def _template(self) -> str:
        found = self.model.chat.template
        if found is None:
            rule, fix = "the model has no chat template", "remove the option"
            raise ConfigError("--apply-chat-template", True, rule, fix)
        return found

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation, by the model's chat template.

        Raises:   ConfigError if the model has none, or it cannot render the conversation.
        """
        specials, answer = self.model.chat.specials, add_generation_prompt
        return harness_requests.render(self._template(), chat_history, specials, answer=answer)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encode a text, in which the names of special tokens are tokens, as chat templates need.

        A beginning of text is added if the model expects it. By default, none is added to a text
        that begins with one.
        """
        ids = self._text.encode(string, add_special_tokens=False).ids
        begin = add_special_tokens is not False
        if add_special_tokens is None and self.model.begin:
            begin = not string.startswith(self._named(self.prefix_token_id))
        return [*(self.model.begin if begin else ()), *ids]

    def _named(self, token: int) -> str:
        return self._text.decode([token], skip_special_tokens=False)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return (log probability, whether greedy decoding gives it) for each continuation.

        Raises:   ConfigError for a continuation without tokens, or with more than `max_length`.
        """
        for context, continuation in (request.args for request in requests):
            if not continuation:
                _refuse_continuation(context, continuation, "has no tokens to score")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> Any:
        """Do the same of tokens: (texts or None, tokens of the context, of the continuation)."""
        texts, cut = [], 0
        for named, context, continuation in requests:
            before, after = named or ("", "")
            if not continuation:
                _refuse_continuation(before, after, "has no tokens to score")
            if len(continuation) > self.max_length:
                rule = f"has {len(continuation)} tokens, and the model sees {self.max_length}"
                _refuse_continuation(before, after, rule)
            ids = [*context, *continuation]
            cut += len(ids) > self.max_length + 1
            texts.append((ids[-self.max_length - 1 :], len(continuation)))
        if cut:
            of = f"{cut:,} of {len(texts):,} contexts, with their continuations, are longer than"
            _log.warning(f"{of} {self.max_length} tokens: only their last tokens are used")
        found: list[Any] = [None] * len(texts)
        longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))
        with tqdm(total=len(texts), desc="Scoring", disable=disable_tqdm) as progress:
            for start in range(0, len(texts), self.rows):
                which = longest_first[start : start + self.rows]
                for i, score in zip(which, self._score([texts[i] for i in which]), strict=True):
                    found[i] = score
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
                progress.update(len(which))
        return found

    def _score(self, texts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Do the same for one batch of (tokens, number of tokens to score)."""
        positions = -(-max(len(ids) - 1 for ids, _ in texts) // harness_requests.POSITIONS)
        tokens = np.zeros((self.rows, positions * harness_requests.POSITIONS + 1), np.int32)
        for row, (ids, _) in zip(tokens, texts, strict=False):
            row[: len(ids)] = ids
        scores, likeliest = map(np.asarray, self.scores(self.model.weights, tokens))
        spans = [slice(len(ids) - 1 - n, len(ids) - 1) for ids, n in texts]
        return [
            (float(scores[i, span].sum(dtype=np.float64)), bool(likeliest[i, span].all()))
            for i, span in enumerate(spans)
        ]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each full text; every token is scored once."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(number)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        totals = np.zeros(len(requests))
        np.add.at(totals, owners, [score for score, _ in scores])
        for request, total in zip(requests, totals.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals.tolist()

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Generate text after each context, up to the first of its stop strings.

        Texts are written in batches, of contexts of similar lengths. A sampled text depends on its
        request, on how many equal ones precede it, and on the seed, not on the other requests.

        Raises:   ConfigError for arguments of generation that are unknown or impossible.
        """
        defaults = self.model.chat.sampling
        wanted = [GenerationRequest.of(r.args[0], r.args[1], defaults) for r in requests]
        prompts = self._prompts(wanted)
        numbers = sample_numbers(requests, self.seed)
        texts = [""] * len(wanted)
        with tqdm(total=len(wanted), desc="Writing", disable=disable_tqdm) as progress:
            for batch in self._batches(wanted, prompts):
                written = self._write([(prompts[i], wanted[i], numbers[i]) for i in batch])
                for i, text in zip(batch, written, strict=True):
                    texts[i] = text
                    if not wanted[i].sampled:
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                progress.update(len(batch))
        return texts

    def _prompts(self, wanted: Sequence[GenerationRequest]) -> list[list[int]]:
        """Encode contexts, without the tokens at their start that leave no room for the text."""
        prompts, cut, full = [], 0, 0
        for one in wanted:
            ids, room = self.tok_encode(one.context), self.max_length - one.max_tokens
            full += room <= 0
            cut += len(ids) > (room if room > 0 else self.max_length)
            # With no room at all, the window of the attention moves along the text.
            prompts.append(ids[-(room if room > 0 else self.max_length) :] or [self.eot_token_id])
        if cut:
            _log.warning(f"{cut:,} of {len(wanted):,} contexts are cut to their last tokens")
        if full:
            asked = f"{full:,} of {len(wanted):,} requests are for max_gen_toks of"
            seen = f"{self.max_length} or more, where each token attends to the last"
            _log.warning(f"{asked} {seen} {self.max_length} tokens")
        return prompts

    def _batches(
        self, wanted: Sequence[GenerationRequest], prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, ...]]:
        """Yield the numbers of requests that can be written together, long prompts first."""
        kind = lambda i: (repr(wanted[i].sampling), wanted[i].max_tokens)  # noqa: E731
        order = sorted(range(len(wanted)), key=lambda i: (*kind(i), -len(prompts[i])))
        for _, group in itertools.groupby(order, key=kind):
            yield from itertools.batched(group, self.rows)

    def _write(self, batch: Sequence[tuple[list[int], GenerationRequest, int]]) -> list[str]:
        """Write texts after prompts, until each has one of its stop strings.

        Args:     batch: prompts, requests alike in all but their stops, and numbers of samples.
        """
        m, (_, how, _) = self.model, batch[0]
        empty = self.rows - len(batch)  # one shape, for one program
        ids: list[list[int]] = [[] for _ in batch]
        for new in generate(
            m.weights,
            self.cfg,
            m.mesh,
            [*(prompt for prompt, _, _ in batch), *[[self.eot_token_id]] * empty],
            how.sampling,
            max_tokens=how.max_tokens,
            vocab_size=m.tokenizer.vocab_size,
            stop=m.ends,
            numbers=[*(number for _, _, number in batch), *[0] * empty],
        ):
            for row, more in zip(ids, new, strict=False):
                row += more
            if all(self._has(row, one) for row, (_, one, _) in zip(ids, batch, strict=True)):
                break
        return [self._cut(row, one) for row, (_, one, _) in zip(ids, batch, strict=True)]

    def _stops(self, one: GenerationRequest) -> list[str]:
        return [*one.until, self._named(self.eot_token_id)]

    def _has(self, ids: list[int], one: GenerationRequest) -> bool:
        """Return whether a text has one of its stops, which may be the name of a special token."""
        text = self._text.decode(ids, skip_special_tokens=False)
        return any(stop in text for stop in self._stops(one))

    def _cut(self, ids: list[int], one: GenerationRequest) -> str:
        """Return the text up to the first stop, without special tokens."""
        if self._has(ids, one):
            few, enough = 0, len(ids)  # the fewest tokens that have a stop
            while enough - few > 1:
                middle = (few + enough) // 2
                few, enough = (few, middle) if self._has(ids[:middle], one) else (middle, enough)
            ids = ids[:enough]
        text = self._text.decode(ids, skip_special_tokens=True)
        return postprocess_generated_text(text, self._stops(one), None)


def _refuse_continuation(context: str, continuation: str, rule: str) -> None:
    """Raises:   ConfigError."""
    fix = "leave the question out of the task"
    where = f"a continuation of the task, after {context[-40:]!r}"
    raise ConfigError(where, continuation[:40], rule, fix)
