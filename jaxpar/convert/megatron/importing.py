"""`from-megatron`: converts a checkpoint of Megatron-LM to a run with a checkpoint of step 0."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxpar.checkpoint import weights_alone
from jaxpar.config import ConfigError
from jaxpar.convert import selfcheck
from jaxpar.convert.hf.config import entry_table, model_of
from jaxpar.convert.hf.families import MIXTRAL
from jaxpar.convert.hf.family import Family
from jaxpar.convert.hf.folder import check_tensors
from jaxpar.convert.hf.importing import PublishedModel, config_for, new_run, source_config
from jaxpar.convert.hf.tensor_layout import sizes_of
from jaxpar.convert.megatron.arguments import arguments_of, values_of
from jaxpar.convert.megatron.checkpoint import AGAIN, open_checkpoint
from jaxpar.convert.megatron.tensors import ENTRIES, find_views, num_experts, num_layers
from jaxpar.convert.run_arrays import open_run


def open_source(folder: str | Path) -> PublishedModel:
    """Open a checkpoint, and check that all tensors exist, with their shapes.

    Raises:   ConfigError that names the argument, the tensor or the file that is wrong.
    """
    checkpoint = open_checkpoint(Path(folder))
    arguments = arguments_of(checkpoint.common(), str(checkpoint.folder))
    values, family = values_of(arguments)
    _check_count("--num-layers", values["num_hidden_layers"], num_layers(checkpoint))
    if family is MIXTRAL:
        experts = num_experts(checkpoint)
        _check_count("--num-experts", values["num_local_experts"], experts)
    embed = checkpoint.tensors.get("embedding.word_embeddings.weight")
    # Megatron-LM pads the vocabulary; the rows tell by how much.
    values["vocab_size"] = embed.shape[0] if embed and embed.shape else 0
    model = model_of(values, family)
    cfg = config_for(model, values)
    entries, sizes = entry_table(_named(family), model), sizes_of(model)
    tensors = find_views(checkpoint, entries, sizes)
    check_tensors(tensors, entries, sizes, "arguments")
    values |= {"dtype": tensors.dtype(), "torch_dtype": tensors.dtype()}
    return PublishedModel(
        folder=checkpoint.folder,
        name=str(checkpoint.folder),
        values=values,
        family=family,
        config=cfg,
        entries=entries,
        sizes=sizes,
        tensors=tensors,
    )


def _named(family: Family) -> Family:
    """Return a family with Megatron-LM's names of tensors."""
    return dataclasses.replace(family, entries=ENTRIES)


def _check_count(argument: str, asked: int | float, found: int) -> None:
    """Check a number of layers or experts, before a parameter of each is looked for."""
    if asked != found:
        rule = f"must be the number in the checkpoint's tensors, {found}"
        raise ConfigError(argument, asked, rule, AGAIN)


def from_megatron(
    folder: str | Path,
    run_dir: str | Path,
    log: Callable[[str], None],
    tolerance: float | None = selfcheck.TOLERANCE,
) -> PublishedModel:
    """Convert a checkpoint to a run. The run appears when it is complete.

    The largest tensor of a layer, or the embedding, is in memory at a time.

    Args:     log: called with each result. tolerance: of the self-check; None to skip it.
    Raises:   ConfigError as `open_source`, and when the run's folder is in use; CheckFailed.
    """
    source, run_dir = open_source(folder), Path(run_dir)
    cfg = source_config(source, run_dir)
    with new_run(cfg, [source], log) as temporary:
        if tolerance is not None:
            read = selfcheck.published_reader(source.entries, source.sizes, source.tensors)
            arrays = open_run(temporary, cfg, weights_alone.STEP)
            m, tokens = cfg.model, selfcheck.random_tokens(cfg.model)
            ours = selfcheck.logits(selfcheck.run_reader(arrays, m, "float32"), m, tokens)
            theirs = selfcheck.logits(read, m, tokens)
            selfcheck.compare(theirs, ours, "the checkpoint", tolerance, log)
    return source
