"""What a run costs beside other work, held against its fair share of the processors: as torch does it, and as we do.

    python benchmarks/speed/busy.py [--busy 3] [--repeats 3] [--steps 40]

The work is training and decoding of a model of the lab's size, in a process of its own; the other work is processes
that count. What is fair is measured in the same run: how much slower as many counting processes as the work has threads
count beside the others. Best times of alternating runs; ratios only, as times on shared machines prove nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from auditor.core import threads

_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
COUNT = """
import sys, time
n, end = 0, time.perf_counter() + float(sys.argv[1])
while time.perf_counter() < end:
    n += 1
print(n)
"""


def work(steps: int) -> float:
    """Seconds of so many training steps and as many decoded tokens of 8 rows."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=2048, max_position_embeddings=128, **shape))
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(2048, (8, 64))
    for warm in (True, False):
        start = time.perf_counter()
        for _ in range(2 if warm else steps):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(input_ids=tokens[:, :1])
    return time.perf_counter() - start


def timed(ours: bool, steps: int) -> float:
    """Of a process that has torch's defaults, or ours; OMP_NUM_THREADS holds for both, a waiting policy for none."""
    environment = {name: value for name, value in os.environ.items() if name not in _POLICIES}
    arguments = [sys.executable, __file__, "--work", "ours" if ours else "torch", "--steps", str(steps)]
    found = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True)
    return float(found.stdout)


@contextmanager
def others(count: int) -> Iterator[None]:
    """So many processes that count until they are ended."""
    started = [subprocess.Popen([sys.executable, "-c", COUNT, "1e9"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def counted(processes: int, seconds: float = 2.0) -> int:
    """What so many processes count in that time."""
    command = [sys.executable, "-c", COUNT, str(seconds)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return sum(int(one.communicate()[0]) for one in started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", choices=("ours", "torch"), help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.work:
        if o.work == "ours":
            threads.settle()
        print(work(o.steps))
        return
    own = int(os.environ.get("OMP_NUM_THREADS", threads.processors()))
    best: dict[tuple[bool, int], float] = {}
    counts: dict[int, int] = {0: 0, o.busy: 0}
    for _ in range(o.repeats):
        for busy in counts:
            with others(busy):
                counts[busy] = max(counts[busy], counted(own))
                for ours in (False, True):
                    best[ours, busy] = min(best.get((ours, busy), float("inf")), timed(ours, o.steps))
    fair = counts[0] / counts[o.busy]
    print(
        f"{own} threads on {threads.processors()} processors beside {o.busy} busy processes: {fair:.2f} times is fair"
    )
    for ours, name in ((False, "torch's defaults"), (True, "as audit chooses")):
        slower = best[ours, o.busy] / best[ours, 0]
        alone = best[ours, 0] / best[False, 0]
        print(
            f"{name}: {slower:.2f} times as long, {slower / fair:.2f} of its fair share; alone {alone:.2f} of torch's"
        )


if __name__ == "__main__":
    main()
