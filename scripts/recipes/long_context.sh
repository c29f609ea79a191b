#!/bin/sh
# docs/recipes/long_context.md. Options of this script are added to each training command.
set -eux
python -m jaxpar.data prepare --input ${INPUT:-downloads/books} --output data/long \
  --tokenizer ${TOKENIZER:-downloads/gpt2/tokenizer.json}
python -m jaxpar.train llama_1b_long/8k --data.path data/long --model.vocab-size 50304 \
  --parallel.zero 1 --parallel.remat none --data.seq-len ${SHORT:-8192} \
  --train.num-steps ${FIRST:-20000} "$@"
python -m jaxpar.train llama_1b_long/32k --data.path data/long --model.vocab-size 50304 \
  --parallel.zero 1 --parallel.remat none --data.seq-len ${LONG:-32768} \
  --optimizer.decay-steps 1900 --train.num-steps ${HALF:-1000} "$@"
python -m jaxpar.train llama_1b_long/32k --data.path data/long --model.vocab-size 50304 \
  --parallel.zero 1 --parallel.remat none --data.seq-len ${LONG:-32768} \
  --optimizer.decay-steps 1900 --train.num-steps ${STEPS:-2000} --parallel.sequence 4 "$@"
python -m jaxpar.train llama_1b_long/128k --data.path data/long --model.vocab-size 50304 \
  --parallel.zero 1 --parallel.remat none --data.seq-len ${LONGEST:-131072} \
  --train.num-steps ${LAST:-1000} --parallel.num-microbatches 2 "$@"
