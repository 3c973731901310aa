"""Whether a model that was loaded gives one distribution however it is asked, on random tokens and
on a few records of the run, before anything rests on it.

Four things are held against what transformers itself gives for token ids: the distribution by input
embeddings, the distribution of rows that were advanced and split, the distribution of a token when
others follow it, and that distributions are numbers. A way of asking that fails is left out where
another is right, and said; a model that no way is right for is refused. Knows nothing of what a
model is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, get_args
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from auditor.core import disk
from auditor.core.errors import AuditError, is_out_of_memory, wrap_library_errors
from auditor.core.jsonable import read_json_object
from auditor.models.base import check_logits_finite
from auditor.models.consistency import SEED, STEPS, collect_row_log_probs, compute_largest_distance
from auditor.models.huggingface import HuggingFaceModel, Served
from auditor.models.memory import group_equal_shapes
from auditor.models.self_check_facts import (
    Records,
    choose_records_to_compare,
    is_adapter_on,
    non_special_token_ids,
    rounding_tolerance,
    self_check_digest,
    text_lengths_to_test,
)

AT_LOAD = 16  # tokens of the longest text that is tried before a run says how long its texts are
_SHORT = 12  # tokens of the texts that most is tried on
_RECORD_STEPS = 2  # tokens of a suffix that are read one by one

# By model: the longest text that it was checked on, and how far rounding may put two of its
# distributions apart.
_checked: WeakKeyDictionary[HuggingFaceModel, tuple[int, float | None]] = WeakKeyDictionary()
_compared_on_records: WeakSet[HuggingFaceModel] = WeakSet()
_kept_in: ContextVar[Path | None] = ContextVar("folder of what self-checks found", default=None)


@contextmanager
def keeping_self_checks_of_loaded_models(folder: Path) -> Iterator[None]:
    """Keeps in this folder what self-checks find of the models that are loaded meanwhile, whose
    weights are to stay."""
    token = _kept_in.set(folder)
    try:
        yield
    finally:
        _kept_in.reset(token)


def check_loaded_model(model: HuggingFaceModel) -> None:
    """Checks a model that was loaded just now, on texts as short as they can be."""
    model.choices_kept_in = _kept_in.get()
    check_and_configure_serving(model, cache=model.choices_kept_in)


def check_and_configure_serving(
    model: HuggingFaceModel,
    reach: int | None = None,
    records: Records = (),
    cache: Path | None = None,
) -> tuple[str, ...]:
    """Tries the model on texts of up to `reach` tokens, and leaves it served as is right, with
    notes that say so.

    reach: soft prompt, prefix and suffix of the longest text of a run; None: not known yet.
    records: those of the run, of which a few are read as transformers reads them. cache: a folder
    that keeps what was found, by the digest of the weights. What was tried before is not tried
    again. Returns the notes that are new. Raises AuditError for a model that no way of asking is
    right for, or whose distributions on texts that long depend on what comes later.
    """
    wanted = AT_LOAD if reach is None else reach
    room = min(wanted, model.max_positions or wanted)
    reached, tolerance = _checked.get(model, (0, None))
    records = (
        () if model in _compared_on_records else choose_records_to_compare(model, records, room)
    )
    if room <= max(reached, 1) and not records:
        return ()
    # what held for shorter texts is tried anew
    before, model.begins, model.can_join_rows = (
        model.notes,
        None,
        False,
    )
    adapter = next(
        (other for other in _checked if _is_base_of_checked_adapter(model, other, reach, room)),
        None,
    )
    if adapter is not None:
        _check_base_of_adapter(model, adapter, room)
        return ()
    kept = (
        None
        if cache is None or model.activation
        else cache / f"{self_check_digest(model, room, records)}.json"
    )
    if kept is not None and kept.is_file():
        _apply_kept_self_check(model, read_json_object(kept, "what a self-check found"))
        _checked[model] = max(room, reached), tolerance
        if records:
            _compared_on_records.add(model)
        return model.notes[len(before) :]
    with torch.no_grad(), wrap_library_errors(f"cannot ask {model.name!r} for a distribution"):
        trial = _SelfCheckTrial(model, max(room, 2), records, reached, tolerance)
        if not reached:
            trial.check_causality()
            trial.drop_embeddings_unless_faithful()
        # In this order: a shorter room first, then rows in it, then what stands on how they are
        # served.
        trial.limit_text_length(needed=reach is not None)
        trial.choose_row_serving()
        if reach is not None:
            trial.enable_exact_prefix_sharing()
            trial.enable_exact_row_joining()
    _checked[model] = max(room, reached), trial.tolerance
    if records:
        _compared_on_records.add(model)
    if kept is not None:
        found = {
            "row_serving": model.served,
            "begins": model.begins is not None,
            "can_join_rows": model.can_join_rows,
            "embeddings": "embeddings" in model.capabilities,
            "max_positions": model.max_positions,
            "notes": list(model.notes[len(before) :]),
        }
        disk.replace_atomically(kept, json.dumps(found))
    return model.notes[len(before) :]


def _is_base_of_checked_adapter(
    model: HuggingFaceModel, other: HuggingFaceModel, reach: int | None, room: int
) -> bool:
    """Return whether the other model is an adapter on this one that was right for such texts as it
    is served.

    How rows, beginnings and joined rows are to be served follows from code and configuration, which
    both share.
    """
    is_as_fast = (
        other.served == model.served == "slots"
        and "embeddings" in other.capabilities & model.capabilities
    )
    is_shared = reach is None or (other.begins is not None and other.can_join_rows)
    return is_as_fast and is_shared and _checked[other][0] >= room and is_adapter_on(other, model)


def _check_base_of_adapter(model: HuggingFaceModel, adapter: HuggingFaceModel, room: int) -> None:
    """Check of the base what depends on its weights, and serve it as the adapter, which was checked
    on it."""
    reached, tolerance = _checked.get(model, (0, None))
    if not reached:
        with torch.no_grad(), wrap_library_errors(f"cannot ask {model.name!r} for a distribution"):
            trial = _SelfCheckTrial(model, max(room, 2))
            trial.check_causality()
        tolerance = trial.tolerance
    if adapter.begins is not None:
        model.enable_shared_prefix_cache()
    model.can_join_rows = adapter.can_join_rows
    _checked[model] = max(room, reached), tolerance
    if adapter in _compared_on_records:
        _compared_on_records.add(model)


def _apply_kept_self_check(model: HuggingFaceModel, found: Mapping[str, Any]) -> None:
    model.served, model.can_join_rows = found["row_serving"], found["can_join_rows"]
    model.max_positions = found["max_positions"]
    if not found["embeddings"]:
        model.capabilities = model.capabilities - {"embeddings"}
    if found["begins"]:
        model.enable_shared_prefix_cache()
    model.notes = (*model.notes, *found["notes"])


class _SelfCheckTrial:
    """One model on one set of random tokens, and on a few records of the run.

    reached, tolerance: what an earlier check of the model found; what it tried is not tried again.
    """

    def __init__(
        self,
        model: HuggingFaceModel,
        room: int,
        records: Records = (),
        reached: int = 0,
        tolerance: float | None = None,
    ) -> None:
        self.model, self.room, self.short = model, room, min(_SHORT, room)
        self.records, self.reached = records, reached
        noise = torch.Generator().manual_seed(SEED)
        ordinary = non_special_token_ids(model)
        texts = ordinary[torch.randint(len(ordinary), (2, room), generator=noise)].to(model.device)
        self.texts = texts
        if tolerance is not None:
            self.tolerance = tolerance
            return
        # Two texts that differ in their last token, as transformers answers them.
        self.twins = torch.cat([texts[:1, : self.short]] * 2)
        self.twins[1, -1] = ordinary[ordinary != texts[0, self.short - 1].cpu()][0]
        logits = model.model(input_ids=self.twins).logits[:, -self.short :].float()
        check_logits_finite(logits, model.name)
        self.own = logits.log_softmax(-1)
        self.tolerance = rounding_tolerance(model.model, logits)

    def is_same_distribution(self, found: Tensor, truth: Tensor) -> bool:
        """Whether two distributions (..., V) are one but for rounding."""
        return compute_largest_distance(found, truth) <= self.tolerance

    def check_causality(self) -> None:
        """Raises AuditError unless earlier tokens change a distribution, and later ones, or their
        presence, do not."""
        first, second = self.own[:, :-1]  # before the only token in which the twins differ
        if bool((self.own == self.own[:, :1]).all()):
            raise AuditError(
                f"expected a distribution that depends on the text, but {self.model.name} has the "
                "same behind every token: the weights are zero or broken"
            )
        at = self.short - 2
        alone = self.model.log_probs(self.twins[:1, :at], 1)[0, 0]
        if not self.is_same_distribution(first, second) or not self.is_same_distribution(
            alone, self.own[0, at - 1]
        ):
            far = max(
                compute_largest_distance(first, second),
                compute_largest_distance(alone, self.own[0, at - 1]),
            )
            raise AuditError(
                f"expected a causal LM, got {self.model.name!r} "
                f"({self.model.model.config.model_type}), whose distribution of a token changes by "
                f"{far:.2g} nats with what comes after it"
            )

    def drop_embeddings_unless_faithful(self) -> None:
        """Takes `embeddings` from a model that answers otherwise by them than by ids, or without a
        gradient in them."""
        if "embeddings" in self.model.capabilities and not _self_check_holds_without_error(
            self._embeddings_are_faithful
        ):
            self.model.capabilities = self.model.capabilities - {"embeddings"}
            self._note(
                "input embeddings do not give its distribution or its gradients, so that soft "
                "prompts are not applicable to it"
            )

    def _embeddings_are_faithful(self) -> bool:
        half = self.short // 2
        prompt = self.model.embedding(self.twins[:1, :half])[0]
        # A tuned prompt is no token's embedding: a model that looks for the token behind it (Gemma
        # 4) finds none.
        prompt = (prompt * (1 + torch.finfo(prompt.dtype).eps)).requires_grad_(True)
        with torch.enable_grad():
            found = self.model.log_probs(self.twins[:, half:], self.short - half, prompt=prompt)
            # One log-probability of each position: a number that depends on all of the prompt.
            # Reformer has none when it answers
            (slope,) = torch.autograd.grad(found[0].diagonal().sum(), prompt)
        # Some layers in few bits answer without a gradient, which torch takes for one of zero.
        learns = bool(torch.isfinite(slope).all()) and bool(slope.any())
        return self.is_same_distribution(found[0].detach(), self.own[0, half:]) and learns

    def limit_text_length(self, needed: bool) -> None:
        """Limits texts to a length beyond which a model reads all of a text otherwise, as stretched
        positions do.

        needed: the run has texts as long as the room, so that such a model is refused in place of
        limited.
        """
        for mark in self._new_marks():
            end = min(mark + 3, self.room)
            # One position, in a text that ends below the mark and in the same text beyond it.
            alone = self.model.log_probs(self.texts[:, : mark - 1], 1)[:, 0]
            within = self.model.log_probs(self.texts[:, :end], end - mark + 2)[:, 0]
            if self.is_same_distribution(within, alone):
                continue
            why = f"more than {mark} tokens change its distribution from the first token on"
            if needed:
                raise AuditError(
                    f"expected texts of at most {mark} tokens for {self.model.name!r}, got "
                    f"{self.room}: {why}"
                )
            self.model.max_positions = self.room = mark
            self.texts = self.texts[:, :mark]
            self._note(f"{why}: its texts end there")
            return

    def choose_row_serving(self) -> None:
        """Leaves the first way of serving rows, from the fastest on, whose distributions are those
        of whole texts."""
        # Rows on a cache of the model's own do not tell PEFT where an activated LoRA is on.
        ways = [way for way in get_args(Served) if way != "cache" or not self.model.activation]
        first = self.model.served
        for served in ways[ways.index(first) :]:
            if served != first:
                self.reached = 0  # the earlier check was of another way
            self.model.served = served
            exact = self._rows_are_exact  # of the last way, what is raised says why there is none
            found = exact() if served == "recompute" else _self_check_holds_without_error(exact)
            if found:
                break
        else:
            raise AuditError(
                f"no way of decoding {self.model.name!r} gives the distribution that it has for "
                "whole contexts"
            )
        if self.model.served == "recompute" != first:
            self._note(
                "its cache changes the distribution, so each decoded token reads the whole text "
                "again"
            )

    def enable_exact_prefix_sharing(self) -> None:
        """Lets the model read once what texts begin with, where their distributions are those of
        whole contexts."""
        if self.model.activation:
            return
        begins = sorted(
            {max(1, min(AT_LOAD, self.room) // 2), *(mark - 1 for mark in self._marks())}
        )
        if self.model.served == "slots" and all(map(self._shared_prefix_is_exact, begins)):
            self.model.enable_shared_prefix_cache()
        else:
            self.model.begins = None
            self._note(
                "what texts begin with is read anew for each of them: from no cache does it go on "
                "with them"
            )

    def enable_exact_row_joining(self) -> None:
        """Lets the model's rows behind prefixes of several lengths be advanced together, where that
        changes nothing.

        Where not, prefixes of each length are completed on their own: the same, later.
        """
        slots = self.model.served == "slots" and not self.model.activation
        self.model.can_join_rows = slots and _self_check_holds_without_error(
            self._joined_rows_are_exact
        )

    def _joined_rows_are_exact(self) -> bool:
        """Whether rows behind texts of two lengths, advanced and split together, have their
        contexts' distributions."""
        marks = [mark + len(STEPS) for mark in self._marks()]
        long = min(self.room, max([AT_LOAD, *marks])) - len(STEPS)
        if long < 2:
            return False
        contexts = [self.texts[i, :begin].tolist() for i, begin in enumerate((1, long))]
        first, other = (
            self.model.start_rows_as_served(torch.tensor([text]), len(STEPS), None)
            for text in contexts
        )
        rows = first.joined([other])
        for step, parents in enumerate(STEPS):
            tokens = self.texts.flatten()[
                step + torch.arange(len(parents), device=self.texts.device)
            ]
            rows.advance(torch.tensor(parents, device=tokens.device), tokens)
            contexts = [
                [*contexts[i], token] for i, token in zip(parents, tokens.tolist(), strict=True)
            ]
        # After the last step only: what went wrong before is in the keys that it reads.
        found = rows.log_probs()
        for alike in group_equal_shapes([(len(context), 0) for context in contexts]):
            anew = self.model.log_probs(torch.tensor([contexts[i] for i in alike]), 1)[:, 0]
            if not self.is_same_distribution(found[alike], anew):
                return False
        return True

    def _shared_prefix_is_exact(self, begin: int) -> bool:
        """Whether texts that share their first `begin` tokens have the logits of whole contexts;
        nothing remembered."""
        last = min(self.room - begin, AT_LOAD // 2)
        texts, model = self.texts[:, : begin + last].clone(), self.model
        texts[1, :begin] = texts[0, :begin]
        # of the distributions: what went wrong before is in the keys that these read
        kept = min(last, len(STEPS))
        # Leaves `begins` as it tried it: `enable_exact_prefix_sharing` then sets it for good, or to
        # None.
        model.begins = None
        whole = model.logits_after_cached_prefix(texts, last, kept)
        model.enable_shared_prefix_cache(least=1)
        return _self_check_holds_without_error(
            lambda: self.is_same_distribution(
                model.logits_after_cached_prefix(texts, last, kept).log_softmax(-1),
                whole.log_softmax(-1),
            )
        )

    def _rows_are_exact(self) -> bool:
        return all(self._rows_agree_behind(begin) for begin in self._prefix_lengths_to_test()) and (
            (self.reached > 0 or self._rows_agree_behind(2, soft=True))
            and self._rows_follow_invocations()
            and self._rows_agree_on_records(self.records)
        )

    def _prefix_lengths_to_test(self) -> Iterator[int]:
        """Lengths of prefixes from which rows pass every length that means something, and reach the
        last."""
        lengths = [2] if not self.reached else []
        lengths += [mark - 1 for mark in self._new_marks()]
        if max((len(prefix + suffix) for prefix, suffix in self.records), default=0) < self.room:
            # held-out texts, or records behind a soft prompt, are as long
            lengths.append(self.room - len(STEPS))
        yield from sorted({n for n in lengths if 1 <= n <= self.room - 1})

    def _marks(self) -> list[int]:
        """Return the lengths from which on the model may read texts otherwise."""
        return text_lengths_to_test(self.model.model.config, self.room)

    def _new_marks(self) -> list[int]:
        """Return the marks that no earlier check has passed."""
        return [mark for mark in self._marks() if mark >= self.reached]

    def _rows_agree_behind(self, begin: int, soft: bool = False) -> bool:
        """Whether rows behind `begin` tokens, advanced and split, have the distributions of their
        contexts."""
        prompt = None
        if soft:
            if "embeddings" not in self.model.capabilities or self.room < begin + 4:
                return True
            prompt = self.model.embedding(self.texts[0, :2])
        steps = STEPS[: self.room - begin - (2 if soft else 0)]
        rows = self.model.start_rows_as_served(self.texts[:, :begin], len(steps), prompt)
        found, contexts = collect_row_log_probs(rows, self.texts, begin, steps)
        return self.is_same_distribution(
            found, self.model.log_probs(contexts, len(steps) + 1, prompt=prompt)
        )

    def _rows_follow_invocations(self) -> bool:
        """Whether rows switch an activated LoRA on when PEFT does: in the prefix, at the first
        token after it, never.

        The random tokens hold no invocation, so that they would not tell.
        """
        invocation = self.model.activation.invocation
        begin = len(invocation) + 1
        if not invocation or begin + len(STEPS) > self.room:
            return True
        texts = self.texts[:1, : begin + len(STEPS)].repeat(3, 1)
        tokens = torch.tensor(invocation, device=texts.device)
        texts[0, :begin][1:] = tokens
        texts[1, 2 : begin + 1] = tokens
        rows = self.model.start_rows_as_served(texts[:, :begin], len(STEPS), None)
        contexts = texts[:, :begin]
        for parents in ([0, 1, 2], [1, 2, 0, 1]):
            at = torch.tensor(parents, device=texts.device)
            rows.advance(at, texts[at, contexts.shape[1]])
            texts = texts[at]
            contexts = texts[:, : contexts.shape[1] + 1]
            if not self.is_same_distribution(
                rows.log_probs(), self._whole_context_log_probs(contexts)
            ):
                return False
        return True

    def _rows_agree_on_records(self, records: Records) -> bool:
        """Whether rows and teacher forcing have, for records of the run, what one whole forward of
        a context has."""
        for prefix, suffix in records:
            text = torch.tensor([prefix + suffix], device=self.model.device)
            steps = min(_RECORD_STEPS, len(suffix))
            contexts = [text[:, : len(prefix) + step] for step in range(steps + 1)]
            if self.model.activation:  # what it makes of a text depends on where the text ends
                whole = torch.cat([self._whole_context_log_probs(context) for context in contexts])
            else:
                whole = self.model.logits_without_cache(contexts[-1], steps + 1)[0].log_softmax(-1)
            rows = self.model.start_rows_as_served(contexts[0], steps, None)
            distributions = [rows.log_probs()]
            for context in contexts[1:]:
                rows.advance(torch.zeros(1, dtype=torch.long, device=text.device), context[:, -1])
                distributions.append(rows.log_probs())
            if not self.is_same_distribution(torch.cat(distributions), whole):
                return False
            # Without one, teacher forcing is the call that `whole` was.
            if self.model.activation and not self.is_same_distribution(
                self.model.log_probs(contexts[-1], steps + 1)[0], whole
            ):
                return False
        return True

    def _whole_context_log_probs(self, contexts: Tensor) -> Tensor:
        """Return the distributions after contexts (B, n) as transformers has them without a cache,
        (B, V)."""
        logits = [
            self.model.logits_without_cache(context.unsqueeze(0), 1)[:, 0] for context in contexts
        ]
        return torch.cat(logits).log_softmax(-1)

    def _note(self, text: str) -> None:
        self.model.notes = (*self.model.notes, f"{self.model.name}: {text}")


def _self_check_holds_without_error(question: Callable[[], bool]) -> bool:
    """Whatever a model raises that cannot be asked so is a no; memory that ran out says nothing of
    the model."""
    try:
        return question()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
