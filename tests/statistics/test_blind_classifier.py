"""The blind baseline and the stacked score: silent where labels are drawn at random, aloud where
they are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from sklearn.model_selection import StratifiedGroupKFold

from auditor.core.nouns import Secret, Tokens
from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import blind_classifier, roc


def texts(count: int, key: str = "texts", words: int = 200, length: int = 30) -> list[Tokens]:
    return [
        tuple(row) for row in make_keyed_generator(key).integers(0, words, (count, length)).tolist()
    ]


def told_apart(
    rows: list[Tokens], member: np.ndarray, lengths: np.ndarray | None = None
) -> tuple[float, float]:
    """AUC of the blind baseline and the low end of its interval."""
    group = blind_classifier.group_related_texts(rows)
    sizes = np.empty((len(rows), 0)) if lengths is None else lengths
    features = blind_classifier.build_text_features(rows, sizes)
    scores = blind_classifier.predict_membership(features, member, group)
    widen = blind_classifier.compute_cross_fit_deviation_factor(member, group)
    found = roc.estimate_auc("blind_auc", scores[member], scores[~member], widen=widen)
    return found.value, found.low


def test_random_splits_are_told_apart_no_oftener_than_the_interval_says() -> None:
    rows, objections = texts(100), 0
    for i in range(40):
        member = make_keyed_generator("split", i).permutation(100) < 60
        objections += told_apart(rows, member)[1] > 0.5
    assert objections <= 3  # 1 expected


def test_other_words_and_other_lengths_are_noticed() -> None:
    rows = texts(200)
    member = np.arange(200) < 100
    dated = [
        (*row[:-1], 999) if own and i % 2 else row
        for i, (row, own) in enumerate(zip(rows, member, strict=True))
    ]
    value, low = told_apart(dated, member)
    assert value > low > 0.5
    longer = [row + row[:6] if own else row for row, own in zip(rows, member, strict=True)]
    assert told_apart(longer, member)[1] > 0.9
    characters = np.where(member, 120.0, 100.0)[:, None] + make_keyed_generator("sizes").normal(
        0, 3, (200, 1)
    )
    assert told_apart(rows, member, characters)[1] > 0.9


def test_a_word_said_once_is_heard_beside_others_said_forty_times() -> None:
    """All of the members have a word that no other text has; how often the rest is said tells
    nothing."""
    noise, rows = make_keyed_generator("said once"), []
    for i in range(120):
        text = [
            word for word in noise.permutation(6)[:4].tolist() for _ in range(noise.integers(1, 40))
        ]
        rows.append(tuple([*text, 999] if i < 60 else text))
    features = blind_classifier.build_text_features(rows, np.empty((120, 0)))
    scores = blind_classifier.predict_membership(features, np.arange(120) < 60, np.arange(120))
    assert roc.auc(scores[:60], scores[60:]) > 0.75


def test_near_duplicates_share_a_group_and_leak_nothing_between_folds() -> None:
    """Every text twice but for one token, labels at random by pair: only a copy in another fold
    could tell."""
    base = texts(100)
    copies = [(*row[:10], 999, *row[11:]) for row in base]
    rows = [*base, *copies]
    group = blind_classifier.group_related_texts(rows)
    assert (group[:100] == group[100:]).all() and len(set(group.tolist())) == 100
    half = make_keyed_generator("halves").permutation(100) < 50
    member = np.concatenate([half, half])
    assert told_apart(rows, member)[1] < 0.5
    features = blind_classifier.build_text_features(rows, np.empty((200, 0)))
    leaky = blind_classifier.predict_membership(features, member, np.arange(200))
    assert roc.auc(leaky[member], leaky[~member]) > 0.8


def test_groups_are_chains_of_near_duplicates_of_any_length() -> None:
    one = tuple(range(20))
    rows = [
        one,
        (*one[:16], 90, 91, 92, 93),
        (*one[:12], 94, 95, 96, 97, 90, 91, 92, 93),
        (5,),
        (5,),
        (6,),
    ]
    assert blind_classifier.group_related_texts(rows).tolist() == [0, 0, 0, 1, 1, 2]


def test_a_stacked_score_uses_no_label_of_its_own() -> None:
    """A column for each record would give every label away to whoever was fitted to it."""
    noise = make_keyed_generator("stacked")
    member = np.arange(120) < 60
    own = blind_classifier.predict_membership(
        blind_classifier.standardise_columns(np.eye(120)), member, np.arange(120)
    )
    # what is left is rounding, in which one processor sees an order and another none
    assert np.ptp(own) < 1e-9
    features = np.column_stack([member + noise.normal(0, 0.3, 120), noise.normal(size=120)])
    found = blind_classifier.predict_membership(
        blind_classifier.standardise_columns(features), member, np.arange(120)
    )
    assert roc.auc(found[member], found[~member]) > 0.85


@pytest.mark.parametrize("relatedness", [0.1, 0.5, 3])
def test_folds_are_those_of_stratified_groups(relatedness: float) -> None:
    """Also if groups have both members and others, and if all records are unrelated."""
    rng = make_keyed_generator("folds", relatedness)
    for n in (30, 100, 301):
        member = rng.random(n) < 0.7
        group = rng.integers(0, int(n * relatedness), n)
        folds = blind_classifier.count_cross_fit_folds(member, group)
        assert folds > 1
        expected = StratifiedGroupKFold(folds, shuffle=True, random_state=0)
        pairs = zip(
            expected.split(member, member, group),
            blind_classifier._split_cross_fit_folds(member, group),
            strict=True,
        )
        for one, other in pairs:
            assert [side.tolist() for side in one] == [side.tolist() for side in other]


def test_joined_columns_are_those_of_hstack() -> None:
    """Rows without entries included."""
    rng = make_keyed_generator("columns")
    left = scipy.sparse.random_array((40, 9), density=0.1, rng=rng, format="csr")
    right = scipy.sparse.random_array((40, 2), density=0.5, rng=rng, format="csr")
    joined = blind_classifier._join_sparse_columns(left, right)
    expected = scipy.sparse.hstack([left, right], format="csr")
    for name in ("data", "indices", "indptr"):
        one, other = getattr(joined, name), getattr(expected, name)
        assert one.dtype == other.dtype and one.tolist() == other.tolist()


def test_too_few_to_fold_say_nothing_rather_than_something() -> None:
    member = np.array([True, True, True, False])
    assert np.isnan(
        blind_classifier.predict_membership(
            blind_classifier.standardise_columns(np.ones((4, 2))), member, np.arange(4)
        )
    ).all()


def test_the_deviation_grows_with_folds_and_with_the_groups_of_related_texts() -> None:
    alternating = np.arange(40) % 2 == 0
    factor = blind_classifier.compute_cross_fit_deviation_factor
    assert factor(alternating, np.arange(40)) == pytest.approx(1.5)  # five folds
    # without it, 14% of random splits were told apart, of 2.5%
    in_fours = np.repeat(np.arange(20), 4)
    assert factor(np.repeat([True, False], 40), in_fours) == pytest.approx(1.5 * 2)
    assert factor(np.array([True, True, False]), np.array([0, 1, 2])) == 1.0


def test_parts_of_one_origin_are_in_one_group_and_chains_of_origins_too() -> None:
    rows = texts(6)
    documents = ["a", "a", "b", None, None, "b"]
    users = [None, "p", "q", "q", None, None]
    assert blind_classifier.group_related_texts(rows, documents).tolist() == [0, 0, 1, 2, 3, 1]
    assert blind_classifier.group_related_texts(rows, documents, users).tolist() == [
        0,
        0,
        1,
        1,
        2,
        1,
    ]
    # A document and a person of one name are not related by it.
    assert blind_classifier.group_related_texts(
        rows, ["a", *[None] * 5], [*[None] * 5, "a"]
    ).tolist() == [*range(6)]


def test_parts_of_records_split_at_random_are_not_told_apart() -> None:
    """Three parts a record, in words of the record's own: without its document in one fold, they
    tell its label."""
    noise = make_keyed_generator("parts")
    own_words = noise.integers(200, 2000, (60, 8))
    rows = [
        (*texts(1, f"part {i} {j}")[0], *own_words[i].tolist()) for i in range(60) for j in range(3)
    ]
    document = np.repeat(np.arange(60), 3)
    member = document % 2 == 0
    groups = (
        blind_classifier.group_related_texts(rows),
        blind_classifier.group_related_texts(rows, document.tolist()),
    )
    apart, together = (
        roc.auc(scores[member], scores[~member])
        for scores in (
            blind_classifier.predict_membership(
                blind_classifier.build_text_features(rows, np.empty((180, 0))), member, group
            )
            for group in groups
        )
    )
    assert apart > 0.8
    assert abs(together - 0.5) < 0.15


@pytest.mark.parametrize("kind", ["prompt", "person"])
def test_records_of_one_prompt_or_person_split_at_random_are_not_told_apart(kind: str) -> None:
    """Three answers to each of 60 prompts, or notes on each person; before, one prompt's answers
    told its label."""
    noise = make_keyed_generator(f"{kind}s")
    aucs = []
    for split in range(4):
        own_words = noise.integers(200, 2000, (60, 10))
        secrets = [
            Secret(
                f"{i}.{j}",
                tuple(own_words[i].tolist()),
                texts(1, f"{split} {i} {j}")[0],
                member=i % 2 == 0,
            )
            for i in range(60)
            for j in range(3)
        ]
        if kind == "person":  # in each note in other words before it
            secrets = [
                replace(s, prefix=(j, *s.prefix), user=s.id.split(".")[0])
                for j, s in enumerate(secrets)
            ]
        member = np.array([secret.member for secret in secrets])
        group = blind_classifier.group_related_secrets(secrets)
        assert len(set(group.tolist())) == 60
        rows = [secret.prefix + secret.suffix for secret in secrets]
        features = blind_classifier.build_text_features(rows, np.empty((180, 0)))
        scores = blind_classifier.predict_membership(features, member, group)
        aucs.append(roc.auc(scores[member], scores[~member]))
    assert abs(np.mean(aucs) - 0.5) < 0.1


def test_a_prefix_of_many_texts_or_of_few_tokens_relates_none() -> None:
    rows, phrase = texts(10), tuple(range(9000, 9010))
    of_all = [Secret(f"{i}", phrase, row) for i, row in enumerate(rows)]
    short = [Secret(f"{i}", phrase[: 7 if i < 2 else 0], row) for i, row in enumerate(rows)]
    two = [Secret(f"{i}", phrase if i < 2 else (), row) for i, row in enumerate(rows)]
    n_groups = [
        len(set(blind_classifier.group_related_secrets(one).tolist()))
        for one in (of_all, short, two)
    ]
    assert n_groups == [10, 10, 9]
