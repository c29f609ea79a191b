"""Text from a trained run: python -m jaxpar.sample RUN --prompt "def " """

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro

from jaxpar import checkpoint, cli, runtime
from jaxpar.config import ConfigError
from jaxpar.data import load_tokenizer
from jaxpar.data.sources import tokenizer_folder
from jaxpar.generation import Sampling, config_for_sampling, generate
from jaxpar.parallel.mesh import make_mesh


@dataclass(frozen=True, kw_only=True)
class Options:
    """Text from a trained run."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder."""
    prompt: str = "def "
    """Text to go on from."""
    max_tokens: int = 200
    """Tokens to write at most."""
    step: int | None = None
    """Checkpoint to read. None: the latest."""
    sampling: Annotated[Sampling, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Sampling
    )


def check(options: Options) -> None:
    """Raises:   ConfigError for an option that cannot work."""
    how = options.sampling
    if not options.prompt:
        raise ConfigError("--prompt", "", "must not be empty", 'use --prompt "def "')
    if options.max_tokens < 1:
        fix = "use --max-tokens 200"
        raise ConfigError("--max-tokens", options.max_tokens, "must be at least 1", fix)
    if not (math.isfinite(how.temperature) and how.temperature >= 0):
        fix = "use --temperature 0.8"
        raise ConfigError("--temperature", how.temperature, "must be 0 or more", fix)
    if how.top_k < 0:
        raise ConfigError("--top-k", how.top_k, "must be 0 or more", "use --top-k 50")


def sample(options: Options) -> None:
    """Print the prompt and what the model writes after it, as it comes."""
    check(options)
    cfg = config_for_sampling(checkpoint.load_config(options.run, options.step))
    runtime.start(cfg)
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    params = checkpoint.restore_params(options.run, cfg, mesh, options.step)
    tokenizer = load_tokenizer(tokenizer_folder(cfg))
    prompt = [int(i) for i in tokenizer.encode(options.prompt)]
    ids = generate(
        params,
        cfg,
        mesh,
        prompt,
        options.sampling,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
    )
    began, new = time.perf_counter(), []
    shown = options.prompt
    print(shown, end="", flush=True)
    for token in itertools.islice(ids, options.max_tokens):
        new.append(token)
        text = options.prompt + tokenizer.decode(new)
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            print(text[len(shown) :], end="", flush=True)
            shown = text
    rate = len(new) / (time.perf_counter() - began)
    print(f"\n[{len(new)} tokens, {rate:.1f} tokens/s, compilation included]", file=sys.stderr)


def main(argv: Sequence[str]) -> None:
    """The command line."""
    sample(tyro.cli(Options, args=list(argv), prog="python -m jaxpar.sample", description=__doc__))


if __name__ == "__main__":
    cli.run_program(main)
