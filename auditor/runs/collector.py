"""Gathers what cells find out secret by secret, for the run folder and for the chains of causes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from auditor.core.nouns import CellKey, Secret
from auditor.core.result import Measurement
from auditor.plugins.probe import Observed, Probe, probe_record
from auditor.records import memorised as memorised_records
from auditor.records import texts
from auditor.records.folder import RunFolder
from auditor.records.outcomes import PerSecret, per_secret
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
        self._records: dict[CellKey, dict[str, Any]] = {}
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
        record = {**judging.to_record(outcome), "kinds": of_kinds, "score_is_probability": probable}
        self._records[key] = record
        self._attacks.append(key)
        return per_secret(record)

    def probed(
        self,
        key: CellKey,
        probe: Probe,
        secrets: Sequence[Secret],
        observations: Observed,
        main: Measurement,
    ) -> None:
        """What a probe's cell came to; main: its first measurement."""
        self._records[key] = probe_record(probe, secrets, observations)
        by_secret = probe.per_secret(secrets, observations).get(main.name, [])
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
        nobody = {"ids": list(found.counts), "member": [True] * len(counts), "repeats": [None] * len(counts)}
        self._records[key] = {**nobody, "values": values}
        self._out[key] = found

    def save(self, secrets: Sequence[Secret], tokenizer: Any) -> None:
        """All of it that is kept, to the run folder."""
        self.folder.save_outcomes(self._records)
        self.folder.save_heldout(self.heldout)
        guesses = {str(key): self.folder.done(key) for key in self._attacks}
        if self._out:
            memorised_records.save(self.folder.path, {key: found.out for key, found in self._out.items()})
        out = {str(key): found.texts for key, found in self._out.items()}
        texts.write_texts(self.folder.path, secrets, guesses, decoder(tokenizer), out)


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Tokens as text, as they are; their ids where there is no tokenizer."""
    if tokenizer is None:
        return lambda tokens: "".join(f"{token} " for token in tokens)
    return lambda tokens: str(
        tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
