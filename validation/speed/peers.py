"""Compare results and time of our code with other packages' code, on the same model and rows.

    pip install --no-deps --target PEERS memaudit==0.2.0 jax-privacy==2.0.0 lm-eval==0.4.13 \\
        privacyguard-platform==0.0.2
    python -m validation.speed.peers PEERS [--model tiny] [--secrets 32] [--repeats 3] [-o FILE]

The model is SmolLM2-135M in float32, or a tiny Llama with random weights, which shows the cost
beside the forwards. Processor time of one thread is measured, in turns. A package that is not in
PEERS is left out with a message.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.attacks.membership import Membership
from auditor.benchmarks.lab.smollm2 import find_smollm2_folder
from auditor.core.nouns import Secret
from auditor.models.decoding import ANCESTRAL, Decoding
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import DEFAULTS, load_tokenizer_if_present
from auditor.runs import scoring
from auditor.statistics import one_run, roc
from validation.harness import Page, median_and_spread, run
from validation.speed.sheet import PREFIX, SUFFIX, Bench, smollm2, texts

_BATCH = 16  # rows that a peer reads at once
# 4 of 16 tokens: if the share is not a whole number, we take fewer tokens and memaudit takes more
_K = 0.25


@dataclass(frozen=True)
class PeerPair:
    """A piece of work done by another package and by us; both return numbers in the same order."""

    what: str
    peer: str
    theirs: Callable[[], Sequence[float]]
    ours: Callable[[], Sequence[float]]


def of_memaudit(bench: Bench, count: int) -> Iterator[PeerPair]:
    theirs: Any = importlib.import_module("memaudit.scoring")
    stats: Any = importlib.import_module("memaudit.stats")
    secrets, model = bench.some(count)[0], bench.model
    plain, tokenizer = model.model, model.tokenizer

    def signals() -> list[Any]:
        span = (PREFIX, PREFIX + SUFFIX)
        return [
            theirs.extract_token_signals(plain, one.prefix + one.suffix, span) for one in secrets
        ]

    def scored(name: str) -> list[float]:
        probe = Membership(score="min_k_plus", lowercase=False, k=_K)
        return [seen.values[name] for seen in probe.observe_secrets(bench.view(), secrets)]

    def min_k_plus() -> list[float]:
        return [
            stats.min_k_plus_plus(one.gold_logprob, one.mu, one.sigma, 100 * _K)
            for one in signals()
        ]

    yield PeerPair("membership, Min-K%++", "memaudit", min_k_plus, lambda: scored("min_k_plus"))
    yield PeerPair(
        "membership, mean log-probability",
        "memaudit",
        lambda: [float(np.mean(one.gold_logprob)) for one in signals()],
        lambda: scored("loss"),
    )

    # memaudit reads these texts and tokenizes them again.
    words = [tokenizer.decode(one.prefix) for one in secrets]
    anew = [
        replace(one, prefix=tuple(tokenizer(text)["input_ids"]))
        for one, text in zip(secrets, words, strict=True)
    ]

    def completed() -> list[float]:
        return [
            zlib.crc32(theirs.greedy_complete(plain, tokenizer, text, SUFFIX).encode())
            for text in words
        ]

    def greedy() -> list[float]:
        return [
            zlib.crc32(tokenizer.decode(text).encode())
            for text in scoring.decode_greedily(model, anew)
        ]

    yield PeerPair(
        "greedy decoding, by checksums of its texts", "memaudit (generate)", completed, greedy
    )


def of_lm_eval(bench: Bench, count: int) -> Iterator[PeerPair]:
    theirs: Any = importlib.import_module("lm_eval.models.huggingface")
    secrets, model = bench.some(count)[0], bench.model
    harness = theirs.HFLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=_BATCH)
    rows = [(("", ""), list(one.prefix), list(one.suffix)) for one in secrets]
    yield PeerPair(
        "log-likelihood of the suffix",
        "lm-evaluation-harness",
        lambda: [nats for nats, _ in harness._loglikelihood_tokens(rows, disable_tqdm=True)],
        lambda: score_suffixes(bench, secrets, ANCESTRAL),
    )


def score_suffixes(bench: Bench, secrets: Sequence[Secret], decoding: Decoding) -> list[float]:
    """Return each suffix's log-probability under the decoding, in nats."""
    probe = ExtractionProbability(
        temperature=decoding.temperature, top_k=decoding.top_k, top_p=decoding.top_p
    )
    return [seen.values["log_p"] for seen in probe.observe_secrets(bench.view(), secrets)]


def of_privacy_guard(bench: Bench, count: int) -> Iterator[PeerPair]:
    theirs: Any = importlib.import_module(
        "privacy_guard.attacks.extraction.predictors.huggingface_predictor"
    )
    model = bench.model
    # its constructor loads a model from a folder
    predictor = theirs.HuggingFacePredictor.__new__(theirs.HuggingFacePredictor)
    predictor.model, predictor.tokenizer, predictor.device = model.model, model.tokenizer, "cpu"
    secrets, texts = list[Secret](), list[tuple[str, str]]()
    for secret in bench.secrets:
        text = (model.tokenizer.decode(secret.prefix), model.tokenizer.decode(secret.suffix))
        # it tokenizes the suffix alone, and the prefix together with the suffix
        if [model.tokenizer(part)["input_ids"] for part in (text[1], "".join(text))] == [
            list(secret.suffix),
            [*secret.prefix, *secret.suffix],
        ]:
            secrets.append(secret)
            texts.append(text)
    prefixes, suffixes = zip(*texts[:count], strict=True)
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 40}
    yield PeerPair(
        "probability of the suffix, temperature 0.8, top-k 40",
        "PrivacyGuard",
        lambda: [
            float(nats.double().sum())
            for nats in predictor.get_logprobs(prefixes, suffixes, batch_size=_BATCH, **options)
        ],
        lambda: score_suffixes(bench, secrets[:count], Decoding(**options)),
    )


def of_jax_privacy(folder: Path, count: int = 2000) -> Iterator[PeerPair]:
    # loaded from its file, because the package imports JAX
    file = folder / "jax_privacy" / "auditing.py"
    spec = importlib.util.spec_from_file_location("peer_auditing", file)
    assert spec is not None and spec.loader is not None
    theirs: Any = importlib.util.module_from_spec(spec)
    sys.modules["peer_auditing"] = theirs
    spec.loader.exec_module(theirs)
    drawn = np.random.default_rng(0)
    own, others = drawn.normal(1.0, 1.0, count), drawn.normal(0.0, 1.0, count)
    yield PeerPair(
        "AUC of 4,000 scores",
        "jax_privacy (of the convex hull)",
        lambda: [theirs.CanaryScoreAuditor(own, others).attack_auroc()],
        lambda: [roc.auc(own, others)],
    )
    # Bounds for a single r.
    asked = [(m, right, e) for m in (20, 24, 28, 31) for right in (m - 4, m) for e in (0.5, 1.0)]
    yield PeerPair(
        "p-value of an audit in one run, all canaries guessed, 16 of them",
        "jax_privacy",
        lambda: [theirs._one_run_p_value(m, m, right, e, 0.0) for m, right, e in asked],
        lambda: [one_run.compute_one_run_p_value(m, (right,), e, 0.0) for m, right, e in asked],
    )


def tiny() -> HuggingFaceModel:
    """Return a Llama of two layers with random weights and SmolLM2's tokenizer."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer_if_present(str(find_smollm2_folder()), DEFAULTS)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return HuggingFaceModel(LlamaForCausalLM(config).eval(), tokenizer, "a tiny Llama")


def pairs(bench: Bench, folder: Path, count: int, say: Callable[[str], None]) -> Iterator[PeerPair]:
    sys.path.insert(0, str(folder))
    packages = {
        "memaudit": lambda: of_memaudit(bench, count),
        "lm_eval": lambda: of_lm_eval(bench, count),
        "privacy_guard": lambda: of_privacy_guard(bench, count),
        "jax_privacy": lambda: of_jax_privacy(folder),
    }
    for name, make in packages.items():
        if (folder / name).is_dir():
            yield from make()
        else:
            say(f"{name} is not in {folder}: left out")


def main(
    folder: Path,
    model: Literal["smollm2", "tiny"] = "smollm2",
    secrets: int = 32,
    repeats: int = 3,
    out: Path | None = None,
) -> None:
    torch.set_num_threads(1)
    page = Page(out)
    loaded = smollm2() if model == "smollm2" else tiny()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(loaded, list(texts(loaded)), Path(scratch))
        page.head(
            "the same work",
            "by",
            "theirs",
            "ours",
            "times as fast, median",
            "spread",
            "farthest apart",
        )
        for pair in pairs(bench, folder, secrets, page.say):
            seconds = []
            for _ in range(repeats):
                turn = []
                for work in (pair.theirs, pair.ours):
                    start = time.process_time()
                    turn.append((np.asarray(work(), dtype=float), time.process_time() - start))
                seconds.append([spent for _, spent in turn])
                (theirs, _), (ours, _) = turn
                differ = theirs != ours  # equal infinities do not
                apart = float(np.abs(theirs[differ] - ours[differ]).max(initial=0.0))
            medians = (
                f"{statistics.median(column):.3g} s" for column in zip(*seconds, strict=True)
            )
            faster = median_and_spread([theirs / ours for theirs, ours in seconds])
            page.row(pair.what, pair.peer, *medians, *faster, f"{apart:.1e}")


if __name__ == "__main__":
    raise SystemExit(run(main))
