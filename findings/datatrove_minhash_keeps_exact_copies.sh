#!/usr/bin/env bash
# Guess: of three exact copies of a document the near-duplicate removal (MinHash, as it comes) keeps one.
# Library: datatrove 0.10.1 (spacy 3.8.18, xxhash 3.8.2). Date: 2026-11-28.
# Seen: it keeps all three if the document has fewer than five words; a Chinese, Japanese or Thai note counts as one word
# a clause, since words are split as in English unless a language is given. language="zho" changes nothing for Chinese;
# "cmn" does: one copy. Copies in the training data are what models learn by heart.
# Why: a document without a run of five words gets no signature, and so is compared with none.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "datatrove==0.10.1" "spacy==3.8.18" "xxhash<4" tokenizers regex jieba
TMPDIR="$work" "$work/venv/bin/python" -W ignore - "$work" 2>"$work/log" <<'PY' || exit 1
import sys
import tempfile

from datatrove.data import Document
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)

other = "a document of its own that is long enough to have a signature"


def count_kept(text, **options):
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    texts = [text, other, text, text]
    documents = [Document(text=text, id=str(i)) for i, text in enumerate(texts)]
    MinhashDedupSignature(f"{folder}/signatures", **options).run(iter(documents), 0, 1)
    for bucket in range(14):
        MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets").run(None, bucket, 14)
    MinhashDedupCluster(f"{folder}/buckets", f"{folder}/removed").run(None, 0, 1)
    kept = MinhashDedupFilter(f"{folder}/removed").run(iter(documents), 0, 1)
    return sum(document.text == text for document in kept)


chinese = "患者王小明因糖尿病在北京协和医院接受治疗，他的电话号码和住址已经登记在医院的系统里，请不要告诉他的家人。"
cases = {
    "English, 12 words": ("The patient was treated for lymphoma on ward seven until last week", {}),
    "English, 5 words": ("my card number is 4512", {}),
    "English, 4 words": ("my card is 4512", {}),
    "Chinese, 50 characters": (chinese, {}),
    "Japanese": ("患者の田中さんは糖尿病で東京の病院に入院しました。電話番号は秘密です。", {}),
    "Thai": ("ผู้ป่วยสมชายได้รับการรักษาโรคเบาหวานที่โรงพยาบาลในกรุงเทพ", {}),
    "Chinese, language='zho'": (chinese, {"language": "zho"}),
    "Chinese, language='cmn'": (chinese, {"language": "cmn"}),
}
counts = {}
for name, (text, options) in cases.items():
    counts[name] = count_kept(text, **options)
    print(f"{name}: {counts[name]} of 3 copies kept")
sys.exit(list(counts.values()) != [1, 1, 3, 3, 3, 3, 3, 1])
PY
