#!/bin/sh
# docs/recipes/dpo.md, after sft.sh. Options are added to each training command.
set -eux
python scripts/recipes/python_text.py pairs --output pairs.jsonl
python -m jaxpar.data prepare-pairs --input pairs.jsonl --output data/pairs --tokenizer data/small_text \
  --holdout 0.1
python -m jaxpar.train quickstart --run.dir runs/dpo --run.init-from runs/sft --dpo.beta 0.1 \
  --model.vocab-size 1024 --data.path data/pairs --evaluation.every 10 --train.log-every 5 \
  --optimizer.learning-rate 2e-4 --optimizer.warmup-steps 5 --optimizer.decay-steps 55 \
  --train.num-steps ${HALF:-30} "$@"
python -m jaxpar.train quickstart --run.dir runs/dpo --run.init-from runs/sft --dpo.beta 0.1 \
  --model.vocab-size 1024 --data.path data/pairs --evaluation.every 10 --train.log-every 5 \
  --optimizer.learning-rate 2e-4 --optimizer.warmup-steps 5 --optimizer.decay-steps 55 \
  --train.num-steps ${STEPS:-60} --run.cpu-devices 2 --parallel.pipeline 2 \
  --parallel.num-microbatches 2 "$@"
echo "What does pathlib.Path.is_file() do?" | python -m jaxpar.sample --chat runs/dpo --max-tokens 40 --temperature 0
