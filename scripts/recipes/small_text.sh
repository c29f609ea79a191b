#!/bin/sh
# docs/recipes/small_text.md. Options of this script are added to each training command.
set -eux
python scripts/recipes/python_text.py text --output input.txt
python -m jaxpar.data prepare --input input.txt --output data/small_text --tokenizer bpe:1024
python -m jaxpar.train quickstart --run.dir runs/small_text --data.path data/small_text \
  --model.vocab-size 1024 --train.global-batch-size 8 --evaluation.every 40 \
  --optimizer.decay-steps 380 --train.num-steps ${HALF:-200} "$@"
python -m jaxpar.launch -n 2 -- quickstart --run.dir runs/small_text --data.path data/small_text \
  --model.vocab-size 1024 --train.global-batch-size 8 --evaluation.every 40 \
  --optimizer.decay-steps 380 --train.num-steps ${STEPS:-400} --run.cpu-devices 1 "$@"
python -m jaxpar.sample runs/small_text --prompt "The assert statement" --max-tokens 60
