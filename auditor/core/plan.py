"""What a run is asked to do, and what each field of that is about. Knows no files, models or terminals.

Whoever treats some fields of a plan differently asks `about` for them and keeps no list of names.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from auditor.core.errors import AuditError
from auditor.core.knowledge import share_known

API = "openai:"  # before the name of a model that is asked over HTTP
NONE = "none"  # nothing, where the default is something
AUTO = "auto"  # as the program finds best; of a count: not what the plan file says, but the default
Options = dict[str, dict[str, Any]]  # plug-in name ("" for all) -> option -> value


class About(enum.Flag):
    """What a field of a plan is about: one of the first three, and whatever else is true of it."""

    SUBJECT = enum.auto()  # which model is attacked for which secrets: plans that agree in these share models and data
    METHOD = enum.auto()  # how it is attacked and defended
    CONDUCT = enum.auto()  # how the program goes about it: no number depends on it
    ATTACKER = enum.auto()  # what attacks score with, tune on, look at and put in front: compared runs agree in it
    ATTACKS = enum.auto()  # attacks and nothing else: who runs none has no use of it
    OWN = enum.auto()  # a model and data of the user's own: the lab has its own
    RECORDS = enum.auto()  # the records of --data: there are none where a model is asked for canaries alone
    COUNT = enum.auto()  # how many: at least one
    REMOTE = enum.auto()  # a model behind an API
    LOADED = enum.auto()  # how weights are read here: a model behind an API has none of its own
    PLACED = enum.auto()  # where models go and in which precision, those too that are loaded beside the main one


SUBJECT, METHOD, CONDUCT, ATTACKER, ATTACKS, OWN, RECORDS, COUNT, REMOTE, LOADED, PLACED = About


@dataclass(frozen=True)
class EngineOptions:
    """Who does the work: this process, or the workers of a Ray cluster, so many GPUs or a part of one each.

    workers: None: as many as processors here. ray_address: of a cluster that is there; None: one of our own, here.
    """

    engine: Literal["local", "ray"] = "local"
    workers: int | None = None
    ray_address: str | None = None
    gpus_per_worker: float = 0.0

    def check(self, device: str) -> None:
        """Raises AuditError for options that do not go together, or with models on this device."""
        if self.workers is not None and self.workers < 1:
            raise AuditError(f"expected --workers >= 1, got {self.workers}")
        if not 0 <= self.gpus_per_worker < math.inf:
            raise AuditError(f"expected --gpus-per-worker >= 0, got {self.gpus_per_worker}")
        if self.engine == "local":
            for name in ("workers", "ray_address", "gpus_per_worker"):
                if getattr(self, name):
                    raise AuditError(f"{flag(name)} goes with --engine ray, got --engine local")
        elif device.startswith("cuda") and not self.gpus_per_worker:
            raise AuditError(f"expected --gpus-per-worker beside --device {device}, or no worker sees a GPU; got none")
        elif device == "cpu" and self.gpus_per_worker:
            raise AuditError(f"--gpus-per-worker {self.gpus_per_worker:g} goes with --device cuda, got --device cpu")


LOCAL = EngineOptions()


@dataclass(frozen=True)
class Plan:
    """One `audit run`. Written to the run folder, from which it can be resumed."""

    attack: Annotated[tuple[str, ...], METHOD] = ("ethicist",)
    defense: Annotated[tuple[str, ...], METHOD] = ()
    attack_options: Annotated[Options, METHOD | ATTACKS] = field(default_factory=dict)
    defense_options: Annotated[Options, METHOD] = field(default_factory=dict)
    setting: Annotated[Literal["claim", "worst", "both"], METHOD] = "both"
    model: Annotated[str | None, SUBJECT] = None
    model_args: Annotated[dict[str, str], SUBJECT | OWN | LOADED] = field(default_factory=dict)
    revision: Annotated[str | None, SUBJECT | OWN | LOADED] = None
    base: Annotated[str | None, SUBJECT | OWN | LOADED] = None  # of an adapter, in place of the one that it names
    device: Annotated[str, SUBJECT | OWN | PLACED] = "cpu"
    dtype: Annotated[str, SUBJECT | OWN | PLACED] = "float32"
    device_map: Annotated[str | None, SUBJECT | OWN | PLACED] = None  # as transformers takes it, or JSON
    quantise: Annotated[Literal["4bit", "8bit"] | None, SUBJECT | OWN | LOADED] = None
    trust_remote_code: Annotated[bool, SUBJECT | OWN | PLACED] = False
    base_url: Annotated[str | None, SUBJECT | OWN | REMOTE] = None
    tokenizer: Annotated[str | None, SUBJECT | OWN | REMOTE] = None
    max_tokens_total: Annotated[int | None, CONDUCT | COUNT | REMOTE] = None
    public: Annotated[str | None, SUBJECT | OWN | ATTACKER] = None
    reference: Annotated[str | None, SUBJECT | OWN | ATTACKER | ATTACKS] = None  # or none
    data: Annotated[str | None, SUBJECT] = None
    known: Annotated[str | None, SUBJECT | OWN | RECORDS | ATTACKS] = None
    known_fraction: Annotated[float, SUBJECT | OWN] = 0.2
    known_limit: Annotated[int | None, METHOD | ATTACKER | ATTACKS | RECORDS | COUNT] = None
    nonmembers: Annotated[str | None, SUBJECT | OWN | RECORDS | ATTACKS] = None
    before: Annotated[str | None, SUBJECT | OWN | LOADED] = None  # the model before it was to forget
    retrained: Annotated[str | None, SUBJECT | OWN | LOADED] = (
        None  # trained as that one, without what it was to forget
    )
    forget: Annotated[str | None, SUBJECT | OWN | RECORDS] = None
    relearn: Annotated[int | None, METHOD | COUNT | LOADED] = None  # steps on known pairs
    relearn_rate: Annotated[float | None, METHOD | LOADED] = None  # None: as the place has it
    group_column: Annotated[str | None, SUBJECT | OWN] = None
    phone_region: Annotated[str | None, METHOD | OWN | RECORDS | ATTACKS] = None  # as DE,US
    canaries: Annotated[str | None, SUBJECT | OWN] = None
    lead: Annotated[str, METHOD | ATTACKER] = AUTO  # what stands before every text: auto, none, bos, eos, or a text
    lab_recipe: Annotated[dict[str, Any], SUBJECT] = field(default_factory=dict)
    prefix_length: Annotated[int | None, SUBJECT | RECORDS] = None
    suffix_length: Annotated[int | None, SUBJECT | RECORDS] = None
    knows: Annotated[str | None, SUBJECT | OWN | RECORDS] = None  # of a conversation: system, user, partial:F
    template: Annotated[str, SUBJECT | OWN | RECORDS] = AUTO  # how conversations are rendered: benchmarks/forms.py
    date: Annotated[str | None, SUBJECT | OWN | RECORDS] = None  # YYYY-MM-DD, what their template writes as the day
    windows: Annotated[int | None, SUBJECT | OWN | RECORDS | COUNT] = None  # tokens between the starts of two of a text
    limit: Annotated[int | None, SUBJECT | RECORDS | COUNT] = None
    ensemble_limit: Annotated[int | None, METHOD | ATTACKER | COUNT] = None  # members, behind an ensemble; None: all
    controls: Annotated[bool, METHOD] = True  # each defense beside the rows that say what its effect is due to
    samples: Annotated[int | None, METHOD | ATTACKS | COUNT] = None
    sizes: Annotated[Literal["paper", "lab"], METHOD] = "paper"  # attacks' defaults outside the lab, which has its own
    seed: Annotated[int, SUBJECT] = 0  # outside the lab it also splits the data
    batch_size: Annotated[int | None, CONDUCT | COUNT] = None
    engine: Annotated[Literal["local", "ray"], CONDUCT] = "local"
    workers: Annotated[int | None, CONDUCT] = None
    ray_address: Annotated[str | None, CONDUCT] = None
    gpus_per_worker: Annotated[float, CONDUCT] = 0.0
    plugin: Annotated[tuple[str, ...], METHOD] = ()
    submission: Annotated[str | None, CONDUCT | ATTACKS] = None
    command: Annotated[str, CONDUCT] = "audit run"

    def __post_init__(self) -> None:
        if (self.model is None) != (self.data is None) and not self.canaries_alone:
            given, missing = ("--model", "--data") if self.data is None else ("--data", "--model")
            raise AuditError(f"expected --model and --data together, got {given} without {missing} (neither: the lab)")
        if self.lab:
            for name in self.given(OWN):
                raise AuditError(f"{flag(name)} goes with --model and --data; the built-in lab has its own")
        elif self.lab_recipe:
            raise AuditError("lab_recipe changes the built-in lab, which --model and --data replace")
        _check_no_credentials(self.model_args)
        self._check_remote()
        self._check_unlearning()
        if self.device_map is not None and self.device != "cpu":
            raise AuditError(
                f"expected either --device or --device-map, which says where each part of a model goes, got --device "
                f"{self.device} and --device-map {self.device_map}"
            )
        if self.canaries_alone:
            for name in self.given(RECORDS):
                raise AuditError(f"{flag(name)} goes with --data, got --canaries alone")
        for name in about(COUNT):
            if (value := getattr(self, name)) is not None and value < 1:
                raise AuditError(f"expected {flag(name)} >= 1, got {value}")
        self.engine_options.check(self.device)
        if not 0 <= self.seed < 2**63:
            raise AuditError(f"expected --seed from 0 to 2^63 - 1, got {self.seed}")
        if self.knows is not None:
            share_known(self.knows)
        if not self.lead:
            raise AuditError("expected --lead as auto, none, bos, eos or a text, got an empty one")
        if not self.template:
            raise AuditError("expected --template as auto, none, model or a file, got an empty one")
        if self.date is not None:
            check_day(self.date)
        if not self.attack:
            raise AuditError("expected at least one --attack, got none; `audit list` shows them")

    def _check_unlearning(self) -> None:
        """Refuses what only goes with a model that was to forget, and a training that cannot be done. What the
        defenses have to say to it is seen when they are chosen.
        """
        for name in ("before", "retrained"):
            if getattr(self, name) is not None and self.forget is None:
                raise AuditError(
                    f"expected --forget FILE with --{name}: the records that were to be forgotten; got none"
                )
        if self.relearn_rate is not None and self.relearn is None:
            raise AuditError("--relearn-rate goes with --relearn STEPS, got it alone")
        if self.relearn is None:
            return
        if self.relearn_rate is not None and not 0 < self.relearn_rate <= 1:
            raise AuditError(f"expected --relearn-rate above 0 and at most 1, got {self.relearn_rate:g}")
        if not self.lab and self.forget is None:
            raise AuditError(
                "--relearn goes with a model that was to forget: expected --before and --forget, got neither"
            )
        if self.engine == "ray":
            raise AuditError("--relearn trains models that every worker would train anew: it goes with --engine local")
        for name in ("quantise", "device_map"):
            if getattr(self, name) is not None:
                raise AuditError(f"--relearn trains all weights, which {flag(name)} does not let it")
        if self.dtype == "float16":
            raise AuditError("--relearn goes with --dtype float32 or bfloat16: steps in float16 come to nothing")

    def _check_remote(self) -> None:
        """Refuses what says nothing to this kind of model, and a place that no request can be sent to."""
        if not self.remote:
            for name in self.given(REMOTE):
                raise AuditError(f"{flag(name)} goes with --model {API}NAME, got --model {self.model}")
            return
        alone = self.public is None and self.reference is None
        for name in (*self.given(LOADED), *(self.given(PLACED) if alone else ())):
            raise AuditError(f"{flag(name)} says nothing to a model behind an API, got it with --model {self.model}")
        if self.model == API:
            raise AuditError(f"expected --model {API}NAME, got no name")
        if self.base_url is None:
            raise AuditError(f"expected --base-url URL with --model {self.model}, got none: it says who gets the texts")
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise AuditError(
                f"expected --base-url as http://HOST:PORT/v1 or https://HOST/v1, got {_without_key(url)!r}"
            )
        if url.username is not None or url.password is not None:
            raise AuditError(
                f"expected --base-url without a name or password, got {_without_key(url)!r} with one: a key comes from "
                "OPENAI_API_KEY"
            )

    @property
    def engine_options(self) -> EngineOptions:
        return EngineOptions(self.engine, self.workers, self.ray_address, self.gpus_per_worker)

    def by(self, engine: EngineOptions) -> Plan:
        """The same, by another engine."""
        return dataclasses.replace(self, **vars(engine))

    @property
    def lab(self) -> bool:
        return self.model is None

    @property
    def remote(self) -> bool:
        """Whether the model is behind an API."""
        return self.model is not None and self.model.startswith(API)

    @property
    def title(self) -> str:
        """What its run folder is called, behind the time."""
        named = "lab" if self.model is None else self.model.removeprefix(API)
        what = named.replace("\\", "/").rstrip("/").rpartition("/")[2]
        return "-".join([what, *self.attack, *self.defense])[:80]

    @property
    def canaries_alone(self) -> bool:
        """A model that is looked at for canaries only: there are no records to attack."""
        return self.model is not None and self.data is None and self.canaries is not None

    def given(self, what: About) -> list[str]:
        """The fields about this that do not hold their default."""
        default = {f.name: f.default for f in dataclasses.fields(self)}
        return [name for name in about(what) if getattr(self, name) not in (default[name], {})]


# Names of what lets one in, and the tokens of a text, whose names end alike.
_CREDENTIAL = re.compile(r"(^|_)(token|api_?key|access_?key|password|passwd|secret|authorization|credentials?)$")
_OF_TEXT = re.compile(r"^(additional_special|bos|cls|eos|mask|pad|sep|unk)_token$")


def _check_no_credentials(model_args: Mapping[str, str]) -> None:
    """Refuses what would stand in the plan, the result and the reports of a run. The value is not quoted."""
    for name in model_args:
        plain = name.lower().replace("-", "_")
        if _CREDENTIAL.search(plain) and not _OF_TEXT.match(plain):
            raise AuditError(
                f"expected no credential in --model-arg, where records and reports would show it, got {name}=...: a "
                "token for the hub comes from HF_TOKEN or `hf auth login`"
            )


def check_day(asked: str) -> None:
    """Raises AuditError for what is no day as --date takes it."""
    try:
        known = len(asked) == len("YYYY-MM-DD") and date.fromisoformat(asked)
    except ValueError:
        known = False
    if not known:
        raise AuditError(f"expected --date as YYYY-MM-DD, got {asked!r}")


def _without_key(url: SplitResult) -> str:
    """The address without what may be a secret in it."""
    return f"{url.scheme}://{url.hostname or ''}{url.path}"


FIELDS = tuple(f.name for f in dataclasses.fields(Plan) if f.name != "command")  # what a plan file may hold
KINDS: Mapping[str, Any] = typing.get_type_hints(Plan)
_ABOUT: Mapping[str, About] = {
    name: kind.__metadata__[0] for name, kind in typing.get_type_hints(Plan, include_extras=True).items()
}


def about(what: About) -> tuple[str, ...]:
    """The fields of a plan that are about this, in their order."""
    return tuple(name for name, said in _ABOUT.items() if said & what)


def flag(name: str) -> str:
    """How a field is written on the command line."""
    return "--" + name.replace("_", "-").replace("args", "arg")
