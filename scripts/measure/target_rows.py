"""The layouts of docs/benchmarks/README.md, for `targets.py`."""

from dataclasses import dataclass, replace

_LOSS = "--compute.logits-dtype compute --parallel.loss-chunks 1"
_FLOAT8 = "--compute.matmul-dtype float8 --parallel.gather-dtype float8"
_SAVED = "--parallel.remat attn_out,attn_lse,gate_up"
_STAGES = f"--parallel.zero 1 --parallel.remat dots --parallel.virtual-stages 4 {_LOSS}"
_LONG = f"--train.global-batch-size 1 --parallel.sequence {{gpus}} {_SAVED} {_LOSS}"


@dataclass(frozen=True)
class Row:
    """A layout with a target.

    what         description. torchtitan: the layout of torchtitan_run.py to compare with.
    config       jaxpar's config. options: its arguments; {gpus}: the number of GPUs; {layers2},
                 {layers6}: two or six layers for each, so that a GPU's share stays the same.
    roomy, tight further arguments on GPUs with at least 100 GiB, and with less.
    sequences    sequences per GPU and step; None: the options set the global batch size.
    target       tokens/s/GPU; with `share_of`, that share of another row's rate; None: no target.
    ways         the number of GPUs must be a multiple of it. gpus: it is always this many.
    """

    what: str
    torchtitan: str
    config: str
    options: str
    sequences: int | None
    target: float | None = None
    ways: int = 1
    gpus: int | None = None
    share_of: str = ""
    roomy: str = ""
    tight: str = ""

    def arguments(self, gpus: int, memory_gib: float = 141) -> list[str]:
        """Return the arguments of `jaxpar.profile --bench`, except the data."""
        options = f"{self.options} {self.roomy if memory_gib >= 100 else self.tight}"
        words = [
            self.config,
            *options.format(gpus=gpus, layers2=2 * gpus, layers6=6 * gpus).split(),
        ]
        if self.sequences:
            words += ["--train.global-batch-size", str(self.sequences * gpus)]
        return [*words, "--data.document-mask", "False"]


_8B, _15B = "llama3_8b", "llama_1b"
_WHOLE = "--parallel.remat none"
_UNTIED = f"--model.tie-embeddings False {_WHOLE} {_LOSS}"

#: The loss in as many pieces as the memory of the logits takes, and loads balanced by a bias.
_EXPERTS = "--compute.logits-dtype compute --model.layers.feed-forward.router.balancing-bias True"
_QWEN3, _ZERO1 = f"{_EXPERTS} --model.num-layers {{layers6}}", "--parallel.zero 1"
_ONE_AXIS = "--parallel.expert {gpus} --parallel.data 1 --parallel.expert-slack 2.0"
_MIXTRAL = f"{_EXPERTS} --model.num-layers {{layers2}} {_ONE_AXIS} --parallel.expert-dispatch"
_SOME = "--parallel.remat attn_out"
_ON_H100 = f"--parallel.zero 3 {_SOME}"


def _qwen3(what: str, options: str, roomy: str, ways: int = 1, target: float | None = None) -> Row:
    """A row of Qwen3-30B-A3B with four sequences for each GPU."""
    row = Row(what, "experts-qwen3-whole", "qwen3_30b_a3b", f"{_QWEN3} {options}", 4, target, ways)
    return replace(row, roomy=roomy, tight=_ON_H100)


ROWS = {
    "fsdp": Row("FSDP", "fsdp", _8B, f"{_WHOLE} {_LOSS}", 2, 12_000),
    "fsdp-54gib": Row(
        "FSDP in 54 GiB",
        "fsdp-recompute",
        *(_8B, f"--parallel.remat dots_offload {_LOSS}", 2, 11_000),
    ),
    "zero1": Row("FSDP as ZeRO-1", "fsdp-whole", _8B, f"{_WHOLE} --parallel.zero 1 {_LOSS}", 2),
    "fsdp-tensor2": Row(
        "FSDP × tensor 2",
        "fsdp-tensor2",
        *(_8B, f"{_WHOLE} --parallel.tensor 2 {_LOSS}", 2, 11_000, 2),
    ),
    "data-tensor2-pipeline2": Row(
        "data × tensor 2 × pipeline 2",
        "data-tensor2-pipeline2",
        _8B,
        f"{_STAGES} --parallel.tensor 2 --parallel.row-groups 2 --parallel.pipeline 2 "
        "--parallel.num-microbatches 16",
        *(8, 10_000, 4),
    ),
    "data-pipeline2": Row(
        "data × pipeline 2",
        "data-pipeline2",
        *(_8B, f"{_STAGES} --parallel.pipeline 2 --parallel.num-microbatches 16", 8, 10_500, 2),
    ),
    "pipeline4": Row(
        "pipeline 4 × data",
        "pipeline4",
        *(_8B, f"{_STAGES} --parallel.pipeline 4 --parallel.num-microbatches 32", 8, 10_500, 4),
    ),
    "1.5b": Row("1.5B, one GPU", "1.5B", _15B, _UNTIED, 8, 70_000, gpus=1),
    "1.5b-zero1": Row(
        "1.5B, ZeRO-1",
        "1.5B-replicated",
        *(_15B, f"{_UNTIED} --parallel.zero 1", 8, 0.97),
        share_of="1.5b",
    ),
    "sequence": Row(
        "sequence, T = 131,072", "sequence", _8B, f"--data.seq-len 131072 {_LONG}", None, 3_000
    ),
    "sequence-262144": Row(
        "sequence, T = 262,144", "sequence-262144", _8B, f"--data.seq-len 262144 {_LONG}", None
    ),
    "float8": Row("FSDP in float8", "fsdp-float8", _8B, f"{_WHOLE} {_FLOAT8} {_LOSS}", 2, 15_500),
    "experts": _qwen3(
        "Qwen3-30B-A3B, expert 4 × data",
        "--parallel.expert 4 --parallel.data -1",
        *(f"{_ZERO1} {_WHOLE}", 4, 18_000),
    ),
    "experts-fsdp": _qwen3(
        "Qwen3-30B-A3B, FSDP", "", f"{_ZERO1} --parallel.remat attn_out", target=18_000
    ),
    "experts-one-axis": _qwen3(
        "Qwen3-30B-A3B, one expert axis",
        "--parallel.expert {gpus} --parallel.data 1",
        *(f"{_ZERO1} {_WHOLE}", 1, 18_000),
    ),
    "experts-float8": _qwen3(
        "Qwen3-30B-A3B, expert 4 × data, in float8",
        "--parallel.expert 4 --parallel.data -1 --compute.matmul-dtype float8",
        *(f"{_ZERO1} {_WHOLE}", 4),
    ),
    "mixtral-tokens": Row(
        "Mixtral 8x7B, dispatch by tokens",
        "experts-mixtral",
        "mixtral_8x7b",
        f"{_MIXTRAL} tokens",
        4,
        roomy=_WHOLE,
        tight=_SOME,
    ),
    "mixtral-rows": Row(
        "Mixtral 8x7B, dispatch by rows",
        "experts-mixtral",
        "mixtral_8x7b",
        f"{_MIXTRAL} rows",
        4,
        roomy=_WHOLE,
        tight=_SOME,
    ),
    "olmoe": Row(
        "OLMoE", "experts-olmoe", "olmoe_1b_7b", f"{_EXPERTS} {_ONE_AXIS} {_WHOLE} {_ZERO1}", 4
    ),
}
