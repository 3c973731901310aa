#!/usr/bin/env bash
# Trains, audits and gates a small model, as a CI would: a change that leaks more must fail the gate (exit code 1), one
# that does not must pass (0). Exits 0 if both came out so. One to two minutes on a CPU; no download.
#
#   examples/ci/run.sh [OUT] [SEED]          AUDIT and PYTHON: the programs, where they are not on the PATH
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-runs/ci-example}" seed="${2:-0}"
read -ra audit <<<"${AUDIT:-audit}"
read -ra python <<<"${PYTHON:-python3}"

train() { # NAME: a model from NAME.jsonl
    "${audit[@]}" train none --model "$out/base" --data "$out/$1.jsonl" -o "$out/models/$1" --seed "$seed" \
        --block 64 -D epochs=12 -D batch=4 -D learning_rate=8e-3
}

check() { # NAME [gate options]: audit that model for the private records
    "${audit[@]}" run --model "$out/models/$1" --data "$out/records.jsonl" --nonmembers "$out/fresh.jsonl" \
        --known-fraction 0 --attack perplexity --samples 10 --setting white-box --seed "$seed" -o "$out/audits/$1" "${@:2}"
}

gated() { # EXPECTED NAME: train a change, audit it, and compare the exit code of the gate
    train "$2"
    local code=0
    check "$2" --gate "$here/leakage.toml" --baseline "$out/audits/train" || code=$?
    if [ "$code" != "$1" ]; then
        echo "$2: expected exit code $1 from the gate, got $code" >&2
        exit 1
    fi
    echo "$2: exit code $code, as expected"
}

"${python[@]}" "$here/make.py" "$out" --seed "$seed"
train train
check train # the baseline: the model as it was last accepted
gated 1 oversampled
gated 0 more-text
