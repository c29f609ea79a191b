"""Adapts a loaded model to EleutherAI's Evaluation Harness (`lm_eval`, an optional package)."""

from collections.abc import Sequence
from typing import Any

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
        """Generate text after each context, up to the first of its stop strings."""
        done = []
        for request in tqdm(requests, desc="Writing", disable=disable_tqdm):
            context, how = request.args
            done.append(self._write(context, dict(how)))
        return done

    def _write(self, context: str, how: dict[str, Any]) -> str:
        until = how.get("until") or []
        until = [until] if isinstance(until, str) else until
        most = int(how.get("max_gen_toks", MAX_TOKENS))
        warm = float(how.get("temperature", 0.0)) if how.get("do_sample") else 0.0
        sampling = Sampling(
            temperature=warm, top_k=int(how.get("top_k", 0)), top_p=float(how.get("top_p", 1.0))
        )
        # As the text grows, the sliding window leaves out the start of the prompt.
        prompt = self.tok_encode(context)[-self.seq_len :] or [self.eot_token_id]
        m, ids = self.model, []
        for (new,) in generate(
            m.weights,
            m.cfg,
            m.mesh,
            [prompt],
            sampling,
            max_tokens=most,
            vocab_size=m.tokenizer.vocab_size,
            stop={self.eot_token_id},
        ):
            ids += new
            text = m.tokenizer.decode(ids)
            ends = [text.index(stop) for stop in until if stop in text]
            if ends:
                return text[: min(ends)]
        return m.tokenizer.decode(ids)
