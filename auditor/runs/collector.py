"""Gathers what cells find out secret by secret, for the run folder and for the chains of causes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from auditor.core.nouns import CellKey, Observation, Secret
from auditor.core.result import Measurement
from auditor.plugins.probe import Observed, Probe
from auditor.records import table, texts
from auditor.records.folder import RunFolder
from auditor.records.outcomes import PerSecret
from auditor.records.table import Column
from auditor.runs.causes import Answers
from auditor.runs.generations import Judged
from auditor.statistics import judging, memorised


class Collector:
    """answers: the main number of each member, by cell, and of each non-member what is no memory in it.

    likelihoods: of their true tokens, by target.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.answers: dict[CellKey, Answers] = {}
        self.likelihoods: dict[str, Answers] = {}
        self.heldout: dict[str, Mapping[str, Sequence[float]]] = {}  # nll of each text, by target
        self._rows: dict[CellKey, PerSecret] = {}
        self._observed: list[Column] = []
        self._attacks: list[CellKey] = []
        self._out: dict[CellKey, Judged] = {}

    def judged(
        self, key: CellKey, outcome: judging.Outcome, probable: bool, kinds: Mapping[str, Mapping[str, float]]
    ) -> PerSecret:
        """What an attack's cell came to; probable: its scores are probabilities; kinds: `Personal.extracted`."""
        members = outcome.only(outcome.member)
        own = dict(zip(members.ids, members.hit.astype(float).tolist(), strict=True))
        self.answers[key] = Answers("recall", "share", own)
        of_kinds = {kind: [held.get(id, math.nan) for id in outcome.ids] for kind, held in kinds.items()}
        self._rows[key] = PerSecret.of(outcome, of_kinds, probable)
        self._attacks.append(key)
        return self._rows[key]

    def probed(
        self,
        key: CellKey,
        probe: Probe,
        secrets: Sequence[Secret],
        observations: Observed,
        main: Measurement,
    ) -> None:
        """What a probe's cell came to; main: its first measurement."""
        kept = probe.per_secret(secrets, observations)
        self._rows[key] = _row(secrets, kept)
        self._observed += _seen(key, secrets, observations)
        by_secret = kept.get(main.name, [])
        own, others = (
            {s.id: x for s, x in zip(secrets, by_secret, strict=False) if s.member == member}
            for member in (True, False)
        )
        # A canary's exposure is a rank among texts that were never inserted: nothing is to be taken off it.
        floor = others if probe.of == "secrets" else {}
        if own and np.isfinite([*own.values(), *floor.values()]).all():
            self.answers[key] = Answers(main.name, main.unit, own, floor)

    def written(self, key: CellKey, found: Judged) -> None:
        """What the generations of a cell came to."""
        counts = list(found.counts.values())
        values = {
            memorised.MEMORISED: [memorised.PER * float(count) for count in counts],
            memorised.GENERATIONS: [float(count > 0) for count in counts],
        }
        numbers = {name: np.array(own) for name, own in values.items()}
        self._rows[key] = PerSecret(
            tuple(found.counts), np.ones(len(counts), dtype=bool), (None,) * len(counts), numbers
        )
        self._out[key] = found

    def save(self, secrets: Sequence[Secret], tokenizer: Any) -> None:
        """All of it that is kept, to the run folder."""
        table.write(self.folder.path, self._columns())
        guesses = {str(key): self.folder.done(key) for key in self._attacks}
        out = {str(key): found.texts for key, found in self._out.items()}
        texts.write_texts(self.folder.path, secrets, guesses, decoder(tokenizer), out)

    def _columns(self) -> Iterator[Column]:
        for key, row in self._rows.items():
            yield from row.columns(key)
        yield from self._observed
        for target in self.likelihoods:
            scored = self.folder.scored(target)
            ids = [id for id, seen in scored.items() for _ in seen.log_probs]
            values = [value for seen in scored.values() for value in seen.log_probs]
            yield Column(table.TOKENS, CellKey(target, "", ""), "log_prob", ids, values)
        for target, losses in self.heldout.items():
            for name, numbers in losses.items():
                texts = [f"heldout-{i}" for i in range(len(numbers))]
                yield Column(table.HELDOUT, CellKey(target, "", ""), name, texts, numbers)
        for key, found in self._out.items():
            yield from found.out.columns(key)


def _row(secrets: Sequence[Secret], values: Mapping[str, Sequence[float]]) -> PerSecret:
    member = np.array([secret.member for secret in secrets], dtype=bool)
    numbers = {name: np.array(own, dtype=float) for name, own in values.items()}
    return PerSecret(tuple(s.id for s in secrets), member, tuple(s.repeats for s in secrets), numbers)


def _seen(key: CellKey, secrets: Sequence[Secret], observations: Sequence[Observation]) -> Iterator[Column]:
    for name in dict.fromkeys(name for one in observations for name in one.values):
        own = [(s, o.values[name]) for s, o in zip(secrets, observations, strict=True) if name in o.values]
        of, values = [secret for secret, _ in own], [value for _, value in own]
        ids, member, repeats = ([getattr(s, field) for s in of] for field in ("id", "member", "repeats"))
        yield Column(table.OBSERVED, key, name, ids, values, member, repeats)


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Tokens as text, as they are; their ids where there is no tokenizer."""
    if tokenizer is None:
        return lambda tokens: "".join(f"{token} " for token in tokens)
    return lambda tokens: str(
        tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
