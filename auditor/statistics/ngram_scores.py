"""Score a record's membership without a language model, by comparing the record with other texts.

The score is a likelihood under n-grams of the other texts, or a similarity to them. Texts are word
ids above 0. Likelihoods are means over the words of a text, in nats. A higher score means more
confidence that the source of the other texts saw the record. No labels are needed, because
references consist of other records, members or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from auditor.core.arrays import Floats
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics.hashed_ngrams import Hashes, hash_token_pieces, join_texts, view_ngrams

ORDER = 4  # words of the longest n-gram
NEAREST = 25  # number of nearest texts whose mean similarity is a record's score
_FOLDS = 5
Texts = Sequence[Tokens]
_AT_ONCE = 256  # records compared with all texts at once


@dataclass(frozen=True)
class NGramCounts:
    """Hashed counts of n-grams of orders 1 to `order`.

    grams: for each order, (ascending hashes, counts).
    contexts: for each order, (hashes, counts, numbers of distinct next words).
    kinds: the size of the vocabulary.
    """

    grams: tuple[tuple[Hashes, Floats], ...]
    contexts: tuple[tuple[Hashes, Floats, Floats], ...]
    kinds: int

    @classmethod
    def count_ngrams(cls, texts: Texts, kinds: int, order: int = ORDER) -> NGramCounts:
        grams = list[tuple[Hashes, Floats]]()
        contexts = list[tuple[Hashes, Floats, Floats]]()
        for context, gram in _hash_ngrams(texts, order):
            different, first, counts = np.unique(gram, return_index=True, return_counts=True)
            grams.append((different, counts.astype(float)))
            # Each distinct n-gram is a distinct word after its context.
            begun, back = np.unique(context[first], return_inverse=True)
            total = np.bincount(back, counts, len(begun))
            n_different = np.bincount(back, minlength=len(begun))
            contexts.append((begun, total.astype(float), n_different.astype(float)))
        return cls(tuple(grams), tuple(contexts), kinds)

    def log_probs(self, texts: Texts) -> Floats:
        """Return log p of each word given the words before it, in nats, for all texts concatenated.

        Orders are interpolated (Witten and Bell 1991): p_k(w|h) = (c(hw) + t(h) p_(k-1)(w|h')) /
        (c(h) + t(h)). c counts occurrences, t(h) is the number of distinct words that follow h, h'
        is h without its first word, and p_0 is uniform.
        """
        p = np.full(sum(map(len, texts)), 1 / self.kinds)
        hashes = _hash_ngrams(texts, len(self.grams))
        for (context, gram), grams, contexts in zip(hashes, self.grams, self.contexts, strict=True):
            count = _look_up_hashes(gram, *grams)
            context_count, different = (
                _look_up_hashes(context, contexts[0], x) for x in contexts[1:]
            )
            # After an unseen context, keep the p of the shorter context.
            known = context_count > 0
            p[known] = ((count + different * p)[known]) / (context_count + different)[known]
        return np.log(p)

    def average_laplace_log_prob(self, texts: Texts) -> Floats:
        """Return each text's mean log p by add-one-smoothed bigrams, in nats, of shape (texts,).

        This is a published score (2502.14921, Algorithm 1, which uses the sum).
        """
        _, (context, gram) = _hash_ngrams(texts, 2)
        count = _look_up_hashes(gram, *self.grams[1])
        context_count = _look_up_hashes(context, *self.contexts[1][:2])
        return average_per_text(np.log((count + 1) / (context_count + self.kinds)), texts)


def _hash_ngrams(texts: Texts, order: int) -> Iterator[tuple[Hashes, Hashes]]:
    """Yield two arrays of hashes for each order k = 1, 2, ..., with one entry per word.

    The first hashes the k - 1 words before the word, the second the k words that end with it. Each
    text is padded with zeros at the start.
    """
    words, starts = join_texts([(*[0] * order, *text) for text in texts])
    lengths = np.diff(starts)
    at = np.flatnonzero(np.arange(len(words)) - np.repeat(starts[:-1], lengths) >= order)
    for k in range(1, order + 1):
        # k - 1 < order words back is the text itself or its zeros, never the previous text.
        context, gram = (hash_token_pieces(view_ngrams(words, n)) for n in (k - 1, k))
        yield context[at - k + 1], gram[at - k + 1]


def _look_up_hashes(hashes: Hashes, known: Hashes, values: Floats) -> Floats:
    """Return the value of each hash; 0 for an unknown hash.

    known, values: ascending hashes and their values.
    """
    if not len(known):
        return np.zeros(len(hashes))
    place = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    return np.where(known[place] == hashes, values[place], 0.0)


def average_per_text(values: Floats, texts: Texts) -> Floats:
    """Return the mean of each text's word values, of shape (texts,); 0 for an empty text.

    values: the word values of all texts, concatenated.
    """
    lengths = np.array([len(text) for text in texts])
    owner = np.repeat(np.arange(len(texts)), lengths)
    return np.bincount(owner, values, len(texts)) / np.maximum(lengths, 1)


def score_against_other_records(model: NGramCounts, records: Texts, seed: int) -> Floats:
    """Return how much more likely each record is by the model's n-grams than by other records'.

    The score is the difference of two mean log p, in nats per word, of shape (records,). The other
    records are a random four fifths of the records, without the record itself. Labels are not used.
    If the model saw no record, scores of members and non-members are therefore exchangeable.
    """
    noise = make_keyed_generator("folds of released text", seed, len(records))
    fold = noise.permutation(len(records)) % _FOLDS
    scores = average_per_text(model.log_probs(records), records)
    for i in range(_FOLDS):
        inside = [records[k] for k in np.flatnonzero(fold == i).tolist()]
        outside = [records[k] for k in np.flatnonzero(fold != i).tolist()]
        others = NGramCounts.count_ngrams(outside, model.kinds)
        scores[fold == i] -= average_per_text(others.log_probs(inside), inside)
    return scores


def measure_jaccard_similarity(
    records: Texts, texts: Texts, kinds: int, nearest: int = NEAREST
) -> Floats:
    """Return each record's mean Jaccard similarity to its `nearest` most similar texts.

    Texts are compared as sets of words. The result has shape (records,). This is a published score
    (2502.14921). kinds: the size of the vocabulary.
    """
    record_words = _build_word_presence_matrix(records, kinds)
    text_words = _build_word_presence_matrix(texts, kinds)
    sizes = np.asarray(text_words.sum(1)).ravel()
    count = min(nearest, len(texts))
    similarities = [np.empty(0)]
    for start in range(0, len(records), _AT_ONCE):
        batch = record_words[start : start + _AT_ONCE]
        common = (batch @ text_words.T).toarray()
        either = np.asarray(batch.sum(1)) + sizes - common
        jaccard = common / np.maximum(either, 1)
        similarities.append(np.partition(jaccard, -count, axis=1)[:, -count:].mean(1))
    return np.concatenate(similarities)


def _build_word_presence_matrix(texts: Texts, kinds: int) -> scipy.sparse.csr_matrix:
    """Return a sparse (texts, kinds + 1) matrix: 1 if the text contains the word, otherwise 0."""
    words, starts = join_texts(texts)
    present = scipy.sparse.csr_matrix(
        (np.ones(len(words), np.float32), words.astype(np.int64), starts),
        shape=(len(texts), kinds + 1),
    )
    present.sum_duplicates()
    present.data[:] = 1
    return present
