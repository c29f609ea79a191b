"""Adapts a loaded model to EleutherAI's Evaluation Harness (`lm_eval`, an optional package)."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxpar.inference import scoring
from jaxpar.inference.generation import Sampling, generate
from jaxpar.inference.load import LoadedModel

#: Default maximum of tokens in `generate_until`, as in the harness.
MAX_TOKENS = 256


class HarnessModel(TemplateLM):
    """Scores and generates text with a jaxpar model.

    If a text is longer than the training sequences, only its last tokens are used.
    """

    def __init__(self, model: LoadedModel, batch_size: int):
        super().__init__()
        self.model, self.rows = model, batch_size
        self.seq_len = model.cfg.data.seq_len
        self.scores = scoring.make_scores(model.cfg, model.mesh)

    @property
    def eot_token_id(self) -> int:
        """The id of the end of text."""
        return int(self.model.tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context: beginning of text, or else end of text."""
        return self.model.begin[-1] if self.model.begin else self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: Any = None, **_: Any) -> list[int]:
        """Encode a text, with a beginning of text if the model expects it, unless disabled."""
        return self.model.encode(string, begin=add_special_tokens is not False)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> Any:
        """Return (log probability, whether greedy decoding gives it) for each continuation."""
        texts = [
            (context + continuation, len(continuation)) for _, context, continuation in requests
        ]
        texts = [(ids[-self.seq_len - 1 :], min(n, self.seq_len)) for ids, n in texts]
        found: list[Any] = [None] * len(texts)
        longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))
        with tqdm(total=len(texts), desc="Scoring", disable=disable_tqdm) as progress:
            for start in range(0, len(texts), self.rows):
                which = longest_first[start : start + self.rows]
                for i, score in zip(which, self._score([texts[i] for i in which]), strict=True):
                    found[i] = score
                progress.update(len(which))
        return found

    def _score(self, texts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Do the same for one batch of (tokens, number of tokens to score)."""
        positions = -(-max(len(ids) - 1 for ids, _ in texts) // scoring.POSITIONS)
        tokens = np.zeros((self.rows, positions * scoring.POSITIONS + 1), np.int32)
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
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.seq_len,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(number)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        totals = np.zeros(len(requests))
        np.add.at(totals, owners, [score for score, _ in scores])
        return totals.tolist()

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Generate text after each context, up to the first of its stop strings.

        Greedy texts are written in batches, of contexts of similar lengths. A sampled text depends
        on its row in a batch, and is therefore in the first row of its own.
        """
        wanted = [_Wanted.of(*request.args) for request in requests]
        prompts = [self._prompt(one.context) for one in wanted]
        texts = [""] * len(wanted)
        with tqdm(total=len(wanted), desc="Writing", disable=disable_tqdm) as progress:
            for batch in self._batches(wanted, prompts):
                rows = [prompts[i] for i in batch]
                stops = [wanted[i].until for i in batch]
                how = wanted[batch[0]]
                for i, text in zip(batch, self._write(rows, stops, how), strict=True):
                    texts[i] = text
                progress.update(len(batch))
        return texts

    def _prompt(self, context: str) -> list[int]:
        # As the text grows, the sliding window leaves out the start of the prompt.
        return self.tok_encode(context)[-self.seq_len :] or [self.eot_token_id]

    def _batches(
        self, wanted: Sequence["_Wanted"], prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, ...]]:
        """Yield the numbers of requests that can be written together, long prompts first."""
        kind = lambda i: (wanted[i].sampled, wanted[i].max_tokens)  # noqa: E731
        order = sorted(range(len(wanted)), key=lambda i: (*kind(i), -len(prompts[i])))
        for (sampled, _), group in itertools.groupby(order, key=kind):
            yield from itertools.batched(group, 1 if sampled else self.rows)

    def _write(
        self, prompts: list[list[int]], stops: Sequence[Sequence[str]], how: "_Wanted"
    ) -> list[str]:
        """Write texts after prompts, until each has one of its stop strings."""
        m = self.model
        rows = 1 if how.sampled else self.rows  # one shape, for one program
        padding = [[self.eot_token_id]] * (rows - len(prompts))
        ids: list[list[int]] = [[] for _ in prompts]
        for new in generate(
            m.weights,
            m.cfg,
            m.mesh,
            [*prompts, *padding],
            how.sampling,
            max_tokens=how.max_tokens,
            vocab_size=m.tokenizer.vocab_size,
            stop={self.eot_token_id},
        ):
            for row, more in zip(ids, new, strict=False):
                row += more
            texts = [m.tokenizer.decode(row) for row in ids]
            ended = [end_of(text, until) for text, until in zip(texts, stops, strict=True)]
            if all(end is not None for end in ended):
                break
        return [text[:end] for text, end in zip(texts, ended, strict=True)]


class _Wanted(NamedTuple):
    """A request to write text."""

    context: str
    until: tuple[str, ...]
    max_tokens: int
    sampling: Sampling

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn, and are not the likeliest."""
        return self.sampling.temperature > 0

    @classmethod
    def of(cls, context: str, how: dict[str, Any]) -> "_Wanted":
        """Read the arguments of a request of the harness."""
        until = how.get("until") or []
        until = (until,) if isinstance(until, str) else tuple(until)
        most, sampling = int(how.get("max_gen_toks", MAX_TOKENS)), Sampling(temperature=0.0)
        if how.get("do_sample"):
            sampling = Sampling(
                temperature=float(how.get("temperature", 0.0)),
                top_k=int(how.get("top_k", 0)),
                top_p=float(how.get("top_p", 1.0)),
            )
        return cls(context, until, most, sampling)


def end_of(text: str, until: Sequence[str]) -> int | None:
    """Return where the first of some stop strings begins in a text; None if there is none."""
    return min((text.index(stop) for stop in until if stop in text), default=None)
