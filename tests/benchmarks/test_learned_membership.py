"""The script of a learned score: it is asked only about what it was not fitted to, finds a planted sign, and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from auditor.core.secret_randomness import keyed_random_generator
from benchmarks.checks.trust import learned_membership as program
from benchmarks.checks.trust import membership_worlds
from benchmarks.checks.trust.membership_worlds import Sizes, divided, occurred, shapes

SMALL = Sizes(
    members=6,
    nonmembers=20,
    public=6,
    documents=40,
    tokens=48,
    words=300,
    hidden=16,
    layers=1,
    public_epochs=1,
    seeds=1,
)


def looks(key: str, gain: float, members: int = 40, others: int = 120) -> program.Asked:
    """A world in which members have gained so much a token, in nats."""
    family, kind = key.split("-")
    noise, member = keyed_random_generator(key), np.arange(members + others) < members
    shape = (len(member), 16)
    seen = {"log_prob": noise.normal(-3, 1, shape), "rank": noise.integers(0, 3, shape).astype(float)}
    seen |= {"margin": noise.normal(0, 1, shape), "mean": np.full(shape, -3.0), "deviation": np.ones(shape)}
    seen |= {f"base_{name}": value.copy() for name, value in seen.items()}
    seen["log_prob"] += noise.normal(0, 1, shape) + gain * member[:, None]
    seen["before"] = np.zeros(shape)
    return program.Asked(family, kind, 0, member, program.features(seen), program.formulas(seen))


def test_a_world_is_never_scored_by_what_shares_its_family_or_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [looks(f"{family}-{kind}", 1.0) for family in "abc" for kind in "xy"]
    for one in every:
        known = program.apart(every, one.family, one.kind)
        assert {(other.family, other.kind) for other in known} == {
            (family, kind) for family in "abc" for kind in "xy" if family != one.family and kind != one.kind
        }
    monkeypatch.setattr(program, "RECIPES", program.RECIPES[:1])
    program.learn(every)
    before = every[0].scores["learned"]
    others = [one if one.family != "a" and one.kind != "x" else replace(one, member=~one.member) for one in every]
    program.learn([every[0], *others[1:]])  # other labels where it must not look
    assert np.array_equal(every[0].scores["learned"], before)


def test_what_members_gain_is_found_and_nothing_where_they_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RECIPES", program.RECIPES[:2])
    for gain, low, high in ((1.5, 0.95, 1.0), (0.0, 0.35, 0.65)):
        every = [looks(f"{family}-{kind}", gain) for family in "abc" for kind in "xy"]
        assert sum(program.learn(every).values()) == len(every)
        assert low <= np.mean([one.numbers("learned")[0] for one in every]) <= high


def test_no_document_is_in_two_parts() -> None:
    documents: list[list[tuple[int, ...]]] = [[(i, j) for j in range(1 + i % 3)] for i in range(200)]
    parts = divided(documents, "web", SMALL, seed=0)
    held = [{i for i, _ in part} for part in (parts.public, parts.members, parts.nonmembers)]
    assert [len(part) for part in (parts.public, parts.members, parts.nonmembers)] == [6, 6, 20]
    assert not (held[0] & held[1] or held[0] & held[2] or held[1] & held[2])


def test_a_token_occurred_where_it_stands_earlier() -> None:
    assert occurred(np.array([[5, 6, 5, 5], [1, 2, 3, 1]])).tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_it_runs_and_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(models.WordLevel({"w" * (1 + i % 7) + str(i): i for i in range(60)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tokenizer")
    for part in ("preprefix", "prefix", "suffix"):
        made = keyed_random_generator("arrays", part).integers(0, 60, (40, 40)).astype(np.uint16)
        np.save(tmp_path / f"val_{part}.npy", made)
    monkeypatch.setattr(program, "SIZES", SMALL)
    monkeypatch.setattr(membership_worlds, "KINDS", ("web", "code"))
    monkeypatch.setattr(program, "RECIPES", program.RECIPES[:1])
    program.main(tmp_path, tmp_path / "tokenizer", tmp_path / "out")
    page, files = (tmp_path / "out" / "page.md").read_text(), sorted((tmp_path / "out").glob("*.npz"))
    assert len(files) == 2 * len(shapes(SMALL))
    assert "6 worlds, 36 members, 120 non-members" in page
    assert all(f"| {name} |" in page for name in ("learned", "same", "lira", "gpt2", "web", *program.FORMULAS))
    program.main(tmp_path, tmp_path / "missing", tmp_path / "out")  # nothing is trained or read but OUT
    assert (tmp_path / "out" / "page.md").read_text() == page
