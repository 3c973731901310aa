"""Check that all ways of querying a loaded model give the same distribution.

The reference is transformers' own output for token ids, on random tokens and a few records. It must
equal the outputs for input embeddings, for rows that advanced and split, and for longer texts.
Logits must be finite. A wrong way of querying is disabled, with a note, if there is a right way;
otherwise AuditError is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, get_args
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from auditor.core.errors import AuditError, is_memory_error, wrap_library_errors
from auditor.core.jsonable import read_json_object, write_json
from auditor.models.adapters import is_adapter_mergeable
from auditor.models.base import check_logits_finite
from auditor.models.consistency import SEED, STEPS, collect_row_log_probs, compute_largest_distance
from auditor.models.huggingface import HuggingFaceModel, Served
from auditor.models.self_check_facts import (
    Records,
    choose_compared_records,
    compute_rounding_tolerance,
    is_adapter_on,
    list_tested_lengths,
    non_special_token_ids,
    self_check_digest,
)

AT_LOAD = 16  # tokens of the longest test text before a run reports the length of its texts
_LEAST = 5  # the same if it is the run that limits the length: two tokens and those of `STEPS`
_SHORT = 12  # tokens of most test texts
_RECORD_STEPS = 2  # suffix tokens read one at a time

# By model: the longest text checked, and the largest distance by rounding between two of its
# distributions.
_checked: WeakKeyDictionary[HuggingFaceModel, tuple[int, float | None]] = WeakKeyDictionary()
_compared_on_records: WeakSet[HuggingFaceModel] = WeakSet()
_kept_in: ContextVar[Path | None] = ContextVar("folder of what self-checks found", default=None)


@contextmanager
def keep_self_checks(folder: Path) -> Iterator[None]:
    """Store in `folder` the results of all self-checks made during the block.

    The models' weights must not change.
    """
    token = _kept_in.set(folder)
    try:
        yield
    finally:
        _kept_in.reset(token)


def check_loaded_model(model: HuggingFaceModel) -> None:
    """Check a newly loaded model, on the shortest texts that show a fault."""
    model.choices_kept_in = _kept_in.get()
    configure_serving(model, cache=model.choices_kept_in)


def configure_serving(
    model: HuggingFaceModel,
    longest: int | None = None,
    records: Records = (),
    cache: Path | None = None,
) -> tuple[str, ...]:
    """Check the model, and choose how it computes decoding rows.

    Args:
        model: the model.
        longest: number of tokens in the run's longest text, soft prompt included; None if unknown.
            The tested texts have up to this length.
        records: (prefix, suffix) records of the run. On a few of them, the results are compared
            with those of transformers.
        cache: folder that stores results by the digest of the weights, so that a successful check
            is not repeated.

    Returns:
        The notes that this check added to the model.

    Raises:
        AuditError: if no way of querying the model is right, or if the model's distributions on
            texts of this length depend on later tokens.
    """
    n_tokens = longest
    if n_tokens is None:
        n_tokens = AT_LOAD if cache is None else _LEAST
    room = min(n_tokens, model.max_positions or n_tokens)
    reached, tolerance = _checked.get(model, (0, None))
    if model in _compared_on_records:
        records = ()
    records = choose_compared_records(model, records, room)
    if room <= max(reached, 1) and not records:
        return ()
    # Findings on shorter texts are tested again.
    before = model.notes
    model.begins = None
    model.can_join_rows = model.can_share_slots = False
    adapter = next((m for m in _checked if _is_checked_base(model, m, longest, room)), None)
    if adapter is not None:
        _check_adapter_base(model, adapter, room)
        return ()
    stored_file = None
    if cache is not None and not model.activation:
        stored_file = cache / f"{self_check_digest(model, room, records)}.json"
    if stored_file is not None and stored_file.is_file():
        apply_findings(model, read_json_object(stored_file, "what a self-check found"))
    else:
        with torch.no_grad(), wrap_library_errors(f"cannot ask {model.name!r} for a distribution"):
            trial = _SelfCheckTrial(model, max(room, 2), records, reached, tolerance)
            trial.configure_model(longest is not None, may_merge=stored_file is not None)
        tolerance = trial.tolerance
    _checked[model] = max(room, reached), tolerance
    if records:
        _compared_on_records.add(model)
    notes = model.notes[len(before) :]
    if stored_file is not None and not stored_file.is_file():
        write_json(stored_file, describe_findings(model, notes))
    return notes


def describe_findings(model: HuggingFaceModel, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the self-check found about a model, and chose for it."""
    return {
        "row_serving": model.served,
        "begins": model.begins is not None,
        "can_join_rows": model.can_join_rows,
        "can_share_slots": model.can_share_slots,
        "is_merged": model.is_merged,
        "embeddings": "embeddings" in model.capabilities,
        "max_positions": model.max_positions,
        "notes": list(notes),
    }


def _is_checked_base(
    model: HuggingFaceModel, other: HuggingFaceModel, longest: int | None, room: int
) -> bool:
    """Return whether the base model needs no check, because an adapter on it passed its check.

    Both share the code and the configuration that compute rows. Return False if `other` is not an
    adapter on `model`, or if its check had different settings.

    Args:
        model: the base model.
        other: a model that passed its check.
        longest: number of tokens in the run's longest text; None if unknown.
        room: number of tokens in the longest text that must have been tested.
    """
    is_as_fast = (
        other.served == model.served == "slots"
        and "embeddings" in other.capabilities & model.capabilities
    )
    is_shared = longest is None or (other.begins is not None and other.can_join_rows)
    return is_as_fast and is_shared and _checked[other][0] >= room and is_adapter_on(other, model)


def _check_adapter_base(model: HuggingFaceModel, adapter: HuggingFaceModel, room: int) -> None:
    """Configure a base model like the checked adapter on it.

    Of the base, only its causality is tested, because its weights may be broken: distributions must
    depend on earlier tokens and not on later ones. `room` is the number of tokens in the longest
    tested text.
    """
    reached, tolerance = _checked.get(model, (0, None))
    if not reached:
        with torch.no_grad(), wrap_library_errors(f"cannot ask {model.name!r} for a distribution"):
            trial = _SelfCheckTrial(model, max(room, 2))
            trial.check_causality()
        tolerance = trial.tolerance
    if adapter.begins is not None:
        model.enable_shared_prefix_cache()
    model.can_join_rows = adapter.can_join_rows
    model.can_share_slots = adapter.can_share_slots
    _checked[model] = max(room, reached), tolerance
    if adapter in _compared_on_records:
        _compared_on_records.add(model)


def apply_findings(model: HuggingFaceModel, record: Mapping[str, Any]) -> None:
    """Serve a model as an earlier check of the same weights, described by `record`, has chosen."""
    model.served, model.can_join_rows = record["row_serving"], record["can_join_rows"]
    model.can_share_slots = record["can_share_slots"]
    model.max_positions = record["max_positions"]
    if record["is_merged"] and not model.is_merged:
        _merge_adapter(model)
    if not record["embeddings"]:
        model.capabilities -= {"embeddings"}
    if record["begins"]:
        model.enable_shared_prefix_cache()
    model.notes = (*model.notes, *record["notes"])


def _merge_adapter(model: HuggingFaceModel) -> None:
    model.model.merge_adapter()
    model.is_merged = True


class _SelfCheckTrial:
    """A self-check of one model on random tokens and a few records of the run.

    Attributes:
        room: number of tokens in the longest tested text.
        reached: length up to which an earlier check has tested; 0 if there was none. Those tests
            are not repeated.
        tolerance: largest distance between equal distributions; an earlier check's value is used
            again.
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
        self.records = records
        self.reached = reached
        noise = torch.Generator().manual_seed(SEED)
        ordinary = non_special_token_ids(model)
        texts = ordinary[torch.randint(len(ordinary), (2, room), generator=noise)].to(model.device)
        self.texts = texts
        if tolerance is not None:
            self.tolerance = tolerance
            return
        # Two texts that differ in their last token, with transformers' distributions.
        self.twins = torch.cat([texts[:1, : self.short]] * 2)
        self.twins[1, -1] = ordinary[ordinary != texts[0, self.short - 1].cpu()][0]
        logits = model.model(input_ids=self.twins).logits[:, -self.short :].float()
        check_logits_finite(logits, model.name)
        self.own = logits.log_softmax(-1)
        self.tolerance = compute_rounding_tolerance(model.model, logits)

    def is_same_distribution(self, log_probs: Tensor, truth: Tensor) -> bool:
        """Return whether two batches of log-distributions (..., V) are equal up to rounding.

        `truth` is the correct one; the order does not matter.
        """
        return compute_largest_distance(log_probs, truth) <= self.tolerance

    def configure_model(self, is_length_known: bool, may_merge: bool) -> None:
        """Check the model, and choose how it computes decoding rows.

        `is_length_known` says whether the length of the run's longest text is known. `may_merge`
        says whether an adapter may be merged into its base.
        """
        if not self.reached:
            self.check_causality()
            if may_merge:
                self.merge_adapter_if_exact()
            self.drop_embeddings_unless_faithful()
        # In this order: the room may shrink, rows depend on the room, and sharing depends on the
        # rows.
        self.limit_text_length(needed=is_length_known)
        self.choose_row_serving()
        if is_length_known:
            self.enable_exact_prefix_sharing()
            self.enable_exact_row_joining()

    def check_causality(self) -> None:
        """Raise AuditError unless distributions depend on earlier tokens and not on later ones."""
        first, second = self.own[:, :-1]  # before the only token in which the twins differ
        if bool((self.own == self.own[:, :1]).all()):
            raise AuditError(
                f"expected a distribution that depends on the text, but {self.model.name} gives "
                "the same one after every token: the weights are zero or broken"
            )
        index = self.short - 2
        shorter = self.model.log_probs(self.twins[:1, :index], 1)[0, 0]
        distance = max(
            compute_largest_distance(first, second),
            compute_largest_distance(shorter, self.own[0, index - 1]),
        )
        if distance > self.tolerance:
            raise AuditError(
                f"expected a causal LM, got {self.model.name!r} "
                f"({self.model.model.config.model_type}), whose distribution of a token changes by "
                f"{distance:.2g} nats with the tokens after it"
            )

    def merge_adapter_if_exact(self) -> None:
        """Merge an adapter from files into its base for speed, unless the distribution changes."""
        model = self.model
        if model.load_again is None or not is_adapter_mergeable(model.model):
            return

        def is_exact_after_merging() -> bool:
            _merge_adapter(model)
            return self.is_same_distribution(model.log_probs(self.twins, self.short), self.own)

        if not _self_check_holds_without_error(is_exact_after_merging):
            model.model.unmerge_adapter()
            model.is_merged = False
            # PEFT undoes a merge by a subtraction, and not at all in a layer where it failed.
            weights = dict(model.load_again().named_parameters())
            for name, parameter in model.model.named_parameters():
                parameter.data = weights[name].data

    def drop_embeddings_unless_faithful(self) -> None:
        """Remove the `embeddings` capability if it does not work.

        It works if embeddings as input give the same logits as token ids, and have a gradient.
        """
        if "embeddings" in self.model.capabilities and not _self_check_holds_without_error(
            self._embeddings_are_faithful
        ):
            self.model.capabilities -= {"embeddings"}
            self._note(
                "input embeddings do not give its distribution or its gradients, so soft prompts "
                "cannot be used with it"
            )

    def _embeddings_are_faithful(self) -> bool:
        half = self.short // 2
        prompt = self.model.embedding(self.twins[:1, :half])[0]
        # A tuned prompt is not a token's embedding: a model that looks up its token (Gemma 4) finds
        # none.
        prompt = (prompt * (1 + torch.finfo(prompt.dtype).eps)).requires_grad_(True)
        with torch.enable_grad():
            log_probs = self.model.log_probs(self.twins[:, half:], self.short - half, prompt=prompt)
            # One log-probability of each position: a sum that depends on all of the prompt.
            # Reformer has no gradient when it answers.
            (slope,) = torch.autograd.grad(log_probs[0].diagonal().sum(), prompt)
        # Some quantised layers answer without a gradient, which torch treats as zero.
        learns = bool(torch.isfinite(slope).all()) and bool(slope.any())
        return self.is_same_distribution(log_probs[0].detach(), self.own[0, half:]) and learns

    def limit_text_length(self, needed: bool) -> None:
        """Limit texts to the length up to which the model reads all texts in the same way.

        For example, some models stretch the positions of longer texts. Nothing is limited if the
        model reads texts of all tested lengths in the same way.

        `needed` says whether the run has texts of the tested length. If so, AuditError is raised
        instead of a limit.
        """
        for critical in self._list_untested_lengths():
            end = min(critical + 3, self.room)
            # One position, in a text that ends below the critical length, and in a longer one.
            shorter = self.model.log_probs(self.texts[:, : critical - 1], 1)[:, 0]
            within = self.model.log_probs(self.texts[:, :end], end - critical + 2)[:, 0]
            if self.is_same_distribution(within, shorter):
                continue
            reason = f"more than {critical} tokens change its distribution from the first token on"
            if needed:
                raise AuditError(
                    f"expected texts of at most {critical} tokens for {self.model.name!r}, got "
                    f"{self.room}: {reason}"
                )
            self.model.max_positions = self.room = critical
            self.texts = self.texts[:, :critical]
            self._note(f"{reason}: its texts end there")
            return

    def choose_row_serving(self) -> None:
        """Choose the fastest cache with which decoding rows agree with whole texts.

        Raise AuditError if no cache does.
        """
        # Rows on a native cache do not tell PEFT the position of an activated LoRA.
        first = self.model.served
        ways = get_args(Served)
        for served in ways[ways.index(first) :]:
            if served == "cache" and self.model.activation:
                continue
            if served != first:
                self.reached = 0  # the earlier check tested another way
            self.model.served = served
            exact = self._rows_are_exact
            if served == "recompute":  # its error explains why no way is right
                is_exact = exact()
            else:
                is_exact = _self_check_holds_without_error(exact)
            if is_exact:
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
        """Enable the cache of shared prefixes if it changes no distribution."""
        if self.model.activation:
            return
        begins = sorted(
            {
                max(1, min(AT_LOAD, self.room) // 2),
                *(critical - 1 for critical in self._list_critical_lengths()),
            }
        )
        if self.model.served == "slots" and all(map(self._shared_prefix_is_exact, begins)):
            self.model.enable_shared_prefix_cache()
        else:
            self.model.begins = None
            self._note(
                "the common beginning of texts is read again for each of them: the model cannot "
                "continue from a cache"
            )

    def enable_exact_row_joining(self) -> None:
        """Allow prefixes of different lengths in one generation batch, if no distribution changes.

        Otherwise, prefixes of each length have their own batches, which only takes longer. The rows
        after a prefix may share a slot if the same test passes then, too.
        """
        slots = self.model.served == "slots" and not self.model.activation
        self.model.can_join_rows = slots and _self_check_holds_without_error(
            self._joined_rows_are_exact
        )
        # Only on a CPU is it known to be faster. MPT takes a token's place in the slot for its
        # position, which in bfloat16 looks like rounding in a short text.
        self.model.can_share_slots = self.model.can_join_rows and self.model.takes_positions
        self.model.can_share_slots &= self.model.device.type == "cpu"
        self.model.can_share_slots &= _self_check_holds_without_error(self._joined_rows_are_exact)

    def _joined_rows_are_exact(self) -> bool:
        """Return whether joined rows of two prefix lengths give exact distributions."""
        critical_ends = [critical + len(STEPS) for critical in self._list_critical_lengths()]
        long = min(self.room, max([AT_LOAD, *critical_ends])) - len(STEPS)
        if long < 2:
            return False
        first, other = (
            self.model.start_served_rows(prefix.unsqueeze(0), len(STEPS), None)
            for prefix in (self.texts[0, :1], self.texts[1, :long])
        )
        log_probs, contexts = collect_row_log_probs(first.joined([other]), self.texts, 1, STEPS)
        # After the last step, the first row continues the short prefix, the second the long one.
        long_text = torch.cat([self.texts[1, :long], contexts[1, 1:]])
        expected = []
        for text in (contexts[0], long_text):
            expected.append(self.model.log_probs(text.unsqueeze(0), len(STEPS) + 1))
        return self.is_same_distribution(log_probs, torch.cat(expected))

    def _shared_prefix_is_exact(self, begin: int) -> bool:
        """Return whether logits stay exact if the first `begin` tokens of texts are cached."""
        last = min(self.room - begin, AT_LOAD // 2)
        texts, model = self.texts[:, : begin + last].clone(), self.model
        texts[1, :begin] = texts[0, :begin]
        # Of the distributions: these read the keys of all positions, so they show earlier errors.
        count = min(last, len(STEPS))
        # `begins` stays set: `enable_exact_prefix_sharing` then sets it for good, or to None.
        model.begins = None
        true_logits = model.logits_after_cached_prefix(texts, last, count)
        model.enable_shared_prefix_cache(least=1)
        return _self_check_holds_without_error(
            lambda: self.is_same_distribution(
                model.logits_after_cached_prefix(texts, last, count).log_softmax(-1),
                true_logits.log_softmax(-1),
            )
        )

    def _rows_are_exact(self) -> bool:
        return all(self._rows_agree_after(begin) for begin in self._prefix_lengths_to_test()) and (
            (self.reached > 0 or self._rows_agree_after(2, soft=True))
            and self._records_are_exact(
                (*self._list_padding_records(), *self._list_invocation_records(), *self.records)
            )
        )

    def _prefix_lengths_to_test(self) -> Iterator[int]:
        """Yield prefix lengths just below each critical length and below the maximum length.

        Rows that start there grow past the critical length, or reach the maximum.
        """
        lengths = [2] if not self.reached else []
        lengths += [critical - 1 for critical in self._list_untested_lengths()]
        if max((len(prefix + suffix) for prefix, suffix in self.records), default=0) < self.room:
            # Held-out texts, or records after a soft prompt, are as long.
            lengths.append(self.room - len(STEPS))
        yield from sorted({n for n in lengths if 1 <= n <= self.room - 1})

    def _list_critical_lengths(self) -> list[int]:
        """Return the critical lengths, at which the model may start to read texts differently."""
        return list_tested_lengths(self.model.model.config, self.room)

    def _list_untested_lengths(self) -> list[int]:
        """Return the critical lengths that no earlier check has covered."""
        return [critical for critical in self._list_critical_lengths() if critical >= self.reached]

    def _rows_agree_after(self, begin: int, soft: bool = False) -> bool:
        """Return whether rows after a prefix of `begin` tokens agree with whole texts.

        `soft` says whether a soft prompt precedes the prefix.
        """
        prompt = None
        if soft:
            if "embeddings" not in self.model.capabilities or self.room < begin + 4:
                return True
            prompt = self.model.embedding(self.texts[0, :2])
        steps = STEPS[: self.room - begin - (2 if soft else 0)]
        rows = self.model.start_served_rows(self.texts[:, :begin], len(steps), prompt)
        row_log_probs, contexts = collect_row_log_probs(rows, self.texts, begin, steps)
        return self.is_same_distribution(
            row_log_probs, self.model.log_probs(contexts, len(steps) + 1, prompt=prompt)
        )

    def _list_padding_records(self) -> Records:
        """Return a text that contains the padding token, which a model may draw.

        RoBERTa gives this token no position, except in a cache.
        """
        padding = self.model.special_token_id("pad")
        if padding is None or self.reached or self.room < _LEAST:
            return ()
        if not 0 <= padding < self.model.vocab_size:
            return ()
        first, *suffix = self.texts[0, : _LEAST - 1].tolist()
        return (((first, padding), tuple(suffix)),)

    def _list_invocation_records(self) -> Records:
        """Return texts with an invocation, which is the tokens that switch an activated LoRA on.

        The invocation ends with the prefix, or with the first token of the suffix.
        """
        invocation = self.model.activation.invocation
        if not invocation or len(invocation) + 3 > self.room:
            return ()
        first, second, *suffix = self.texts[0].tolist()
        return (
            ((first, *invocation), (second, *suffix)),
            ((first, second, *invocation[:-1]), (*invocation[-1:], *suffix)),
        )

    def _records_are_exact(self, records: Records) -> bool:
        """Return whether rows and teacher forcing equal one plain forward pass on these records."""
        for prefix, suffix in records:
            text = torch.tensor([prefix + suffix], device=self.model.device)
            steps = [[0]] * min(_RECORD_STEPS, len(suffix))
            rows = self.model.start_served_rows(text[:, : len(prefix)], len(steps), None)
            row_log_probs, context = collect_row_log_probs(rows, text, len(prefix), steps)
            last = len(steps) + 1
            if not self.model.activation:
                log_probs = self.model.transformers_logits(context, last, None).log_softmax(-1)
            else:  # its effect on a text depends on the end of the text
                ends = range(len(prefix), len(prefix) + last)
                logits = [self.model.transformers_logits(context[:, :end], 1, None) for end in ends]
                log_probs = torch.cat(logits, dim=1).log_softmax(-1)
                if not self.is_same_distribution(self.model.log_probs(context, last), log_probs):
                    return False
            if not self.is_same_distribution(row_log_probs, log_probs):
                return False
        return True

    def _note(self, text: str) -> None:
        self.model.notes = (*self.model.notes, f"{self.model.name}: {text}")


def _self_check_holds_without_error(question: Callable[[], bool]) -> bool:
    """Return the result of `question()`, or False if it raises any error except out of memory."""
    try:
        return question()
    except Exception as error:
        if is_memory_error(error):
            raise
        return False
