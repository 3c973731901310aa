"""Exact exposure against batched scoring of every text of the space, on the lab's target, in one run.

    python -m benchmarks.checks.speed.exposure [--sample 8192] [--repeats 2] [--prefix-token eos|none]

The space: the 10^6 six-digit texts of "My ID is {digits:6}". Batched scoring reads the nll of every candidate, 512 at a
time and teacher-forced, all of one length together; it is timed on a sample of the space and scaled. The search's trie
is made once for a tokenizer and a format, cached, and timed apart; so is the tokenising of the sample. Ratios only:
absolute times on shared machines prove nothing. Promised: 100x or more for a memorised canary, 20x for one that is not.
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from auditor.benchmarks.lab_recipe import CANARY_SPACE, canary_text
from auditor.core.streams import generator
from auditor.generation import tries
from auditor.statistics.exposure import of_rank
from benchmarks.checks.harness import lab, run, seconds

NEVER_INSERTED = "123456"


def main(sample: int = 8192, repeats: int = 2, prefix_token: Literal["eos", "none"] = "eos") -> None:
    built = lab()
    model, tokenizer = built.target(), built.tokenizer
    start = time.perf_counter()
    tree = tries.build(CANARY_SPACE, tokenizer)
    made = time.perf_counter() - start
    print(f"trie: {tree.leaves:,} texts, {tree.nodes:,} inner nodes, made in {made:.1f} s, then cached")
    context = (*model.eos[:1], *tree.head) if prefix_token == "eos" else tree.head
    noise = generator("speed", "exposure")
    texts = [CANARY_SPACE.draw(noise) for _ in range(sample)]
    tails = [tuple(ids[len(tree.head) :]) for ids in tries.encode(tokenizer, texts)]
    scale = CANARY_SPACE.size / len(tails)
    batched = scale * seconds(repeats, lambda: tries.nlls(model, context, tails))[0]
    print(f"batched scoring: {batched:.0f} s, scaled from {len(tails):,} texts; prefix token: {prefix_token}")
    print(f"{'canary':>10} {'inserted':>9} {'exposure':>9} {'rank':>9} {'rows':>8} {'seconds':>9} {'faster':>9}")
    for digits, inserted in (*built.recipe.canaries, (NEVER_INSERTED, 0)):
        tail = tuple(tokenizer(canary_text(digits))["input_ids"][len(tree.head) :])
        limit = tries.tied(tries.nlls(model, context, [tail]))
        found = tries.count(model, tree, context, limit)
        (took,) = seconds(repeats, lambda limit=limit: tries.count(model, tree, context, limit))
        rank = int(found.at_most[0])
        print(
            f"{digits:>10} {inserted:>9} {of_rank(rank, np.log2(CANARY_SPACE.size)):>9.2f} {rank:>9,} {found.rows:>8,} "
            f"{took:>9.3f} {batched / took:>8,.0f}x"
        )


if __name__ == "__main__":
    raise SystemExit(run(main))
