"""Measure how processor time and memory of whole audits grow with each size.

    python -m validation.speed.curves [--only secrets ...] [--most N] [--repeats 3] [-o FILE]

Models are real ones of transformers with one layer, width 16 and random weights: what grows with a
size grows as for a large model, and forward passes take little time. An audit is what `audit run`
does, from reading the data to the reports. Each audit has a process of its own with one thread;
its processor time and the growth of its memory are measured. The exponent is p in seconds = a + b
size^p.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from scipy.optimize import nnls
from scipy.stats import f as f_distribution
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.memory import release_unused_memory
from validation.harness import Page, refuse, run

VOCABULARY, LENGTH = 256, 8  # entries; tokens of a prefix, and of a suffix of fixed length
WORDS = 20  # of a record
CHEAP = 5.0  # seconds: a slower audit runs once
POWERS = np.arange(0, 3.001, 0.01)  # exponents to try
# Seconds of reading the data, of queries with all statistics, and of reports.
Parts = dict[str, float]


@dataclass(frozen=True)
class Knob:
    """A size to vary. make: writes an audit's files into an empty folder and returns its
    arguments.
    """

    words: str
    sizes: tuple[int, ...]
    make: Callable[[Path, int], dict[str, Any]]


@dataclass(frozen=True)
class AuditCost:
    """The cost of one audit. memory: largest growth in bytes."""

    size: int
    parts: Parts
    memory: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Growth:
    """A fit of seconds = fixed + rest * size^power, with the 95% interval of the power."""

    power: float
    low: float
    high: float
    fixed: float


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> Growth:
    """Fit the growth of seconds with size by least squares of relative errors.

    The interval has all powers that an F test does not reject. Raise ValueError for fewer than
    three different sizes or fewer than four points.
    """
    n, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    if len(n) < 4 or len(set(sizes)) < 3:
        raise ValueError(f"expected 4 points of 3 sizes or more, got {len(n)} of {len(set(sizes))}")
    fits = [nnls(np.column_stack([1 / t, (n / n.max()) ** p / t]), np.ones(len(t))) for p in POWERS]
    lost = np.array([norm**2 for _, norm in fits])
    best, free = int(lost.argmin()), len(n) - 3
    kept = POWERS[lost <= lost[best] * (1 + f_distribution.ppf(0.95, 1, free) / free) + 1e-15]
    return Growth(
        float(POWERS[best]), float(kept.min()), float(kept.max()), float(fits[best][0][0])
    )


# --- inputs ---


def tiny(vocabulary: int = VOCABULARY) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 1, "n_positions": 1024}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, **shape)
    ).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w0")


def arrays(
    folder: Path, secrets: int, suffix: int = LENGTH, vocabulary: int = VOCABULARY
) -> dict[str, Any]:
    """Write random token ids, with a tenth as many non-members as secrets; return the arguments."""
    for name, count in (("data", secrets), ("nonmembers", max(5, secrets // 10))):
        (folder / name).mkdir()
        ids = make_keyed_generator("curves", name).integers(
            vocabulary, size=(count, LENGTH + suffix), dtype=np.uint32
        )
        np.save(folder / name / "a_prefix.npy", ids[:, :LENGTH])
        np.save(folder / name / "a_suffix.npy", ids[:, LENGTH:])
    data = {name: str(folder / name) for name in ("data", "nonmembers")}
    return {"model": tiny(vocabulary), **data, "prefix_length": LENGTH, "suffix_length": suffix}


def members(folder: Path, size: int) -> dict[str, Any]:
    """Return the arguments of an audit of PMixED with `size` LoRA adapters of rank 2."""
    from auditor.defenses.pmixed import PMixed
    from auditor.training.members import LoraAdapterRecipe, add_lora_adapter, get_member_folder

    asked = arrays(folder, 50)
    asked["model"].save_pretrained(folder / "model")
    for i in range(size):
        add_lora_adapter(tiny(), LoraAdapterRecipe(2, 4, "attention")).save_pretrained(
            get_member_folder(folder / "members", i)
        )
        path = get_member_folder(folder / "members", i) / "adapter_config.json"
        written = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(
            json.dumps({**written, "base_model_name_or_path": str(folder / "model")}),
            encoding="utf-8",
        )
    mixed = PMixed(ensemble=str(folder / "members"), q=0.5)
    places = {"model": str(folder / "model"), "public": str(folder / "model")}
    return {
        **asked,
        **places,
        "attacks": ["extraction-probability"],
        "defenses": [mixed],
        "controls": False,
    }


def records(folder: Path, size: int) -> dict[str, Any]:
    """Write texts, every tenth of which is a copy; 200 texts are attacked. Return the arguments."""
    noise, said = make_keyed_generator("curves", "records"), [f"w{i}" for i in range(VOCABULARY)]
    with (folder / "data.jsonl").open("w", encoding="utf-8") as out:
        for _ in range(size // 10):  # a few at a time, to save memory that the audit could use
            rows = noise.integers(VOCABULARY, size=(9, WORDS)).tolist()
            out.writelines(
                f'{{"text": "{" ".join([said[i] for i in row])}"}}\n' for row in [*rows, rows[0]]
            )
    cut = {"prefix_length": LENGTH, "suffix_length": LENGTH, "limit": 200}
    asked = {"attacks": ["extraction-probability"], "tokenizer": tokenizer()}
    return {"model": tiny(), "data": str(folder / "data.jsonl"), **cut, **asked}


BOTH: dict[str, Any] = {"attacks": ["perplexity", "extraction-probability"], "samples": 10}
KNOBS = {
    "secrets": Knob(
        "secrets, exact probability",
        (100, 1000, 10_000, 100_000),
        lambda folder, size: {**arrays(folder, size), "attacks": ["extraction-probability"]},
    ),
    "membership": Knob(
        "secrets, membership",
        (100, 1000, 10_000, 100_000),
        lambda folder, size: {**arrays(folder, size), "attacks": ["membership"]},
    ),
    "samples": Knob(
        "samples a secret",
        (10, 100, 1000, 10_000),
        lambda folder, size: {**arrays(folder, 10), "attacks": ["perplexity"], "samples": size},
    ),
    "suffix": Knob(
        "tokens of a suffix",
        (8, 32, 128, 512),
        lambda folder, size: {**arrays(folder, 100, suffix=size), **BOTH},
    ),
    "vocabulary": Knob(
        "entries of the vocabulary",
        (256, 2048, 16_384, 131_072),
        lambda folder, size: {**arrays(folder, 20, vocabulary=size), **BOTH},
    ),
    "members": Knob("members of an ensemble", (2, 16, 128, 512), members),
    "records": Knob("records of the data", (1000, 10_000, 100_000, 1_000_000), records),
}


# --- measurements ---


def audited(out: Path, model: Any, tokenizer: Any = None, **asked: Any) -> Parts:
    """Run one audit as `auditor.audit` does; return the seconds of each part."""
    from auditor.api import open_prepared_audit
    from auditor.records.folder import RunFolder
    from auditor.reports import files
    from auditor.runs import run as runs

    parts, start = Parts(), time.process_time()

    def clock(name: str) -> None:
        nonlocal start
        start, begun = time.process_time(), start
        parts[name] = parts.get(name, 0.0) + start - begun

    with open_prepared_audit(model, tokenizer, **asked) as site:
        site.load_benchmark_shared_by_runs()
        clock("data")
        planned = runs.plan_audit(site)
        folder = RunFolder.create(out, site.plan.run_folder_title, site.plan.to_json())
        result = runs.run_audit(planned, folder)
    clock("asking")
    files.write_run_reports(folder.path, result)
    clock("reports")
    return parts


def once(knob: Knob, size: int, told: Any) -> None:
    """Run one audit in this process; send the seconds of its parts and its memory growth in
    bytes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked = knob.make(Path(scratch), size)
        forget_peak()
        before = peak()
        told.send((audited(Path(scratch) / "run", **asked), peak() - before))


def forget_peak() -> None:
    """Reset the process's peak memory to its current memory.

    A child begins with its parent's peak and unused memory, which would hide its own growth.
    """
    release_unused_memory()
    with contextlib.suppress(OSError):  # without this file, the peak stays that of the parent
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(knob: Knob, sizes: Sequence[int], repeats: int) -> list[AuditCost]:
    """Return the costs of audits of each size; only cheap audits are repeated."""
    found = []
    fork = multiprocessing.get_context("fork")  # imports happen once, before the fork
    for size in sizes:
        for _ in range(repeats):
            here, there = fork.Pipe(duplex=False)
            child = fork.Process(target=once, args=(knob, size, there))
            child.start()
            there.close()
            try:
                parts, memory = here.recv()
            except EOFError:
                refuse(
                    f"the audit of {size:,} {knob.words} ended without an answer: it says above why"
                )
            child.join()
            found.append(AuditCost(size, parts, memory))
            told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
            print(f"{size:,} {knob.words}: {told}; {memory / 1e6:,.0f} MB", file=sys.stderr)
            if found[-1].seconds > CHEAP:
                break
    return found


# --- output ---


def row(knob: Knob, costs: Sequence[AuditCost]) -> tuple[str, ...]:
    """Return the cells of a table row.

    These are sizes, seconds, exponent with interval, the last step's exponent, fixed time, parts,
    and memory.
    """
    seconds, memory = (
        medians(costs, lambda cost: cost.seconds),
        medians(costs, lambda cost: cost.memory),
    )
    found = growth([c.size for c in costs], [c.seconds for c in costs])
    before, most = [*seconds][-2:]
    parts = {
        name: statistics.median(c.parts[name] for c in costs if c.size == most)
        for name in costs[0].parts
    }
    return (
        knob.words,
        ", ".join(f"{size:,}" for size in seconds),
        ", ".join(
            f"{median:.2f}" if median < 10 else f"{median:.0f}" for median in seconds.values()
        ),
        f"{found.power:.2f} ({found.low:.2f} to {found.high:.2f})",
        f"{math.log(seconds[most] / seconds[before]) / math.log(most / before):.2f}",
        f"{found.fixed:.1f} s",
        ", ".join(f"{name} {part / sum(parts.values()):.0%}" for name, part in parts.items()),
        ", ".join(f"{median / 1e6:,.0f}" for median in memory.values()),
        f"{max(0.0, (memory[most] - memory[before]) / (most - before)) / 1e3:,.1f} kB",
    )


def medians(costs: Sequence[AuditCost], number: Callable[[AuditCost], float]) -> dict[int, float]:
    """Return the median of `number` over the audits of each size."""
    sizes = dict.fromkeys(cost.size for cost in costs)
    return {
        size: statistics.median(number(cost) for cost in costs if cost.size == size)
        for size in sizes
    }


def main(
    only: Annotated[tuple[str, ...], tuple(KNOBS)] = tuple(KNOBS),
    most: Annotated[int, "the largest size of any; 0: all"] = 0,
    repeats: int = 3,
    out: Path | None = None,
) -> None:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    page = Page(out)
    for name in ("members", "records"):  # loads and computes once what a process caches
        with tempfile.TemporaryDirectory() as scratch:
            audited(
                Path(scratch) / "run",
                **KNOBS[name].make(Path(scratch), 1000 if name == "records" else 2),
            )
    speed = "seconds", "exponent", "of the last step", "fixed", "parts of the last"
    page.head("what grows", "sizes", *speed, "memory grew by, MB", "of one more")
    for name in only:
        sizes = [size for size in KNOBS[name].sizes if not most or size <= most]
        if len(sizes) < 3:
            refuse(
                f"expected --most with three sizes of {name} or more ({KNOBS[name].sizes}), got "
                f"{most}"
            )
        page.row(*row(KNOBS[name], measured(KNOBS[name], sizes, repeats)))


if __name__ == "__main__":
    raise SystemExit(run(main))
