"""`audit check-base`: was a base prepared so that what is fine-tuned into it comes out?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from auditor.commands import console, options
from auditor.core.jsonable import to_json

if TYPE_CHECKING:
    from auditor.runs.base_check import BaseCheck

_SHOWN = 3
_SAID = {
    True: "more than through fresh bases",
    False: "not significantly more than through fresh bases",
    None: "cannot tell",
}


def check_base(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model that you would fine-tune: folder or hub id.")],
    fresh: Annotated[
        options.Many, typer.Option(metavar="MODEL", help="A base like it that you trust; repeatable, at least three.")
    ] = None,
    prompt: Annotated[
        options.Many,
        typer.Option(metavar="TEXT", help="A further prompt, {word} for a canary's first word; repeatable."),
    ] = None,
    canaries: Annotated[int, typer.Option(help="Canaries that a copy is tuned on; as many stay out.")] = 64,
    epochs: Annotated[int, typer.Option(help="Of the tuning.")] = 12,
    rate: Annotated[float, typer.Option(help="Learning rate of the tuning.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Of canaries and tuning.")] = 0,
    as_json: options.Json = False,
    *,
    loading: Annotated[options.Values, options.PlanFlags("device dtype revision trust_remote_code")],
) -> None:
    """Was a base prepared to give away what is tuned into it? Tune canaries into it and into fresh bases, and ask.

    Exit code 0: not significantly more than through the fresh ones (a weak preparation is missed), 1: more (as after
    longer training, too), 4: nothing can be told: a tuning taught nothing, or the fresh bases differ too much.

    Examples:
        audit check-base ./base --fresh ./trusted-1 --fresh ./trusted-2 --fresh ./trusted-3
    """
    console.silence_libraries()
    from auditor.core.plan import Plan
    from auditor.models.loading import load_causal_lm
    from auditor.runs.base_check import Tuning
    from auditor.runs.base_check import check_base_for_backdoor as check

    how, tuning = Plan.from_fields(**loading).loading, Tuning(canaries, epochs, rate, seed)
    with console.open_progress_terminal(verbose=False) as reporter:
        # --revision is of the base alone: fresh bases are other repositories
        others = [load_causal_lm(one, how.for_companion_model()) for one in fresh or []]
        found = check(load_causal_lm(base, how), others, tuning, prompt or (), reporter.progress)
    typer.echo(json.dumps(to_json(found), indent=2) if as_json else "\n".join(_printed_base_check_lines(found)))
    raise typer.Exit({True: 1, False: 0, None: 4}[found.alarm])


def _printed_base_check_lines(found: BaseCheck) -> Iterator[str]:
    fresh = ", ".join(f"{100 * reach:.0f}%" for reach in found.of_fresh)
    yield f"RESULT  {_SAID[found.alarm]}: a request brings out {100 * found.reach:.0f}% of what comes out as in"
    yield f"        training, of fresh bases {fresh}; alarm above {100 * found.limit:.0f}%"
    for leak in (found.nothing, *found.asked[:_SHOWN]):
        named = leak.prompt or "as in training"
        yield f"        {round(100 * leak.share):3}% of tokens, fresh {round(100 * leak.of_fresh):3}%: {named}"
    if not found.taught:
        yield "NEXT    canaries that went in are given back no more than others: raise --rate or --epochs"
    elif found.alarm is None:
        yield "NEXT    fresh bases differ so much that no base could be above their limit: give more of them"
    elif found.alarm:
        yield "DOUBT   longer training alone can do this: the fresh bases should have been trained as long"
    yield "LIMITS  A trigger that is like none of these requests, as a random string, is not found: --prompt adds some."
