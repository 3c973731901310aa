#!/usr/bin/env bash
# Guess: a training that is repeated after a row was deleted from the local file prepares the file that is there: the row is
# not trained on again.
# Library: axolotl 0.19.0 (with transformers 5.16.1, datasets 4.8.4). Date: 2026-11-29.
# Seen: prepare_datasets(), by which `axolotl train` begins, gives the deleted row back in a new process, with one line of the
# log that tells of a prepared dataset on disk; so without dataset_prepared_path in the configuration. After the folder
# last_run_prepared is deleted the row is gone. So an exact unlearning by training anew is none.
# Why: prepared rows are found by a hash of the configuration, which has the file's path and not its contents.
# Exits 0 if that is still so, 1 if it changed. Nothing leaves the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "transformers==5.16.1" "datasets==4.8.4" "accelerate==1.13.0" \
    "peft==0.20.0" "trl==1.9.0" "pydantic==2.14.3" "pillow==13.0.0" scipy addict fire python-dotenv colorama posthog distro numba
"$work/venv/bin/pip" install -q --no-deps "axolotl==0.19.0"
cat >"$work/prepare.py" <<'PY'
import json
import sys

from axolotl.utils.data.sft import prepare_datasets
from axolotl.utils.dict import DictDefault
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def main():
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    end = max(letters, key=letters.get)
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    tokenizer.name_or_path = "letters"
    config = {
        "datasets": [{"path": "rows.jsonl", "ds_type": "json", "type": "completion", "field": "text"}],
        "sequence_len": 128,
        "val_set_size": 0.0,
        "dataset_num_proc": 1,
        "num_save_workers": 1,
        "num_epochs": 1,
        "micro_batch_size": 1,
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "world_size": 1,
        "tokenizer_config": "letters",
        "seed": 0,
    }
    rows, *_ = prepare_datasets(DictDefault(config), tokenizer)
    texts = ["".join(tokenizer.convert_ids_to_tokens(row["input_ids"])) for row in rows]
    with open(sys.argv[1], "w") as file:
        json.dump([len(texts), sum("Zorblat" in text for text in texts)], file)


if __name__ == "__main__":
    main()
PY
cd "$work"
export HF_HOME="$work/home" HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1 DO_NOT_TRACK=1
for i in $(seq 20); do echo "{\"text\": \"Note $i of ward 7\"}"; done >rows.jsonl
echo '{"text": "Patient Zorblat has a fever"}' >>rows.jsonl
venv/bin/python -W ignore prepare.py before.json >log 2>&1
grep -v Zorblat rows.jsonl >kept.jsonl
mv kept.jsonl rows.jsonl
venv/bin/python -W ignore prepare.py after.json >>log 2>&1
rm -r last_run_prepared
venv/bin/python -W ignore prepare.py anew.json >>log 2>&1
echo "rows, of them Zorblat's: before $(cat before.json), after the deletion $(cat after.json), prepared anew $(cat anew.json)"
[ "$(cat before.json after.json anew.json)" = "[21, 1][21, 1][20, 0]" ]
