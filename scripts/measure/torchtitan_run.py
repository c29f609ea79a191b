"""Measure torchtitan on this host: python scripts/measure/torchtitan_run.py LAYOUT

Run it in a separate environment, on GPUs:

    python3.12 -m venv ../titan
    ../titan/bin/pip install torchtitan==0.2.2 torchdata datasets==4.3.0 tyro torchao torch==2.11.0
    ../titan/bin/python scripts/measure/torchtitan_run.py fsdp --gpus 8 --card runs/titan-fsdp.json

Trains torchtitan's Llama 3, or its Qwen3 with experts in the shape of the layout, with
torch.compile on the text of Python's standard library, with a tokenizer of
`python -m jaxpar.data prepare`. Reads median tokens per second and GPU, MFU and peak
memory from its log. `python -m jaxpar.profile` compares the card with jaxpar's.
"""

import argparse
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

_COMMON = "--compile.enable --checkpoint.no-enable --metrics.disable_color_printing".split()
_FLOAT8 = (
    "--model.converters quantize.linear.float8 "
    "--quantize.linear.float8.enable_fsdp_float8_all_gather "
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
)
_SEQUENCE = "--activation_checkpoint.mode full --parallelism.context_parallel_degree {gpus}"
_EXPERTS = "--activation_checkpoint.mode none --parallelism.expert_parallel_degree {gpus}"

_EXPERTS_RECOMPUTED = (
    "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op "
    "--parallelism.expert_parallel_degree {gpus}"
)

#: Model flavor, sequence length, sequences per data-parallel rank, and torchtitan's arguments.
#: {gpus}: the number of GPUs; {layers2}, {layers6}: two or six layers for each.
LAYOUTS: dict[str, tuple[str, int, int, str]] = {
    "fsdp": ("8B", 8192, 2, "--activation_checkpoint.mode none"),
    "fsdp-recompute": ("8B", 8192, 2, "--activation_checkpoint.mode selective"),
    "fsdp-float8": ("8B", 8192, 2, f"--activation_checkpoint.mode none {_FLOAT8}"),
    "fsdp-tensor2": (
        "8B",
        8192,
        4,
        "--activation_checkpoint.mode none --parallelism.tensor_parallel_degree 2",
    ),
    "fsdp-whole": (
        "8B",
        8192,
        2,
        "--activation_checkpoint.mode none --parallelism.fsdp_reshard_after_forward never",
    ),
    "data-tensor2-pipeline2": (
        "8B",
        8192,
        32,
        "--activation_checkpoint.mode none --parallelism.tensor_parallel_degree 2 "
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B",
    ),
    "data-pipeline2": (
        "8B",
        8192,
        16,
        "--activation_checkpoint.mode none --parallelism.pipeline_parallel_degree 2 "
        "--parallelism.pipeline_parallel_schedule Interleaved1F1B",
    ),
    "pipeline4": (
        "8B",
        8192,
        32,
        "--activation_checkpoint.mode none --parallelism.pipeline_parallel_degree 4 "
        "--parallelism.pipeline_parallel_schedule Interleaved1F1B",
    ),
    "1.5B": ("1.5B", 4096, 8, "--activation_checkpoint.mode none"),
    "1.5B-replicated": (
        "1.5B",
        4096,
        8,
        "--activation_checkpoint.mode none --parallelism.data_parallel_replicate_degree {gpus} "
        "--parallelism.data_parallel_shard_degree 1",
    ),
    "sequence": ("8B", 131072, 1, _SEQUENCE),
    "sequence-262144": ("8B", 262144, 1, _SEQUENCE),
    "experts-qwen3": ("30B-A3B, 6 layers", 4096, 4, _EXPERTS),
    "experts-olmoe": ("OLMoE-1B-7B", 4096, 4, _EXPERTS),
    "experts-qwen3-whole": ("30B-A3B, {layers6} layers", 4096, 4, _EXPERTS),
    "experts-qwen3-recompute": ("30B-A3B, {layers6} layers", 4096, 4, _EXPERTS_RECOMPUTED),
    "experts-mixtral": ("Mixtral 8x7B, {layers2} layers", 4096, 4, _EXPERTS),
}

#: Changes to torchtitan's Qwen3 30B-A3B, and to its experts. It normalizes queries and keys per
#: head, also where the model of that name does not.
WITH_EXPERTS: dict[str, tuple[dict, dict]] = {
    **{f"30B-A3B, {n} layers": ({"n_layers": n}, {}) for n in (6, 12, 24, 48)},
    "OLMoE-1B-7B": (
        {"n_layers": 16, "n_heads": 16, "n_kv_heads": 16, "vocab_size": 50304}
        | {"moe_inter_dim": 1024, "rope_theta": 10000},
        {"num_experts": 64, "route_norm": False},
    ),
    **{
        f"Mixtral 8x7B, {n} layers": (
            {"n_layers": n, "dim": 4096, "n_kv_heads": 8, "vocab_size": 32000}
            | {"moe_inter_dim": 14336},
            {"num_experts": 8, "top_k": 2},
        )
        for n in (4, 8, 16)
    },
}

_STEP = re.compile(r"step: *(\d+).*?memory: *([\d.]+)GiB.*?tps: *([\d,]+).*?mfu: *([\d.]+)%")


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument(
        "--rows", type=int, help="sequences per data-parallel rank (default: the layout's)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="number of steps; a quarter of them is the logging interval (20)",
    )
    parser.add_argument("--data", default="data/stdlib", help="folder of `jaxpar.data prepare`")
    parser.add_argument("--card", help="JSON file to which to write the figures")
    parser.add_argument("--log", default="torchtitan.log", help="file for torchtitan's output")
    options = parser.parse_args()
    for name, least in {"gpus": 1, "rows": 1, "steps": 3}.items():  # two compile
        value = getattr(options, name)
        if value is not None and value < least:
            fix = f"--{name} {parser.get_default(name) or least}"
            parser.error(f"--{name} = {value}: must be at least {least}. Fix: {fix}")
    if not (Path(options.data) / "tokenizer.json").is_file():
        fix = f"python -m jaxpar.data prepare --input stdlib --output {shlex.quote(options.data)}"
        rule = f"--data = {options.data!r} contains no tokenizer.json"
        parser.error(f"{rule}. Fix: {fix} --tokenizer bpe:8192")
    for name in ("card", "log"):
        value = getattr(options, name)
        path = Path(value or "")  # the folder itself, which is no file
        if value is None or not (path.is_dir() or any(p.is_file() for p in path.parents)):
            continue
        fix = f"--{name} torchtitan.{'json' if name == 'card' else 'log'}"
        parser.error(f"--{name} = {value!r}: is not a writable file. Fix: {fix}")
    return options


def prepare(data: Path, folder: Path) -> None:
    """Write torchtitan's inputs: a folder of JSON lines and a Hugging Face tokenizer."""
    texts, tokenizer = folder / "text", folder / "tokenizer"
    texts.mkdir()
    tokenizer.mkdir()
    shutil.copy(data / "tokenizer.json", tokenizer)
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(special))
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    with open(texts / "data.json", "w") as file:
        for source in sources:
            text = source.read_text(errors="ignore")
            file.write(json.dumps({"text": text}) + "\n")


def command(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the torchrun command of a layout."""
    flavor, window, rows, extra = LAYOUTS[options.layout]
    flavor = flavor.format(layers2=2 * options.gpus, layers6=6 * options.gpus)
    rows = rows if options.rows is None else options.rows
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(options.gpus)]
    launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    launch += ["--local-ranks-filter", "0", "--role", "rank", "--tee", "3"]
    name = "qwen3" if flavor in WITH_EXPERTS else "llama3"
    run = [__file__, "--worker", "--model.name", name, "--model.flavor", flavor]
    run += ["--model.hf_assets_path", str(folder / "tokenizer")]
    run += ["--training.dataset", "c4_test", "--training.dataset_path", str(folder / "text")]
    run += ["--training.seq_len", str(window), "--training.local_batch_size", str(rows)]
    every = str(max(1, options.steps // 4))
    run += ["--training.steps", str(options.steps), "--metrics.log_freq", every, *_COMMON]
    return [sys.executable, *launch, *run, *extra.format(gpus=options.gpus).split()]


def worker() -> None:
    """Run one rank of torchtitan, with jaxpar's shapes added to its models."""
    sys.argv.remove("--worker")  # first: torchtitan reads the arguments when it is imported
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.train import Trainer, main

    llama3.llama3_args["1.5B"] = TransformerModelArgs(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim_multiplier=1.5,
        multiple_of=1024,
        rope_theta=500000,
    )
    whole = qwen3.qwen3_args["30B-A3B"]
    for flavor, (changed, of_experts) in WITH_EXPERTS.items():
        experts = dataclasses.replace(whole.moe_args, **of_experts)
        qwen3.qwen3_args[flavor] = dataclasses.replace(whole, moe_args=experts, **changed)
    main(Trainer)


def execute(command: list[str], environment: dict[str, str], log: Path) -> tuple[int, list[str]]:
    """Run a command with its output in `log`, and print its steps."""
    printed = []
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "w", buffering=1) as file,
        subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            printed.append(line)
            if _STEP.search(line):
                print(line.rstrip(), flush=True)
    return process.returncode, printed


def measure(options: argparse.Namespace) -> dict:
    """Run torchtitan, and return the figures of its logged steps after the first two."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(options.data), Path(folder))
        ran = command(options, Path(folder))
        environment = os.environ | {
            "NCCL_NVLS_ENABLE": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }
        status, printed = execute(ran, environment, Path(options.log))
    steps = [m.groups() for m in map(_STEP.search, printed) if m]
    if status or len(steps) < 3:
        errors = [line for line in printed if "Error" in line]
        sys.exit("\n".join(errors[:20]) + f"\ntorchtitan: exit code {status}; see {options.log}")
    rates = [float(rate.replace(",", "")) for _, _, rate, _ in steps[2:]]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    return {
        "tokens_per_second_per_device": statistics.median(rates),
        "mfu_full_attention": statistics.median(float(m) for *_, m in steps[2:]) / 100,
        "peak_memory_gib": max(float(memory) for _, memory, _, _ in steps),
        "layout": options.layout,
        "gpus": options.gpus,
        "torchtitan": importlib.metadata.version("torchtitan"),
        "torch": importlib.metadata.version("torch"),
        "gpu": subprocess.check_output(query, text=True).splitlines()[0],
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": host(),
        "command": [part.replace(folder, "FOLDER") for part in ran[ran.index("--worker") + 1 :]],
    }


def host() -> str:
    """Return the host ID, as in `jaxpar/tools/bench/conditions.py`."""
    named = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(named.strip().encode()).hexdigest()[:8]


def main() -> None:
    """Measure torchtitan, print the figures and write the card."""
    options = arguments()
    found = measure(options)
    print(
        f"torchtitan {options.layout} on {options.gpus} GPUs: "
        f"{found['tokens_per_second_per_device']:,.0f} tokens/s/GPU   "
        f"its MFU {found['mfu_full_attention']:.1%}   peak {found['peak_memory_gib']:.1f} GiB"
    )
    if options.card:
        card = Path(options.card)
        card.parent.mkdir(parents=True, exist_ok=True)
        whole = card.with_name(
            f"{card.name}.tmp"
        )  # keeps an earlier card until this one is complete
        whole.write_text(json.dumps(found, indent=2) + "\n")
        whole.replace(card)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker()
    else:
        main()
