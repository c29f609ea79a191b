"""Other names of what a heading is about, which people search for.

The site shows them under the heading ("Also called: ..."), so its search finds them.
"""

ALSO_CALLED = {
    "architectures.md": {
        "Families": "supported models, model zoo, Llama, Qwen, DeepSeek, Gemma, Mistral, GPT",
        "Experts": "mixture of experts, MoE, expert parallelism, EP, router, top-k",
        "Hybrid models": "linear attention, state-space models, SSM, Mamba, recurrent layers",
        "Latent attention": "MLA, multi-head latent attention, KV compression",
        "Multi-token prediction": "MTP, draft model, speculative decoding",
        "Longer contexts": "long context, RoPE scaling, YaRN, context extension",
    },
    "checkpoints.md": {
        "Checkpoints": "save and load, resume training, restart",
        "The best checkpoint": "early stopping, keep the best model",
        "Averages of checkpoints": "model averaging, model soup, merge checkpoints",
    },
    "clusters.md": {
        "Multi-node training": "multi-host, distributed training, torchrun, several machines",
        "Slurm": "sbatch, srun",
        "Elastic hosts": "fault tolerance, elastic training, node failure",
    },
    "convert.md": {
        "Hugging Face conversion": "transformers, safetensors, import, export, vLLM, serving",
    },
    "data.md": {
        "Preparing text": "custom dataset, own data, tiktoken, Shakespeare, one text file",
        "Streaming text": "IterableDataset, on-the-fly tokenization",
        "Mixtures": "data mixing, sampling weights, several datasets",
        "Evaluation sets": "validation set, held-out data",
        "Chat data": "instruction tuning, conversations, chat template, SFT data",
    },
    "extend/components.md": {
        "Components": "custom layer, custom attention, own model",
    },
    "extend/losses.md": {
        "Losses": "custom loss, loss function, objective",
        "Probes": "hooks, activations, custom metric, logging",
    },
    "extend/optimizers.md": {
        "Update rules and schedules": "custom optimizer, learning-rate scheduler",
    },
    "extend/runs.md": {
        "Batches, sinks and callbacks": "custom data loader, Trainer hooks",
    },
    "fine_tuning.md": {
        "Fine-tuning": "finetune, post-training, continued pre-training",
        "Supervised fine-tuning": "SFT, instruction tuning, full fine-tuning",
        "LoRA": "PEFT, adapters, low-rank adaptation, rsLoRA",
        "Preference tuning": "DPO, RLHF, alignment, preference pairs",
        "Distillation": "knowledge distillation, teacher and student, KD",
    },
    "first_run.md": {
        "Install": "pip install, setup, requirements",
        "NVIDIA GPUs": "CUDA, driver, cuDNN, H100",
        "Containers": "Docker, image",
        "Without a network": "offline, air-gapped",
        "Resume, on other devices": "restart, continue training, change the number of GPUs",
    },
    "generation.md": {
        "Generating text": "inference, sampling, decoding, temperature, top-p",
        "Evaluating on tasks": "lm-evaluation-harness, lm_eval, HellaSwag, MMLU, benchmarks",
    },
    "glossary.md": {
        "Shape letters": "notation, symbols, BTHD",
    },
    "memory.md": {
        "Out of memory: when a run does not fit": "OOM, CUDA out of memory, RESOURCE_EXHAUSTED",
        "What to try, in order": "activation checkpointing, gradient accumulation, 8-bit Adam",
        "Optimizer state in host memory": "CPU offload, ZeRO-Infinity, ZeRO-Offload",
    },
    "monitoring.md": {
        "Early stopping": "patience, overfitting, best model",
        "A list of runs": "compare runs, experiment tracking, leaderboard",
        "Metrics by layer": "gradient norms, activations, per-layer statistics",
        "Sinks": "W&B, Weights & Biases, TensorBoard, MLflow, Prometheus, logging",
        "The report": "loss curve, dashboard, plots",
    },
    "numerics.md": {
        "Clipping": "gradient clipping, clip_grad_norm, max norm",
        "Determinism": "reproducibility, seeds, deterministic training",
        "Mesh invariance": "certify, numerical correctness, parity between layouts",
    },
    "optimizers.md": {
        "Schedules by step": "learning-rate schedule, batch-size warm-up, curriculum",
        "A moving average of the weights": "EMA, exponential moving average",
        "µP: learning rates that hold at every width": "muP, maximal update parametrization",
        "Sweeps": "hyperparameter search, grid search, learning-rate sweep",
    },
    "parallelism.md": {
        "data, expert and sequence: FSDP": "data parallelism, DDP, ZeRO, fully sharded",
        "tensor": "tensor parallelism, TP, model parallelism, Megatron",
        "sequence: context parallelism": "CP, ring attention, Ulysses",
        "pipeline": "pipeline parallelism, PP, 1F1B, GPipe",
        "Rematerialization": "activation checkpointing, gradient checkpointing, recomputation",
    },
    "planning.md": {
        "Planning and choosing a layout": "auto-parallelism, memory estimator, cost, throughput",
        "Mixture of experts": "MoE, expert parallelism, EP",
        "Goodput under failures": "checkpoint interval, MTBF",
    },
    "precision.md": {
        "Mixed precision": "precision, AMP, autocast, bf16, fp16, fp8, loss scaling",
    },
    "profiling.md": {
        "Taking a profile": "tracing, profiler, slow training",
        "Perfetto and XProf": "TensorBoard profiler, timeline",
        "One kernel in depth": "Nsight Compute, ncu, roofline",
        "Benchmarks": "throughput, tokens per second, MFU",
        "XLA flags": "XLA_FLAGS, latency-hiding scheduler, NCCL",
    },
    "python_api.md": {
        "Callbacks": "Trainer hooks, early stopping, custom logging",
        "Functions": "jax.grad, custom training loop, pure functions",
        "Notebooks": "Jupyter, tutorials, examples",
    },
    "reliability.md": {
        "Loss spikes": "divergence, NaN, instability, skip updates",
        "Object stores": "S3, GCS, MinIO, cloud storage, bucket",
    },
    "troubleshooting.md": {
        "Checking a machine: jaxpar.doctor": "NCCL test, health check, burn-in",
        "It is slow": "low MFU, low GPU utilization, slow data loading",
        "Non-finite losses and spikes": "NaN loss, inf gradient, divergence",
        "Out of memory": "OOM, CUDA out of memory, RESOURCE_EXHAUSTED",
        "It hangs": "NCCL timeout, deadlock, stuck",
    },
}
