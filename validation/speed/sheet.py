"""Measure the cost of each phase of an audit relative to the necessary bare forward passes.

    python -m validation.speed.sheet [--model smollm2] [--only greedy ...] [--repeats 5] [-o FILE]
    python -m validation.speed.sheet --device cuda --dtype bfloat16 --times 16

*Fewest tokens*: every prefix is read once, then one forward per distinct partial suffix; a scored
text is read except for its last token; a training step is a forward and the backward of its
trained weights. *Bare*: the transformers module on exactly these tokens, in batches of the same
size, with a cache if tokens follow one another; logits are discarded. Time is processor time of
one thread, or on an accelerator the time until it is done. Phase and bare take turns, and a ratio
compares two consecutive ones, so other load affects both. Secrets are texts of these pages.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache

from auditor.attacks.ethicist import Ethicist
from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.attacks.membership import Membership
from auditor.attacks.near_verbatim import bound_near_verbatim_probability
from auditor.benchmarks.lab.smollm2 import find_smollm2_folder
from auditor.core.canary_space import CanarySpace
from auditor.core.nouns import Pair, Query, Secret, Tokens
from auditor.core.plan_parts import LoadingOptions
from auditor.generation import tries
from auditor.models.base import get_max_logits
from auditor.models.decoding import Cooling, Decoding
from auditor.models.huggingface import HuggingFaceModel, traffic
from auditor.models.loading import DEFAULTS, load_causal_lm, load_tokenizer_if_present
from auditor.models.lora import LoraEnsemble
from auditor.models.precision import DTYPES
from auditor.models.slot_cache import SlotLayer
from auditor.plugins.view import WHITE_BOX, Sampling, View
from auditor.runs import personal_data, scoring
from auditor.training import members as ensemble
from auditor.training.dp_loop import PoissonSampler, PrivateRecipe, fit_privately
from auditor.training.finetune import FineTuningRecipe, compute_causal_loss
from validation.harness import Page, median_and_spread, run

OWN = Decoding(temperature=0.8, top_p=0.7)  # Ethicist's
PREFIX, SUFFIX = 32, 16  # tokens
_BATCH = 256  # rows of one bare decoding step at most
GOAL = {"sampling": 1.3}  # 1.5 for other phases
WORDS = {
    "greedy": "greedy decoding",
    "probability": "exact probability",
    "membership": "membership, Min-K%++",
    "sampling": "20 samples a prefix",
    "tree": "exact tree to 1 in 100",
    "near": "near-verbatim, 20 beams",
    "exposure": "exposure, 200 nodes",
    "untargeted": "untargeted generation",
    "personal": "personal data",
    "tuning": "Ethicist's tuning",
    "dp": "ten steps of DP-SGD (LoRA), checked first",
    "members": "training PMixed's members",
    "mixture": "distributions of PMixed's members",
}


@dataclass(frozen=True)
class Phase:
    """A phase to measure. ours: the phase as a run does it; bare: the necessary forwards.

    tokens: number of tokens that the bare forwards read.
    """

    ours: Callable[[], object]
    bare: Callable[[], object]
    tokens: int
    backward: bool = False


class Bench:
    """A model, and the secrets that its phases use."""

    def __init__(
        self, model: HuggingFaceModel, texts: Sequence[Tokens], scratch: Path, times: int = 1
    ) -> None:
        self.model, self.scratch, self.times = model, scratch, times
        size = PREFIX + SUFFIX
        every = [
            piece
            for text in texts
            for piece in (text[i : i + size] for i in range(0, len(text), size))
        ]
        whole = [piece for piece in every if len(piece) == size]
        self.pairs = [Pair(piece[:PREFIX], piece[PREFIX:]) for piece in whole]
        self.secrets = [
            Secret(f"s{i}", pair.prefix, pair.suffix) for i, pair in enumerate(self.pairs)
        ]

    def some(self, count: int) -> tuple[list[Secret], Tensor, Tensor]:
        """Return the first count x `times` secrets, their prefixes and their suffixes."""
        secrets = self.secrets[: count * self.times]
        prefixes, suffixes = ([getattr(s, side) for s in secrets] for side in ("prefix", "suffix"))
        return secrets, self.tensor(prefixes), self.tensor(suffixes)

    def tensor(self, tokens: Sequence[Tokens]) -> Tensor:
        return torch.tensor(tokens, device=self.model.device)

    def view(self) -> View:
        return View("undefended", self.model, WHITE_BOX, seed=0, tokenizer=self.model.tokenizer)

    # --- bare forwards ---

    @torch.no_grad()
    def read(self, texts: Tensor, last: int) -> None:
        """Run bare forwards of whole texts, with logits of the last `last` positions."""
        for some in texts.split(
            max(1, get_max_logits(self.model.device) // (last * self.model.vocab_size))
        ):
            self.model.model(input_ids=some, use_cache=False, logits_to_keep=last)

    @torch.no_grad()
    def decode(self, prefixes: Tensor, counts: Sequence[int]) -> None:
        """Read the prefixes, then counts[i] rows at step i.

        The rows' tokens are arbitrary, because they do not change the time.
        """
        cache = Cache(
            layers=self._room(max(len(prefixes), *counts), prefixes.shape[1] + len(counts))
        )
        for depth, count in enumerate([len(prefixes), *counts]):
            read = prefixes if depth == 0 else prefixes[:1, -1:].expand(count, 1)
            self.model.model(
                input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1
            )

    def _room(self, rows: int, length: int) -> list[Any]:
        """Return cache layers for `rows` rows, with memory already allocated."""
        config = self.model.model.config
        shape = (
            rows,
            config.num_key_value_heads,
            1,
            config.hidden_size // config.num_attention_heads,
        )
        like = torch.zeros(shape, dtype=self.model.model.dtype, device=self.model.device)
        layers = [SlotLayer(length) for _ in range(self.model.n_layers)]
        for layer in layers:
            layer.lazy_initialization(like, like)
            layer.keys, layer.values = torch.zeros_like(layer.keys), torch.zeros_like(layer.values)
        return layers

    # --- queries of distributions and rows ---

    def greedy(self, count: int = 16) -> Phase:
        secrets, prefixes, _ = self.some(count)
        counts = [len(secrets)] * (SUFFIX - 1)
        return self._decoding(
            partial(scoring.decode_greedily, self.model, secrets), prefixes, counts
        )

    def _decoding(
        self, ours: Callable[[], object], prefixes: Tensor, counts: Sequence[int]
    ) -> Phase:
        """Return a phase whose bare work is `decode(prefixes, counts)`."""
        return Phase(ours, partial(self.decode, prefixes, counts), prefixes.numel() + sum(counts))

    def probability(self, count: int = 16) -> Phase:
        return self._scored(ExtractionProbability(), count)

    def membership(self, count: int = 16) -> Phase:
        return self._scored(Membership(score="min_k_plus", lowercase=False), count)

    def _scored(self, probe: Any, count: int) -> Phase:
        secrets, prefixes, suffixes = self.some(count)
        texts = torch.cat([prefixes, suffixes[:, :-1]], dim=1)
        view = self.view()
        return Phase(
            lambda: list(probe.observe_secrets(view, secrets)),
            partial(self.read, texts, SUFFIX),
            texts.numel(),
        )

    def sampling(self, count: int = 4) -> Phase:
        return self._searched(Sampling(20, OWN), count)

    def tree(self, count: int = 4) -> Phase:
        return self._searched(Sampling(1, OWN, search="tree", threshold=0.01), count)

    def _searched(self, sampling: Sampling, count: int) -> Phase:
        secrets, prefixes, _ = self.some(count)
        queries = [Query(s.id, s.prefix, len(s.suffix)) for s in secrets]

        def ours() -> list[Any]:
            return [
                found for batch in self.view().candidates(queries, sampling) for _, found in batch
            ]

        found = ours()
        counts = [
            sum(len(np.unique(one.suffixes[:, :d], axis=0)) for one in found)
            for d in range(1, SUFFIX)
        ]
        if sampling.search == "tree":  # nodes that led to no leaf were rows, too
            missing = sum(one.rows for one in found) - len(found) - sum(counts)
            counts = [rows + missing // (SUFFIX - 1) for rows in counts]
        return self._decoding(ours, prefixes, counts)

    def near(self, count: int = 1, beams: int = 20) -> Phase:
        _, prefixes, suffixes = self.some(count)
        ours = partial(
            bound_near_verbatim_probability, self.model, OWN, prefixes, suffixes, 5, beams
        )
        before = traffic.tokens
        ours()  # only our code knows how many beams can still end within the distance
        counts = [(traffic.tokens - before - prefixes.numel()) // (SUFFIX - 1)] * (SUFFIX - 1)
        return self._decoding(ours, prefixes, counts)

    def exposure(self, nodes: int = 200) -> Phase:
        tree = tries.load_or_build_trie(CanarySpace("My ID is {digits:6}"), self.model.tokenizer)
        head, nodes = self.tensor([tree.head]), nodes * self.times
        counts: list[int] = []
        while (left := nodes - 1 - sum(counts)) > 0:  # the first node is read with the head
            counts.append(min(10 ** (len(counts) + 1), _BATCH * self.times, left))
        ours = partial(
            tries.count_leaves_within_nll, self.model, tree, tree.head, [1e9], nodes=nodes
        )
        return self._decoding(ours, head, counts)

    def untargeted(self, count: int = 16, length: int = 16) -> Phase:
        count *= self.times
        queries = [Query(f"g{i}", (self.model.eos[0],), length) for i in range(count)]
        sampling = Sampling(1, Cooling(1.0, 40, hot=10.0, steps=20))
        begin = self.tensor([query.prefix for query in queries])
        return self._decoding(
            lambda: list(self.view().candidates(queries, sampling)), begin, [count] * (length - 1)
        )

    def personal(self, count: int = 16) -> Phase:
        """Return the phase that finds personal data, which needs no forward.

        It is compared with a forward of the texts it searches.
        """
        secrets, prefixes, suffixes = self.some(count)
        own: dict[str, Any] = {
            "tokenizer": self.model.tokenizer,
            "secrets": secrets,
            "known": [],
            "marks_all": False,
        }
        ours = partial(personal_data.find_personal_data, types.SimpleNamespace(**own))  # type: ignore[arg-type]
        texts = torch.cat([prefixes, suffixes], dim=1)
        return Phase(ours, partial(self.read, texts, 1), texts.numel())

    # --- training ---

    def tuning(self, count: int = 6, rows: int = 100) -> Phase:
        """Return the phase of one tuning epoch of a soft prompt.

        Bare are a forward and the backward to the prompt for the pairs, and a forward for held-out
        pairs.
        """
        method = Ethicist(epochs=1, prompt_length=rows, batch=8)
        held, pairs = self.pairs[:2], self.pairs[2 : 2 + (count - 2) * self.times]
        texts = self.tensor([pair.prefix + pair.suffix[:-1] for pair in [*pairs, *held]])

        def forward(some: Tensor, learn: bool) -> None:
            prompt = self.model.embedding.weight[:rows].detach().clone().requires_grad_(learn)
            embeds = torch.cat(
                [prompt.expand(len(some), -1, -1), self.model.embedding(some)], dim=1
            )
            logits = self.model.model(
                inputs_embeds=embeds, use_cache=False, logits_to_keep=SUFFIX
            ).logits
            if learn:
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), some[:, -SUFFIX:].flatten()
                ).backward()

        def bare() -> None:
            for some in texts[: len(pairs)].split(8):
                forward(some, learn=True)
            with torch.no_grad():
                forward(texts[len(pairs) :], learn=False)

        ours = lambda: method._tune_soft_prompt(self.model, pairs, held, ("sheet",))  # noqa: E731
        return Phase(ours, bare, (texts.shape[1] + rows) * len(texts), backward=True)

    def dp(self, count: int = 8, steps: int = 10) -> Phase:
        examples = [pair.prefix + pair.suffix for pair in self.pairs[: count * self.times]]
        count = len(examples)
        recipe = PrivateRecipe(1.0, 1.0, steps, count, 1e-4, physical_batch=count)
        model = self._adapted().train()
        sampler = PoissonSampler(count, 1.0, "sheet")
        ours, tokens = (
            partial(fit_privately, model, examples, sampler, recipe, pad=0),
            self.tensor(examples),
        )
        bare = lambda: [compute_causal_loss(model, tokens).backward() for _ in range(steps)]  # noqa: E731
        return Phase(ours, bare, steps * tokens.numel(), backward=True)

    def members(self, count: int = 2, blocks: int = 4) -> Phase:
        course = FineTuningRecipe(epochs=1, rate=1e-3, batch=2, block=64, end=0)
        text = (self.pairs[0].prefix * 8)[: 64 * blocks - 1]
        model = self._adapted()
        tokens = self.tensor([(*text, 0)]).view(-1, 2, 64)

        def ours() -> None:
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                waiting = [
                    ensemble.MemberToTrain(
                        Path(folder) / f"member-{i:03d}", ["t"], [text], i, ("sheet", i)
                    )
                    for i in range(count)
                ]
                adapter = ensemble.LoraAdapterRecipe(8, 16, "attention")
                ensemble.train_private_members(self.model.model, adapter, waiting, course)

        def bare() -> None:
            for _ in range(count):
                for some in tokens:
                    compute_causal_loss(model, some).backward()

        return Phase(ours, bare, count * tokens.numel(), backward=True)

    def mixture(self, parts: int = 4, count: int = 4) -> Phase:
        folders = []
        for i in range(parts):
            folders.append(self.scratch / f"part-{i}")
            if not folders[-1].is_dir():
                self._adapted(seed=i).save_pretrained(folders[-1])
        asked = LoraEnsemble(self.model, folders)
        _, prefixes, suffixes = self.some(count)
        texts = torch.cat([prefixes, suffixes[:, :-1]], dim=1)
        every = torch.arange(1 + parts, device=self.model.device)
        ours = torch.no_grad()(partial(asked.distributions, texts, every, SUFFIX))
        bare = partial(self.read, texts.repeat(1 + parts, 1), SUFFIX)
        return Phase(ours, bare, (1 + parts) * texts.numel())

    def _adapted(self, seed: int = 0) -> Any:
        """Return the model with a new adapter of rank 8; the weights are shared."""
        torch.manual_seed(seed)
        adapter = ensemble.LoraAdapterRecipe(8, 16, "attention")
        return ensemble.add_lora_adapter(ensemble.copy_sharing_weights(self.model.model), adapter)


# --- conversations ---


def conversations(
    bench: Bench, system: int, count: int, repeats: int, only: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each phase: the gain from reading a common beginning only once.

    Every conversation begins with the same `system` tokens, continues with 16 to 32 tokens of its
    own, and ends with 16 attacked tokens.
    """
    turn = tuple(token for pair in bench.pairs[-8:] for token in pair.prefix)[:system]
    secrets = [
        Secret(s.id, turn + s.prefix[4 * (i % 5) :], s.suffix)
        for i, s in enumerate(bench.secrets[:count])
    ]
    queries = [Query(s.id, s.prefix, len(s.suffix)) for s in secrets]
    probe = ExtractionProbability(temperature=1.0, top_p=1.0)

    def sampled() -> list[Any]:
        batches = bench.view().candidates(queries, Sampling(20, OWN))
        return [
            (found.suffixes.tolist(), found.token_log_probs)
            for batch in batches
            for _, found in batch
        ]

    def scored() -> list[Any]:
        every = probe.observe_secrets(bench.view(), secrets)
        return [(seen.secret, torch.tensor([seen.values["log_p"] / SUFFIX])) for seen in every]

    asked: dict[str, Callable[[], list[Any]]] = {
        "greedy": lambda: [
            (text, torch.zeros(1)) for text in scoring.decode_greedily(bench.model, secrets)
        ],
        "probability": scored,
        "sampling": sampled,
    }
    for name in (name for name in asked if name in only):
        faster, same, apart = [], True, 0.0
        for _ in range(repeats):
            answers, seconds = [], []
            for share in (False, True):
                bench.model.begins = None
                if share:
                    bench.model.enable_shared_prefix_cache()
                start = time.process_time()
                answers.append(asked[name]())
                seconds.append(time.process_time() - start)
            faster.append(seconds[0] / seconds[1])
            for (words, numbers), (again, others) in zip(*answers, strict=True):
                same &= words == again
                if words == again:
                    apart = max(apart, float((numbers - others).abs().max()))
        yield WORDS[name], *median_and_spread(faster), "yes" if same else "NO", f"{apart:.1e} apart"
    bench.model.begins = None


def took(device: torch.device, work: Callable[[], object]) -> float:
    """Return the processor seconds of `work`; on an accelerator, the seconds until it is done."""
    if device.type == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    work()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def ratios(phase: Phase, repeats: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Return, for each turn, the ratio of phase to bare time, and the bare seconds."""
    phase.bare(), phase.ours()
    turns = [(took(device, phase.bare), took(device, phase.ours)) for _ in range(repeats)]
    return [ours / bare for bare, ours in turns], [bare for bare, _ in turns]


def smollm2(device: str = "cpu", dtype: str = "float32") -> HuggingFaceModel:
    return load_causal_lm(str(find_smollm2_folder()), LoadingOptions(device=device, dtype=dtype))


def llama(device: str = "cpu", dtype: str = "bfloat16") -> HuggingFaceModel:
    """Return a model of TinyLlama's shape: 1.1 billion random weights, 2.2 GB in bfloat16.

    Its head is scaled so that 70% of a distribution is on 6 tokens (SmolLM2: on 3) instead of
    10,673.
    """
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 4}
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "intermediate_size": 5632,
        "vocab_size": 49152,
    }
    config = LlamaConfig(**sizes, **heads, dtype=dtype)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(DTYPES[dtype])
    model = model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.04, 0.04) if parameter.ndim > 1 else parameter.data.fill_(1.0)
    model.lm_head.weight.data.mul_(4)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    tokenizer = load_tokenizer_if_present(str(find_smollm2_folder()), DEFAULTS)
    return HuggingFaceModel(model.eval(), tokenizer, "a Llama of 1.1 billion weights")


MODELS = {"smollm2": smollm2, "llama": llama}


def texts(model: HuggingFaceModel) -> Iterator[Tokens]:
    for page in sorted(Path("docs/explanation").glob("*.md")):
        yield tuple(
            model.tokenizer(page.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        )


def main(
    model: Literal["smollm2", "llama"] = "smollm2",
    only: Annotated[tuple[str, ...], tuple(WORDS)] = tuple(WORDS),
    repeats: int = 5,
    system: Annotated[
        int, "tokens that all conversations begin with, and what reading them once is worth"
    ] = 0,
    talks: Annotated[int, "conversations"] = 10,
    device: Annotated[str, "cpu, cuda or mps"] = "cpu",
    dtype: Literal["float32", "bfloat16"] | None = None,
    times: Annotated[int, "as many secrets, to fill an accelerator"] = 1,
    out: Path | None = None,
) -> None:
    torch.set_num_threads(1)
    page = Page(out)
    options = {"device": device, **({} if dtype is None else {"dtype": dtype})}
    loaded = MODELS[model](**options)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(loaded, list(texts(loaded)), Path(scratch), times)
        if not system:
            page.head("phase", "fewest tokens", "bare", "phase / bare, median", "spread", "goal")
        for name in only if not system else ():
            phase = getattr(bench, name)()
            found, least = ratios(phase, repeats, loaded.device)
            tokens = f"{phase.tokens:,}" + ", forward and backward" * phase.backward
            goal = f"{GOAL.get(name, 1.5)}" if name != "personal" else "no forward"
            page.row(
                WORDS[name],
                tokens,
                f"{statistics.median(least):.3g} s",
                *median_and_spread(found),
                goal,
            )
        if system:
            page.head(
                "phase",
                "times the speed, median",
                "spread",
                "same tokens",
                "log-probabilities, nats a token",
            )
            for row in conversations(bench, system, talks, repeats, only):
                page.row(*row)


if __name__ == "__main__":
    raise SystemExit(run(main))
