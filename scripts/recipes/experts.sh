#!/bin/sh
# docs/recipes/experts.md. Options of this script are added to each training command.
set -eux
python -m jaxpar.data prepare --input ${INPUT:-downloads/fineweb-edu/sample/10BT} \
  --output data/web --tokenizer ${TOKENIZER:-downloads/gpt2/tokenizer.json} --holdout 0.001
python -m jaxpar.train olmoe_1b_7b --run.dir runs/experts --data.path data/web \
  --train.global-batch-size 128 --parallel.zero 1 --parallel.remat none --evaluation.every 500 \
  --optimizer.decay-steps 18900 --train.num-steps ${HALF:-9500} "$@"
python -m jaxpar.train olmoe_1b_7b --run.dir runs/experts --data.path data/web \
  --train.global-batch-size 128 --parallel.zero 1 --parallel.remat none --evaluation.every 500 \
  --optimizer.decay-steps 18900 --train.num-steps ${STEPS:-19000} --parallel.expert ${EXPERT:-8} "$@"
python -m jaxpar.sample runs/experts --prompt "Photosynthesis is" --max-tokens 100
