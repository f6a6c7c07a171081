#!/usr/bin/env bash
# Ten minutes before a long run, or on every pull request: is the data right, and does the whole
# way from data to answers work?
#
#   examples/ci/check.sh MODEL TRAIN.jsonl VAL.jsonl [STEPS]
#
# MODEL is a small model of the same family (a folder, or a hub id with PTC_DOWNLOAD=1).
# Exit status: that of the first command that fails (1: the data said no, 2: usage, 3: the run).
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
model=$1 train=$2 val=$3 steps=${4:-10}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
download=()
[ -n "${PTC_DOWNLOAD:-}" ] && download=(--allow-download)
format=text
[ -n "${GITHUB_ACTIONS:-}" ] && format=github # findings show up beside the lines of the diff

ptc doctor --need train
ptc validate "$train" --against "$val" --format "$format"
ptc sft --model "$model" --train "$train" --val "$val" --output-dir "$work/run" --gpus 0 \
    --lora-rank 8 --max-steps "$steps" --batch-size 2 --max-length 512 --log-interval 1 \
    --save-interval "$steps" "${download[@]}"
ptc resume "$work/run" # a finished run: says so and touches nothing
ptc infer --model "$work/run" --input "$val" --out "$work/answers.jsonl" --gpus 0 \
    --temperature 0 --max-new-tokens 16
[ "$(grep -c . "$val")" -eq "$(grep -c . "$work/answers.jsonl")" ]
echo "data, training, resume and answers: all fine" >&2
