#!/bin/sh
# docs/recipes/llama_1b.md. Options of this script are added to each training command.
set -eux
python -m jaxpar.data prepare --input ${INPUT:-downloads/fineweb-edu/sample/10BT} \
  --output data/web --tokenizer ${TOKENIZER:-downloads/gpt2/tokenizer.json} --holdout 0.001
python -m jaxpar.train llama_1b --run.dir runs/llama_1b --data.path data/web \
  --model.vocab-size 50304 --train.global-batch-size 128 --parallel.zero 1 --parallel.remat none \
  --evaluation.every 500 --train.num-steps ${STEPS:-19000} "$@"
python -m jaxpar.sample runs/llama_1b --prompt "Photosynthesis is" --max-tokens 100
python -m jaxpar.convert to-hf runs/llama_1b exports/llama_1b
