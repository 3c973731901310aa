"""Flags that several commands share: each with its name and its text, once, and those that go together as groups.

A command takes a flag as `seed: options.Seed = None`, and a group, a dataclass of flags, as `loading: options.Loading`.
What is not given is None: the default is that of the record that the flags make.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer

from auditor.core import safe as guard
from auditor.core.errors import AuditError
from auditor.core.plan import AUTO, Plan

Many = list[str] | None  # of a flag that may be repeated

Defense = Annotated[Many, typer.Option("--defense", "-d", help="Defense to put in front of the model; repeatable.")]
DefenseOptions = Annotated[Many, typer.Option("-D", metavar="[DEFENSE.]OPTION=VALUE", help="Option of a defense.")]
Public = Annotated[
    str | None,
    typer.Option(help="Public model: base of a PMixED ensemble, and what claim-setting prompts are tuned on."),
]
Limit = Annotated[int | None, typer.Option(help="Attack at most so many members, and so many non-members.")]
Template = Annotated[
    str | None,
    typer.Option(
        metavar="auto|none|model|FILE",
        help="How conversations and instructions are rendered: the tokenizer's chat template, a file's, none, or "
        "alpaca, trl. [default: auto]",
    ),
]
Date = Annotated[
    str | None,
    typer.Option(metavar="YYYY-MM-DD", help="The day that the chat template writes: the day of the training."),
]
Seed = Annotated[int | None, typer.Option(help="All randomness follows from it. [default: 0]")]
Seeds = Annotated[
    str | None, typer.Option(metavar="0-4|0,2", help="Run at each of these seeds, instead of the plan's.")
]
BatchSize = Annotated[
    str | None,
    typer.Option(metavar="N|auto", help="Prefixes or texts at once; results do not depend on it. [default: auto]"),
]
ModelArgs = Annotated[
    Many,
    typer.Option("--model-arg", metavar="K=V", help="Passed to from_pretrained of --model: attn_implementation=eager."),
]
Plugin = Annotated[
    Many, typer.Option(help="Python file with attacks, defenses or training methods of your own; repeatable.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let model repositories run their own code.")
]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Write Markdown, for a pull request.")]
PhoneRegion = Annotated[
    str | None,
    typer.Option(metavar="DE,US", help="Countries whose telephone numbers the data write without a country code."),
]
Reveal = Annotated[
    bool,
    typer.Option("--reveal", help="Show the private text in the reports: prefixes, suffixes and guesses, by secret."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(frozen=True, kw_only=True)
class SubjectFlags:
    """What is attacked, and the models beside it. Without a model: the lab."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face causal LM or PEFT adapter: hub id or folder; openai:NAME behind an API. Without it: "
            "the lab."
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="Training records: JSONL/CSV/Parquet, a Hugging Face data set, token ids (input_ids, or .npy arrays)."
        ),
    ] = None
    known: Annotated[str | None, typer.Option(help="Records the attacker already knows (same formats).")] = None
    nonmembers: Annotated[
        str | None,
        typer.Option(help="Matched records the model was not trained on: the floor, and held-out perplexity."),
    ] = None
    public: Public = None
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|none",
            help="Reference model for comparing scores. [default: --public, else an adapter's base]",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LoadingFlags:
    """How a model is loaded: of every command that loads one."""

    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps; auto: the best that is there. [default: cpu]")
    ] = None
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16. [default: float32]")] = None


@dataclass(frozen=True, kw_only=True)
class HubLoadingFlags(LoadingFlags):
    """The same of a model that may be on the hub, at a revision and with code of its own."""

    revision: Annotated[str | None, typer.Option(help="Revision of --model on the hub.")] = None
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Base of an adapter. [default: the one that the adapter names]")
    ] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Who does the work."""

    engine: Annotated[
        str | None,
        typer.Option(metavar="local|ray", help="Who does the work: this process, or workers of Ray. [default: local]"),
    ] = None
    workers: Annotated[
        int | None, typer.Option(help="Workers of --engine ray. [default: as many as processors here]")
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT|auto", help="A Ray cluster that is there. [default: one on this machine]"),
    ] = None
    gpus_per_worker: Annotated[
        float | None, typer.Option(help="GPUs of each worker, or a part of one. [default: 0]")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ApiFlags:
    """A model that is asked over HTTP: `--model openai:NAME`. Its key is read from OPENAI_API_KEY."""

    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Server of --model openai:NAME: http://HOST:PORT/v1. Key: OPENAI_API_KEY."),
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of --model openai:NAME: folder or hub id. [default: NAME]")
    ] = None
    max_tokens_total: Annotated[
        int | None, typer.Option(help="Ask a model behind an API for at most so many tokens. [default: no limit]")
    ] = None


# --- groups of flags as typer reads them ------------------------------------------------------------------------------


_SAFE = Annotated[
    bool,
    typer.Option("--safe/--no-safe", help="Run no plug-in, no code of a model folder, no other program; no network."),
]


def spelt_out(command: Callable[..., None], safe: bool | None = None) -> Callable[..., None]:
    """The command with each of its groups replaced by the flags in it: typer reads flags from a signature alone.

    safe: the default of its flag --safe; None: it has none.
    """
    kinds = _kinds(command)
    own = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def spelt(**flags: Any) -> None:
        with guard.reading() if flags.pop("safe", False) else nullcontext():
            command(**{one.name: _collected(one.name, kinds[one.name], flags) for one in own})

    flags = [flag for one in own for flag in _flags(one.name, kinds[one.name], one.default)]
    if safe is not None:
        flags += _flags("safe", _SAFE, safe)
    spelt.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    spelt.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return spelt


def _kinds(where: Any) -> dict[str, Any]:
    return get_type_hints(where, include_extras=True)


def _flags(name: str, kind: Any, default: Any) -> Iterator[inspect.Parameter]:
    """The flags of a group, which may hold groups; of a flag, itself."""
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            needed = field.default is dataclasses.MISSING
            yield from _flags(
                field.name, _kinds(kind)[field.name], inspect.Parameter.empty if needed else field.default
            )
    else:
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _collected(name: str, kind: Any, flags: Mapping[str, Any]) -> Any:
    """The flag's value, or the group made of the values of its flags."""
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return flags[name]
    kinds = _kinds(kind)
    return kind(**{field.name: _collected(field.name, kinds[field.name], flags) for field in dataclasses.fields(kind)})


# --- what was given ---------------------------------------------------------------------------------------------------


def given(group: Any) -> dict[str, Any]:
    """The flags of a group, and of the groups in it, that were given."""
    found: dict[str, Any] = {}
    for name, value in vars(group).items():
        found |= given(value) if dataclasses.is_dataclass(value) else {name: value}
    return {name: value for name, value in found.items() if value is not None and value is not False}


def plan_values(group: Any, base: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The flags given as values of a plan. The plug-in files that they name are loaded first.

    base: the values of the plan file, which may ask for no code to run that the flags do not name. Raises AuditError.
    """
    from auditor.plugins import registry
    from auditor.runs.plan import parse_options

    values = given(group)
    Allowed.by(values).check(base, "the plan file")
    load_plugins(values.get("plugin"))
    read: dict[str, Callable[[Any], Any]] = {
        "attack_options": lambda items: parse_options("-A", items, list(registry.attacks_and_probes())),
        "defense_options": lambda items: parse_options("-D", items, list(registry.defenses())),
        "model_args": lambda items: parse_options("--model-arg", items, []).get("", {}),
        "batch_size": batch_size,
    }
    return {name: read[name](value) if name in read else value for name, value in values.items()}


@dataclass(frozen=True)
class Allowed:
    """Code that the command line names, so that it may run. A plan file or a run folder may be anybody's."""

    plugin: tuple[str, ...] = ()
    trust_remote_code: bool = False

    @classmethod
    def by(cls, flags: Mapping[str, Any]) -> Allowed:
        """What these flags name. Raises AuditError for any with --safe."""
        found = cls(tuple(flags.get("plugin") or ()), bool(flags.get("trust_remote_code")))
        for path in found.plugin:
            guard.refuse(f"the plug-in {path!r} would run")
        if found.trust_remote_code:
            guard.refuse("code of model folders would run")
        return found

    @classmethod
    def of(cls, plan: Plan) -> Allowed:
        """What a plan asks for."""
        return cls(plan.plugin, plan.trust_remote_code)

    def flags(self) -> list[str]:
        """As the command line says it."""
        plugins = [word for path in self.plugin for word in ("--plugin", shlex.quote(path))]
        return [*plugins, *(["--trust-remote-code"] if self.trust_remote_code else [])]

    def check_whole(self, plan: Plan, where: str) -> None:
        """Raises AuditError for a plan that asks for more, or for less: what is allowed beyond it would be ignored."""
        self.check(vars(plan), where)
        for path in self.plugin:
            if os.path.abspath(path) not in map(os.path.abspath, plan.plugin):
                raise AuditError(f"expected no --plugin but those that {where} names, got {path!r}")
        if self.trust_remote_code and not plan.trust_remote_code:
            raise AuditError(f"expected no --trust-remote-code, as {where} does not set it, got it")

    def check(self, plan: Mapping[str, Any], where: str) -> None:
        """Raises AuditError for a plan that asks for more. where: whose plan it is, for the sentence."""
        named, here = plan.get("plugin") or (), {os.path.abspath(path) for path in self.plugin}
        for path in named if isinstance(named, list | tuple) else [named]:
            if os.path.abspath(str(path)) not in here:
                raise AuditError(
                    f"{where} names the plug-in {str(path)!r}, whose code would run: if it is yours, name it on the "
                    f"command line as well, --plugin {path}"
                )
        if plan.get("trust_remote_code") and not self.trust_remote_code:
            raise AuditError(
                f"{where} sets trust_remote_code, so that code in model folders would run: if that is meant, say it on "
                "the command line as well, --trust-remote-code"
            )


def load_plugins(files: list[str] | None) -> None:
    from auditor.plugins import registry

    for path in files or []:
        registry.load_file(Path(path))


def batch_size(value: str) -> int | str:
    if value == AUTO:
        return value
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < 1:
        raise AuditError(f"expected --batch-size to be a whole number >= 1 or auto, got {value!r}")
    return int(value)
