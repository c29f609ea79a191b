"""Options of `python -m jaxpar.sample`, of its --chat, and of `python -m jaxpar.evaluate`."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.config.options import OR_ADDRESS, Argument, Step
from jaxpar.config.rules.limits import DEVICES, MAX_INT, STEP, Range
from jaxpar.config.schema.optimizer import Weights

#: Most tokens to generate for a prompt.
MAX_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled."""

    temperature: float = 0.8
    """Sampling temperature. Higher is more random; 0 always takes the most likely token."""
    top_k: Annotated[int, Range(0, MAX_INT, 50)] = 50
    """Sample from the most likely tokens, at most this many. 0: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities sum to this value. 1: from all."""
    seed: Annotated[int, Range(0, MAX_INT, 0)] = 0
    """Random seed."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Generate text with the model of a run or of a published folder."""

    run: Annotated[str, Argument("RUN"), OR_ADDRESS]
    """Run folder, or folder of a published model."""
    prompt: tuple[str, ...] = ("def ",)
    """Texts to continue, as one batch. A single text is printed as it is generated."""
    max_tokens: Annotated[int, Range(1, MAX_TOKENS, 200)] = 200
    """Maximum number of tokens to generate for each prompt."""
    stop: tuple[str, ...] = ()
    """Tokens that end a text, in addition to the end of text, and of a turn of a chat model."""
    step: Annotated[Step, STEP] = None
    """Checkpoint to read. None: the latest intact one. best: that of checkpoint.best."""
    weights: Weights = "trained"
    """Weights of a run: those that are trained, or their moving average."""
    code: tuple[str, ...] = ()
    """Files with the classes of a model's own components (docs/extend/components.md)."""
    tensor: Annotated[int, DEVICES] = 1
    """Tensor-parallel devices."""
    speculate: Literal["auto", "off"] = "auto"
    """Draft tokens with the model's modules of multi-token prediction, and verify them together.
    auto: if it has modules. off: one token at a time."""
    save: bool = False
    """Append prompts and texts to RUN/samples.jsonl, for `python -m jaxpar.report`."""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Talk with the model of a run or of a published folder."""

    run: Annotated[str, Argument("RUN"), OR_ADDRESS]
    """Run folder, or folder of a published model."""
    system: str = ""
    """Instruction before the conversation. Empty: none."""
    template: Literal["auto", "plain", "chatml", "llama3"] = "auto"
    """Layout of the conversation, as in `prepare-chat`. auto: the one whose special tokens the
    tokenizer has."""
    max_tokens: Annotated[int, Range(1, 1 << 20, 512)] = 512
    """Maximum number of tokens of an answer."""
    step: Annotated[Step, STEP] = None
    """Checkpoint to read. None: the latest intact one. best: that of checkpoint.best."""
    weights: Weights = "trained"
    """Weights of a run: those that are trained, or their moving average."""
    code: tuple[str, ...] = ()
    """Files with the classes of a model's own components (docs/extend/components.md)."""
    tensor: Annotated[int, DEVICES] = 1
    """Tensor-parallel devices."""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Score a model on text, and on tasks of the Evaluation Harness."""

    run: Annotated[str, Argument("RUN"), OR_ADDRESS]
    """Run folder, or folder of a published model."""
    tasks: tuple[str, ...] = ()
    """Names of tasks of the Evaluation Harness."""
    split: Literal["train", "val", "test"] | None = None
    """Compute the loss on this split of --data."""
    data: str | None = None
    """Dataset with the split. None: the data of the run."""
    sequences: Annotated[int | None, Range(1, MAX_INT, 1000)] = None
    """Sequences of the split. None: as many as in an evaluation of the run."""
    include_path: str | None = None
    """Folder with your own tasks, as YAML files."""
    step: Annotated[Step, STEP] = None
    """Checkpoint to read. None: the latest intact one. best: that of checkpoint.best."""
    weights: Weights = "trained"
    """Weights of a run: those that are trained, or their moving average."""
    code: tuple[str, ...] = ()
    """Files with the classes of a model's own components (docs/extend/components.md)."""
    tensor: Annotated[int, DEVICES] = 1
    """Tensor-parallel devices."""
    batch_size: Annotated[int, Range(1, 1 << 16, 8)] = 8
    """Texts in a batch."""
    num_fewshot: Annotated[int | None, Range(0, 1000, 5)] = None
    """Examples before each question. None: the task's default."""
    apply_chat_template: bool = False
    """Ask questions as messages of a conversation, by the model's chat template."""
    system_instruction: str | None = None
    """Instruction before each question."""
    max_length: Annotated[int | None, Range(2, MAX_INT, 4096)] = None
    """With --tasks, tokens that the model sees at a time. None: those of its training sequences."""
    limit: Annotated[int | None, Range(1, MAX_INT, 100)] = None
    """Maximum number of questions per task. None: all."""
    output: str | None = None
    """JSON file for all results."""
    follow: bool = False
    """Evaluate each checkpoint of a run that trains as it is saved, until the run has ended."""
    poll_seconds: Annotated[int, Range(1, 86_400, 10)] = 10
    """With --follow, seconds between two looks for checkpoints."""
