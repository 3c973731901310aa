"""Define the parts of a plan by subject; each part of the program receives only its own part.

Each field is defined together with its description, see `plan.py`. This module needs no files,
models or terminals.
"""

from __future__ import annotations

import dataclasses
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Any, ClassVar, Literal

from auditor.core.errors import AuditError
from auditor.core.plan_fields import (
    ATTACKS,
    AUTO,
    COMPARED,
    NONE,
    OWN,
    PLACED,
    PROVIDED,
    RECORDS,
    SUBJECT,
    Options,
    plan_field,
)

SMALL = "small"  # the default lab
DECIDED = "decided"
# The attacker's knowledge of a conversation.
SYSTEM = "system"
USER = "user"
PARTIAL = "partial"
# roles whose turns may be attacked
TURNS = ("assistant", USER, SYSTEM, "tool")
ALL = "all"
_SENT = "the records would be sent there"
_WIDTH = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(?:±|\+/?-)\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*")


@dataclass(frozen=True, kw_only=True)
class TargetPlan:
    """The attacked model, and the models that belong to it. Without a model: the built-in lab.

    model: Causal LM or adapter: Hugging Face id, folder or PROVIDER:NAME. [default: the lab]
    lab (small|smollm2): Without --model: the small lab, or the one on a real model,
        SmolLM2-135M-Instruct.
    public (MODEL): Public model: base of a PMixED ensemble; text-only attacks tune on it.
    reference (MODEL|none): Compare scores with this model's. [default: --public, else an adapter's
        base]
    base_url (URL): Server of --model openai:NAME: http://HOST:PORT/v1; key in OPENAI_API_KEY.
    tokenizer: Tokenizer of --model openai:NAME. [default: NAME]
    max_tokens_total: Ask a model behind an API for at most N tokens. [default: no limit]
    forms (FORM,...): Deployed forms of the model to attack as well: merged, int8, int4, nf4, fp4,
        pruned:SHARE or gguf:TYPE; or another model: FOLDER, llama:FILE or served:URL. A second
        --model does the same.
    before (MODEL): The model before it was trained to forget --forget.
    retrained (MODEL): A model trained as --before was, without --forget, to compare with.
    lab_recipe: Changed fields of the lab's recipe, by name.
    mitigation: In the lab, attack a model trained by this method instead: the method's name, and
        its options.
    """

    panel: ClassVar[str] = "target"
    model: str | None = plan_field(None, SUBJECT, risk=_SENT, risky="://")
    lab: Literal["small", "smollm2"] = plan_field(SMALL, SUBJECT)
    public: str | None = plan_field(None, SUBJECT | OWN | COMPARED)
    reference: str | None = plan_field(None, SUBJECT | OWN | COMPARED | ATTACKS)
    base_url: str | None = plan_field(None, SUBJECT | OWN | PROVIDED, risk=_SENT)
    tokenizer: str | None = plan_field(None, SUBJECT | OWN | PROVIDED)
    max_tokens_total: int | None = plan_field(None, OWN | PROVIDED, minimum=1)
    forms: tuple[str, ...] = plan_field((), risk=_SENT, risky="://")
    before: str | None = plan_field(None, SUBJECT | OWN | PROVIDED, panel="privacy")
    retrained: str | None = plan_field(None, SUBJECT | OWN | PROVIDED, panel="privacy")
    lab_recipe: dict[str, Any] = plan_field(dict, SUBJECT, has_flag=False)
    mitigation: dict[str, Any] = plan_field(dict, SUBJECT, has_flag=False)

    @property
    def uses_builtin_lab(self) -> bool:
        return self.model is None

    @property
    def provider(self) -> str:
        """Provider of the model: the name before the colon, or "" if there is none."""
        return split_model_name(self.model or "")[0]


_PROVIDER = re.compile(r"([a-z][a-z0-9_-]+):(.*)", re.DOTALL)  # a Windows drive has one letter


def split_model_name(model: str) -> tuple[str, str]:
    """Split `llama:a/b.gguf` into `("llama", "a/b.gguf")`, and `gpt2` into `("", "gpt2")`."""
    match = _PROVIDER.fullmatch(model)
    return (match[1], match[2]) if match else ("", model)


def name_deployed_form(form: str) -> str:
    """Return the name under which reports show a deployed form, such as `pruned:0.5`.

    A file or folder is shown by the last part of its path, and a server by its host.
    """
    head, _, address = form.partition("://")
    if address:
        return f"{split_model_name(head)[0] or head}:{address.partition('/')[0]}"
    return form.replace("\\", "/").rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class LoadingOptions:
    """Options for loading models, and their device.

    revision, model_args and quantise apply only to the audited model, not to a reference, public or
    base model.

    device: cpu, cuda, cuda:1 or mps; auto: the best available.
    dtype (auto|float32|float16|bfloat16): Precision of the weights; auto: bfloat16 if they are
        saved so and the machine has it, else float32.
    trust_remote_code: Let model repositories run their own code.
    revision: Branch, tag or commit of --model on the Hugging Face hub.
    model_args (--model-arg K=V): Argument of from_pretrained, as attn_implementation=eager;
        repeatable.
    device_map (auto|balanced|sequential|JSON): Spread models over GPUs, memory and disk. [default:
        all on --device]
    quantise (8bit|4bit): Quantise --model with bitsandbytes. [default: as --dtype says]
    base (MODEL): Base model of an adapter. [default: the one it names]
    """

    panel: ClassVar[str] = "compute"
    device: str = plan_field("cpu", SUBJECT | OWN | PLACED)
    dtype: str = plan_field(AUTO, SUBJECT | OWN | PLACED)
    trust_remote_code: bool = plan_field(
        False,
        SUBJECT | OWN | PLACED,
        panel="advanced",
        risk="code in model folders would run",
    )
    revision: str | None = plan_field(None, SUBJECT | OWN | PROVIDED, panel="target")
    model_args: dict[str, str] = plan_field(dict, SUBJECT | OWN | PROVIDED, panel="advanced")
    device_map: str | None = plan_field(None, SUBJECT | OWN | PLACED)
    quantise: Literal["4bit", "8bit"] | None = plan_field(None, SUBJECT | OWN | PROVIDED)
    base: str | None = plan_field(None, SUBJECT | OWN | PROVIDED, panel="target")

    def list_pretrained_sources(self, model: str) -> dict[str, tuple[str, str | None]]:
        """Return the places from which transformers loads the model: (folder or hub id, revision).

        The key of the first place is "model". With --model-arg subfolder=NAME, a second place has
        the key "model subfolder".
        """
        sources = {"model": (model, self.revision)}
        if "subfolder" in self.model_args:
            sources["model subfolder"] = (f"{model}/{self.model_args['subfolder']}", self.revision)
        return sources

    def resolve_auto_dtype(self) -> LoadingOptions:
        """Return these options with float32 in place of `--dtype auto`, as training needs."""
        if self.dtype == AUTO:
            return dataclasses.replace(self, dtype="float32")
        return self

    def for_companion_model(self) -> LoadingOptions:
        """Return these options for a model that is not audited itself, such as a reference.

        Options that apply only to the audited model get their defaults.
        """
        return dataclasses.replace(self, revision=None, model_args={}, quantise=None, base=None)

    @property
    def from_pretrained_arguments(self) -> dict[str, Any]:
        """Keyword arguments for every call of `from_pretrained`."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def check(self) -> None:
        """Raise AuditError for a credential in --model-arg.

        Also raise AuditError if both --device and --device-map are set.
        """
        for name in self.model_args:
            plain = name.lower().replace("-", "_")
            # The error does not quote the value.
            if _CREDENTIAL.search(plain) and not _OF_TEXT.match(plain):
                raise AuditError(
                    "expected no credential in --model-arg, where records and reports would show "
                    f"it, got {name}=...: a token for the hub comes from HF_TOKEN or `hf auth "
                    "login`"
                )
        if self.device_map is not None and self.device != "cpu":
            raise AuditError(
                "expected either --device or --device-map, which says where each part of a model "
                f"goes, got --device {self.device} and --device-map {self.device_map}"
            )


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The attacked data, the attacker's knowledge of it, and how it is cut and rendered.

    data: Training records: JSONL, CSV, Parquet, .npy or a Hugging Face data set.
    nonmembers (DATA): Records like --data, but not trained on: the non-member baseline.
    limit: Attack at most N members and N non-members.
    prefix_length: Tokens that the attacker is shown. [default: half of a text, at most 50; of
        arrays, all]
    suffix_length: Tokens to extract. [default: the rest of a text, at most 50; of arrays, all]
    known (DATA): Auxiliary data: records that the attacker already has.
    known_fraction: Without --known: share of --data that the attacker already has.
    known_limit: Use at most N records of the auxiliary data. [default: all]
    group_column (COLUMN): Column of --data to show results by; its values are in the report.
    user_column (COLUMN): Column of --data and --nonmembers with each record's person: leakage by
        person, without names.
    knows (system|user|partial:F): What the attacker knows of a conversation. system: its system
        turn; user: all before the answer; partial:F: also a share F of the answer. [default: user]
    turns (assistant|user|system|tool|all): Whose turns of a conversation are secrets; all: each
        role's, and results by role. [default: assistant]
    template (auto|none|model|alpaca|trl|FILE): How conversations become text: by the model's chat
        template, a template FILE, Alpaca's or TRL's format, or none.
    date (YYYY-MM-DD): Day that the chat template writes: the day of the training.
    prefix_token (auto|none|bos|eos|TEXT): Token before every text; auto: as training.json says,
        else the tokenizer's, unless the auxiliary data are more likely with another.
    windows (STRIDE): Attack a suffix every STRIDE tokens of a text. [default: at most 20 suffixes
        along the text; only one if a length is given]
    trained_length (auto|none|N): Tokens of a row that were trained on; auto: the max_length in
        training_args.bin next to the model.
    canaries (MANIFEST): Canaries that were inserted into the training data: see `audit canaries`.
    phone_region (DE,US): Countries of telephone numbers that are written without a country code.
    forget (DATA): Records of --data that --model was trained to forget.
    """

    panel: ClassVar[str] = "data"
    data: str | None = plan_field(None, SUBJECT)
    nonmembers: str | None = plan_field(None, SUBJECT | OWN | RECORDS | ATTACKS)
    limit: int | None = plan_field(None, SUBJECT | RECORDS, minimum=1)
    prefix_length: int | None = plan_field(None, SUBJECT | RECORDS, minimum=1)
    suffix_length: int | None = plan_field(None, SUBJECT | RECORDS, minimum=1)
    known: str | None = plan_field(None, SUBJECT | OWN | RECORDS | ATTACKS)
    known_fraction: float = plan_field(0.2, SUBJECT | OWN)
    known_limit: int | None = plan_field(None, COMPARED | ATTACKS | RECORDS, minimum=1)
    group_column: str | None = plan_field(None, SUBJECT | OWN)
    user_column: str | None = plan_field(None, SUBJECT | OWN)
    knows: str | None = plan_field(None, SUBJECT | OWN | RECORDS)
    turns: Literal["assistant", "user", "system", "tool", "all"] | None = plan_field(
        None, SUBJECT | OWN | RECORDS
    )
    template: str = plan_field(AUTO, SUBJECT | OWN | RECORDS)
    date: str | None = plan_field(None, SUBJECT | OWN | RECORDS)
    prefix_token: str = plan_field(AUTO, COMPARED)
    windows: int | None = plan_field(None, SUBJECT | OWN | RECORDS, minimum=1)
    trained_length: str = plan_field(AUTO, SUBJECT | OWN | RECORDS)
    canaries: str | None = plan_field(None, SUBJECT | OWN, panel="privacy")
    phone_region: str | None = plan_field(None, OWN | RECORDS | ATTACKS, panel="privacy")
    forget: str | None = plan_field(None, SUBJECT | OWN | RECORDS, panel="privacy")

    def check(self) -> None:
        """Raise AuditError for an invalid length, --knows, --prefix-token, --template or --date."""
        if self.knows is not None:
            get_known_share(self.knows)
        if self.knows == SYSTEM and self.turns not in (None, "assistant"):
            raise AuditError(
                f"expected --knows {USER} or partial:F with --turns {self.turns}, got {self.knows}"
            )
        if not self.prefix_token:
            raise AuditError(
                "expected --prefix-token as auto, none, bos, eos or a text, got an empty one"
            )
        if not self.template:
            raise AuditError("expected --template as auto, none, model or a file, got an empty one")
        if self.date is not None:
            check_date_format(self.date)
        if self.trained_length not in (AUTO, NONE) and not re.fullmatch(
            "[1-9][0-9]{0,8}", self.trained_length
        ):
            raise AuditError(
                "expected --trained-length as auto, none or a number of tokens, got "
                f"{self.trained_length!r}"
            )


@dataclass(frozen=True, kw_only=True)
class AttackPlan:
    """The attacks and probes, and their access to the model.

    attack (--attack, -a): Attack or probe, see `audit list`; repeatable. [default: ethicist]
    attack_options (-A [ATTACK.]OPTION=VALUE): Option of an attack, as ethicist.samples=20;
        repeatable.
    setting (text-only|white-box|both): Access: sampled text only, as privacy claims about text
        assume, or everything (white box).
    samples: Samples per prefix, in every attack. [default: each attack has its own]
    until (decided|'METRIC ± N%'): Ask secrets in random order. Stop a configuration once --gate's
        rules are decided, or once the metric is known to ± N%.
    sizes: Defaults of the options of attacks and defenses: the papers' own, or those of the lab.
    """

    panel: ClassVar[str] = "attacks"
    attack: tuple[str, ...] = plan_field(("ethicist",))
    attack_options: Options = plan_field(dict, ATTACKS)
    setting: Literal["text-only", "white-box", "both"] = plan_field("both")
    samples: int | None = plan_field(None, ATTACKS, minimum=1)
    until: str | None = plan_field(None)
    sizes: Literal["paper", "lab"] = plan_field("paper", has_flag=False)

    def check(self) -> None:
        """Raise AuditError if no attack is named or --until is invalid."""
        if not self.attack:
            raise AuditError("expected at least one --attack, got none; `audit list` shows them")
        if self.until not in (None, DECIDED):
            # The property raises for an invalid value.
            assert self.until_metric_and_half_width is not None

    @property
    def until_metric_and_half_width(self) -> tuple[str, float] | None:
        """Metric and half-width in `--until`: ("recall", 0.02) for "recall ± 2%".

        None if --until is not set or is `decided`. Raise AuditError for any other text.
        """
        if self.until in (None, DECIDED):
            return None
        match = _WIDTH.fullmatch(self.until or "")
        width = float(match[2]) / 100 if match else math.nan
        if match is None or not 0 < width < 1:
            raise AuditError(
                f"expected --until decided or an interval such as 'recall ± 2%', got {self.until!r}"
            )
        return match[1], width


@dataclass(frozen=True, kw_only=True)
class DefensePlan:
    """The defenses, and the models that they are compared with.

    defense (--defense, -d): Defense to audit next to the undefended model, see `audit list`;
        repeatable.
    defense_options (-D [DEFENSE.]OPTION=VALUE): Option of a defense, as pmixed.epsilon=4;
        repeatable.
    controls (--controls/--no-controls): Audit each defense's controls too: only they show what
        causes an effect.
    ensemble_limit: Attack at most N members of a target with an ensemble. [default: all; in the lab
        60]
    relearn (STEPS): Train a copy on auxiliary data for STEPS: do forgotten records return?
    relearn_rate: Learning rate of --relearn. [default: 5e-5; in the lab 1e-4]
    """

    panel: ClassVar[str] = "defenses"
    defense: tuple[str, ...] = plan_field(())
    defense_options: Options = plan_field(dict)
    controls: bool = plan_field(True)
    ensemble_limit: int | None = plan_field(None, COMPARED, minimum=1)
    relearn: int | None = plan_field(None, PROVIDED, panel="privacy", minimum=1)
    relearn_rate: float | None = plan_field(None, PROVIDED, panel="privacy")

    def check(self) -> None:
        """Raise AuditError if --relearn-rate is given without --relearn or is out of range."""
        if self.relearn_rate is not None and self.relearn is None:
            raise AuditError("--relearn-rate needs --relearn STEPS, got none")
        if self.relearn_rate is not None and not 0 < self.relearn_rate <= 1:
            raise AuditError(
                f"expected --relearn-rate above 0 and at most 1, got {self.relearn_rate:g}"
            )


@dataclass(frozen=True)
class EngineOptions:
    """The engine: this process, or workers of a Ray cluster, each with GPUs or a share of a GPU.

    engine (local|ray): Work in this process, or on workers of Ray.
    workers: Workers of --engine ray. [default: one per processor here]
    ray_address (HOST:PORT|auto): Ray cluster to use. [default: one started on this machine]
    gpus_per_worker: GPUs of each worker; a fraction shares one. [default: 0]
    """

    panel: ClassVar[str] = "compute"
    engine: Literal["local", "ray"] = plan_field("local")
    workers: int | None = plan_field(None)
    ray_address: str | None = plan_field(None, risk="the records would be read and attacked there")
    gpus_per_worker: float = plan_field(0.0)

    def check(self, device: str) -> None:
        """Raise AuditError if options conflict with each other or with this device."""
        if self.workers is not None and self.workers < 1:
            raise AuditError(f"expected --workers >= 1, got {self.workers}")
        if not 0 <= self.gpus_per_worker < math.inf:
            raise AuditError(f"expected --gpus-per-worker >= 0, got {self.gpus_per_worker}")
        if self.engine == "local":
            for name in ("workers", "ray_address", "gpus_per_worker"):
                if getattr(self, name):
                    raise AuditError(
                        f"--{name.replace('_', '-')} goes with --engine ray, got --engine local"
                    )
        elif device.startswith("cuda") and not self.gpus_per_worker:
            raise AuditError(
                f"expected --gpus-per-worker with --device {device}, because no worker sees a GPU "
                "otherwise; got none"
            )
        elif device == "cpu" and self.gpus_per_worker:
            raise AuditError(
                f"--gpus-per-worker {self.gpus_per_worker:g} goes with --device cuda, got --device "
                "cpu"
            )


LOCAL = EngineOptions()


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """Files to write besides the run folder, and the run's command. No number depends on them.

    submission (FILE): Write an LM-Extraction submission: the first guess for each record, most
        confident first. It needs a run with one attack on the undefended model, and takes the
        white-box guesses if there are any. The file has private text, as token ids.
    """

    panel: ClassVar[str] = "output"
    submission: str | None = plan_field(
        None, ATTACKS, risk="token ids of private text would be written there"
    )
    command: str = plan_field("audit run", has_flag=False)


# Names of credentials, and of special tokens, whose names end alike.
_CREDENTIAL = re.compile(
    r"(^|_)(token|api_?key|access_?key|password|passwd|secret|authorization|credentials?)$"
)
_OF_TEXT = re.compile(r"^(additional_special|bos|cls|eos|mask|pad|sep|unk)_token$")


def get_known_share(knows: str) -> float:
    """Return the known share of an answer: 0 for `system` and `user`, F for `partial:F`.

    Raise AuditError for any other value.
    """
    kind, _, share = knows.partition(":")
    if knows in (SYSTEM, USER):
        return 0.0
    known_share = math.nan  # in no range: an invalid number
    if kind == PARTIAL:
        with suppress(ValueError):
            known_share = float(share)
    if not 0 < known_share < 1:
        raise AuditError(
            f"expected --knows {SYSTEM}, {USER} or {PARTIAL}:F with 0 < F < 1, got {knows!r}"
        )
    return known_share


def check_date_format(text: str) -> None:
    """Raise AuditError if the text is not a valid date for --date."""
    try:
        # fromisoformat also accepts "20260131" and week dates.
        known = len(text) == len("YYYY-MM-DD") and date.fromisoformat(text)
    except ValueError:
        known = False
    if not known:
        raise AuditError(f"expected --date as YYYY-MM-DD, got {text!r}")
