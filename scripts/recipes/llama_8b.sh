#!/bin/sh
# docs/recipes/llama_8b.md. Options of this script are added to each training command.
set -eux
python -m jaxpar.data prepare --input ${INPUT:-downloads/fineweb-edu/sample/10BT} \
  --output data/web_llama3 --tokenizer ${TOKENIZER:-downloads/Llama-3.1-8B/tokenizer.json} --holdout 0.001
python -m jaxpar.train llama3_8b --run.dir runs/llama_8b --data.path data/web_llama3 \
  --train.global-batch-size 64 --parallel.num-microbatches 8 --parallel.zero 1 \
  --parallel.remat none --evaluation.every 500 --train.num-steps ${STEPS:-19000} "$@"
python -m jaxpar.sample runs/llama_8b --prompt "Photosynthesis is" --max-tokens 100
