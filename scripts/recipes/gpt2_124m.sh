#!/bin/sh
# docs/recipes/gpt2_124m.md. Options of this script are added to each training command.
set -eux
python -m jaxpar.data prepare --input stdlib --output data/stdlib-50k --tokenizer bpe:${VOCAB:-50257}
python -m jaxpar.train gpt2_124m --run.dir runs/gpt2_124m --data.path data/stdlib-50k \
  --train.global-batch-size 64 --parallel.num-microbatches 1 --evaluation.every 50 \
  --optimizer.warmup-steps 30 --optimizer.decay-steps 270 --train.num-steps ${HALF:-150} "$@"
python -m jaxpar.train gpt2_124m --run.dir runs/gpt2_124m --data.path data/stdlib-50k \
  --train.global-batch-size 64 --parallel.num-microbatches 2 --evaluation.every 50 \
  --optimizer.warmup-steps 30 --optimizer.decay-steps 270 --train.num-steps ${STEPS:-300} "$@"
python -m jaxpar.sample runs/gpt2_124m --prompt "def read_lines(path):" --max-tokens 100
