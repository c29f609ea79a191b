#!/bin/sh
# docs/recipes/sft.md, after small_text.sh. Options are added to each training command.
set -eux
python scripts/recipes/python_text.py chats --output chats.jsonl
python -m jaxpar.data prepare-chat --input chats.jsonl --output data/chats --tokenizer data/small_text
python -m jaxpar.train quickstart --run.dir runs/sft --run.init-from runs/small_text \
  --model.vocab-size 1024 --data.path data/chats --train.global-batch-size 8 --evaluation.every 20 \
  --optimizer.learning-rate 1e-3 --optimizer.decay-steps 180 --train.num-steps ${HALF:-100} "$@"
python -m jaxpar.train quickstart --run.dir runs/sft --run.init-from runs/small_text \
  --model.vocab-size 1024 --data.path data/chats --train.global-batch-size 8 --evaluation.every 20 \
  --optimizer.learning-rate 1e-3 --optimizer.decay-steps 180 --train.num-steps ${STEPS:-200} \
  --run.cpu-devices 2 --parallel.tensor 2 "$@"
echo "What does pathlib.Path.is_file() do?" | python -m jaxpar.sample --chat runs/sft --max-tokens 40 --temperature 0
