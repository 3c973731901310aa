"""What does not fit into memory at once is asked in parts, and comes to the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor

from auditor.attacks.ethicist import Ethicist
from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.attacks.membership import Membership
from auditor.attacks.near_verbatim import NearVerbatim
from auditor.core import machine_memory
from auditor.core.nouns import Pair, Query, Secret
from auditor.generation import tries
from auditor.models import memory
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.memory import BatchSizeLimit
from auditor.plugins.probe import Probe
from auditor.plugins.view import WHITE_BOX, View
from auditor.runs.scoring import measure_repeat_recall
from tests.conftest import check_command, save_tiny
from tests.models import limited

HELD = 6  # sequences that the injected limit lets through one forward


def grew() -> Exception:
    """As torch says it; a new one each time, as an error holds on to where it was raised."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


PAIRS = [
    Pair(tuple(row[:5]), tuple(row[5:]))
    for row in torch.randint(1, 61, (12, 9), generator=torch.Generator().manual_seed(1)).tolist()
]
SECRETS = [
    Secret(f"s{i}", tuple(row[:5]), tuple(row[5:]), member=i % 2 == 0)
    for i, row in enumerate(
        torch.randint(1, 61, (24, 9), generator=torch.Generator().manual_seed(2)).tolist()
    )
]


class Tight:
    """A model's forward that no more than so many sequences fit into; counts how often more were
    asked of it."""

    def __init__(self, forward: Callable[..., Any], most: int) -> None:
        self.forward, self.most, self.refused, self.widest = forward, most, 0, 0

    def __call__(self, read: Tensor, last: int, cache: Any = None) -> Tensor:
        if len(read) > self.most:
            self.refused += 1
            raise grew()
        self.widest = max(self.widest, len(read))
        return self.forward(read, last, cache)


@pytest.fixture
def tight(
    neox: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], Tight]]:
    """Sets a limit on the session's model."""

    def limit(most: int) -> Tight:
        made = Tight(HuggingFaceModel.compute_input_logits.__get__(neox), most)
        monkeypatch.setattr(neox, "compute_input_logits", made)
        # no attempt needs it here, and each takes long
        monkeypatch.setattr(memory.gc, "collect", lambda: 0)
        return made

    yield limit
    monkeypatch.undo()


def view(model: HuggingFaceModel) -> View:
    return View("undefended", model, WHITE_BOX, seed=0)


def queries(secrets: Sequence[Secret]) -> list[Query]:
    return [Query(secret.id, secret.prefix, len(secret.suffix)) for secret in secrets]


# --- the walk ---


def test_pieces_are_halved_where_memory_ends_and_stay_so() -> None:
    asked: list[tuple[int, int]] = []

    def work(some: slice) -> list[int]:
        asked.append((some.start, some.stop))
        if some.stop - some.start > 5:
            raise grew()
        return list(range(50))[some]

    found = [x for _, part in BatchSizeLimit(16).run_pieces_within_memory(18, work) for x in part]
    assert found == list(range(18))
    assert asked == [(0, 16), (0, 8), (0, 4), (4, 8), (8, 12), (12, 16), (16, 18)]


@pytest.mark.parametrize(
    "error", [grew(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()]
)
def test_what_does_not_fit_alone_is_raised(error: Exception) -> None:
    sizes: list[int] = []

    def work(size: int) -> None:
        sizes.append(size)
        raise error

    with pytest.raises(type(error)):
        BatchSizeLimit(5).run_within_memory(work)
    assert sizes == [5, 2, 1]
    with pytest.raises(type(error)):
        BatchSizeLimit(8, minimum=8).run_within_memory(work)
    assert sizes[3:] == [8]


def test_any_other_error_is_raised_at_once() -> None:
    sizes: list[int] = []

    def work(size: int) -> None:
        sizes.append(size)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        BatchSizeLimit(8).run_within_memory(work)
    assert sizes == [8]


def test_where_no_kernel_is_compiled_any_more_another_thread_goes_on() -> None:
    """As oneDNN does: once refused, a thread stays refused, whatever is freed."""
    lost: set[int] = set()
    sizes: list[int] = []

    def work(size: int) -> bool:
        assert not torch.is_grad_enabled()
        sizes.append(size)
        if size > 2 or threading.get_ident() in lost:
            lost.add(threading.get_ident())
            raise RuntimeError("could not create a primitive")
        return True

    with torch.no_grad():
        assert BatchSizeLimit(3, minimum=2).run_within_memory(work) == (2, True)
        assert BatchSizeLimit(1).run_within_memory(work) == (1, True)
    assert sizes == [3, 2, 1, 1]


def test_what_a_refused_attempt_made_is_gone_before_the_next() -> None:
    class Made:
        pass

    made: WeakSet[Made] = WeakSet()
    counts: list[int] = []

    def work(size: int) -> None:
        counts.append(len(made))
        held = [Made() for _ in range(size)]
        made.update(held)
        if size > 1:
            raise grew()

    BatchSizeLimit(4).run_within_memory(work)
    assert counts == [0, 0, 0]


def test_rows_take_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "measure_free_device_memory", lambda device: 4000)
    assert memory.choose_memory_budget(cpu, 5000) == 1000
    assert memory.choose_memory_budget(cpu, 600) == 600


def test_memory_ends_where_the_control_group_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_memory, "_GROUP", tmp_path)
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "900\n"),
        ("memory.stat", "inactive_file 300\n"),
    ):
        (tmp_path / name).write_text(text)
    assert memory.measure_free_device_memory(torch.device("cpu")) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.measure_free_device_memory(torch.device("cpu")) > 400


# --- results ---


@pytest.mark.parametrize("samples", [3, 40])  # 40: samples of a single prefix outgrow it too
def test_guesses_are_the_same_in_parts(
    neox: HuggingFaceModel, tight: Callable[[int], Tight], samples: int
) -> None:
    attack = PerplexityRanking(samples=samples)
    whole = list(attack.guess(view(neox), {}, queries(SECRETS)))
    limit = tight(HELD)
    parts = list(attack.guess(view(neox), {}, queries(SECRETS)))
    assert limit.refused and limit.widest <= HELD
    assert [[(g.suffix, g.count) for g in own.ranked] for own in parts] == [
        [(g.suffix, g.count) for g in own.ranked] for own in whole
    ]
    scores = [[g.score for own in found for g in own.ranked] for found in (parts, whole)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize("search", ["tree", "beam"])
def test_searches_are_the_same_in_parts(
    neox: HuggingFaceModel, tight: Callable[[int], Tight], search: Any
) -> None:
    attack = PerplexityRanking(search=search, threshold=0.3, beams=2)
    whole = list(attack.guess(view(neox), {}, queries(SECRETS)))
    limit = tight(HELD)
    parts = list(attack.guess(view(neox), {}, queries(SECRETS)))
    assert limit.refused
    assert [[g.suffix for g in own.ranked] for own in parts] == [
        [g.suffix for g in own.ranked] for own in whole
    ]


@pytest.mark.parametrize(
    "probe", [ExtractionProbability(), Membership(score="min_k_plus"), NearVerbatim(beams=2)]
)
def test_observations_are_the_same_in_parts(
    neox: HuggingFaceModel, tight: Callable[[int], Tight], probe: Probe
) -> None:
    whole = list(probe.observe_secrets(view(neox), SECRETS))
    limit = tight(HELD)
    parts = list(probe.observe_secrets(view(neox), SECRETS))
    assert limit.refused
    assert [seen.secret for seen in parts] == [seen.secret for seen in whole]
    for one, other in zip(parts, whole, strict=True):
        assert one.values == pytest.approx(other.values, abs=1e-5)


def test_a_prompt_is_tuned_to_the_same_in_parts(
    neox: HuggingFaceModel, tight: Callable[[int], Tight]
) -> None:
    attack = Ethicist(prompt_length=3, epochs=2, warmup_steps=0, batch=10)
    whole = attack.fit(view(neox), PAIRS)
    limit = tight(4)
    parts = attack.fit(view(neox), PAIRS)
    assert limit.refused
    torch.testing.assert_close(parts["prompt"], whole["prompt"], atol=1e-5, rtol=0)
    assert parts["validation_loss"] == pytest.approx(whole["validation_loss"], abs=1e-5)


def test_greedy_recall_is_the_same_in_parts(
    neox: HuggingFaceModel, tight: Callable[[int], Tight]
) -> None:
    whole = measure_repeat_recall(neox, SECRETS)
    limit = tight(HELD)
    assert measure_repeat_recall(neox, SECRETS) == whole
    assert limit.refused


def test_leaves_are_counted_the_same_in_parts(
    neox: HuggingFaceModel, tight: Callable[[int], Tight]
) -> None:
    texts = np.array(
        [[a, b, c] for a in range(1, 9) for b in range(1, 9) for c in range(1, 4)], dtype=np.int32
    )
    shared = (texts[1:] == texts[:-1]).cumprod(axis=1).sum(axis=1)
    levels = tries._build_trie_levels(texts, np.full(len(texts), 3), shared)
    tree, limits = tries.Trie((5,), levels, 8), [8.0, 11.0, 14.0]
    whole = tries.count_leaves_within_nll(neox, tree, (1, 5), limits)
    limit = tight(HELD)
    parts = tries.count_leaves_within_nll(neox, tree, (1, 5), limits)
    assert limit.refused
    assert parts.at_most.tolist() == whole.at_most.tolist()


def test_guesses_are_the_same_where_memory_really_ends() -> None:
    """A limit that the system itself sets (`ulimit -v`), and what torch and its libraries make of
    it.

    Wide tensors meet it. 10 MiB stay for small ones, as glibc ends a process whose new thread finds
    none (48 MiB left 0.3 to 1.2), and one arena, as those of threads take this room.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "tests.models.limited", "72"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["halved"]
    whole = json.loads(json.dumps(limited.guesses(limited.model())))
    both = [
        (one, other) for one, other in zip(found["guesses"], whole, strict=True) if one and other
    ]
    assert len(both) >= len(whole) - 4
    assert [one for one, _ in both] == [other for _, other in both]


# --- the command ---


def records(path: Path, count: int) -> None:
    rows = [
        {"prefix": f"ward {i % 7} bed {i * 37 % 97:02d} code", "suffix": f" {i * 7919 % 997:03d}"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_memory_for_nothing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> Tensor:
        raise grew()

    save_tiny(tmp_path / "model")
    records(tmp_path / "private.jsonl", 6)
    monkeypatch.setattr("auditor.models.base.LanguageModel.completions", full)
    out = tmp_path / "run"
    words = [
        "run",
        "--model",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "private.jsonl"),
        "-o",
        str(out),
    ]
    check_command(*words, "--attack", "perplexity", code=2)
    said = capsys.readouterr().err
    assert "error: out of memory, even for one text at a time" in said
    assert "Traceback" not in said
