"""Fine-tunes a published model: python -m jaxpar.train --from ORG/MODEL --data.path data/chats

`--from` takes the model's shape and its weights. The data is one epoch of conversations, with the
loss on the assistant's tokens (made by `jaxpar.data prepare-chat`), or of text. All weights are
trained: `--optimizer.learning-rate 1e-4 --lora.rank 16` trains adapters only.
"""

from jaxpar.config import (
    Config,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(dir="runs/finetune"),
        data=DataConfig(path="data/chats", seq_len=2048),
        train=TrainConfig(num_epochs=1.0, global_batch_size=16),
        parallel=ParallelConfig(data=-1, remat="dots"),
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_fraction=0.03, weight_decay=0.0),
        evaluation=EvaluationConfig(every=50),
    )
