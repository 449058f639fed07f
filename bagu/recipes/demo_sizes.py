"""The sizes of a demo, and the runs of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bagu.data.corpus import STDLIB, SourceConfig
from bagu.data.loader import DataConfig
from bagu.data.mix import MixConfig
from bagu.nn.config import ModelConfig
from bagu.recipes.run import Run, TokenizerConfig
from bagu.train.objectives.sft import SupervisedFineTuning
from bagu.train.optim import OptimizerConfig
from bagu.train.preference.dpo import PreferenceOptimization
from bagu.train.rl.grpo import GroupRelative
from bagu.train.schedule import ScheduleConfig
from bagu.train.stability import StabilityConfig
from bagu.train.state import TrainConfig

COOLDOWN = 0.5  # the last half of pretraining and of fine-tuning
DPO_COST = 4 / 3  # of a pretraining step: a forward of the reference is added to forward and backward
EVALUATED = 6  # times in a run, so that its curves of held-out data have as many points
COMPOSED = "composed"  # the name of the source of composed functions
# Of the answers to `write` after 430 steps of fine-tuning, 1.9 % passed with functions of up to 512 bytes, 4.7 % with 3
# renamed copies of each, 5.3 % with 256 bytes and 3 copies, 6.4 % with 7 copies, and 13.6 % after 860 steps (the large
# size after 8 M tokens of pretraining, on an H200; one run each).
FUNCTION_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Demo:
    """One size. `enough_tokens` is the number of pretraining tokens from which this size beats the next smaller one:
    with 1.2 M of them, five minutes on two x86 cores, `medium` writes 62 and 63 % of the functions and `small` 77 %.

    `priming_bytes` limits the text that xz is primed with, because xz is slow. A step of reinforcement samples
    `rl_samples` answers of at most `rl_tokens` tokens to each of `rl_prompts` prompts.

    With `library`, the later stages train on functions of the standard library too, which a model learns in a quarter
    of an hour on two fast cores, and the tasks of the library are evaluated. `data` is the folder of the composed
    functions (demo_data.py): `demonstrations` of them are fine-tuned on. With 3, 1.5 and 1 `library_rows`, 44, 51 and
    56 % of `compose` are right after 595 steps of `large` (the plan of 26 minutes on two x86 cores, made on an H200).
    """

    name: str
    hidden_size: int
    num_layers: int
    head_dim: int = 64
    vocab_size: int
    context: int
    rows: int
    lr: float
    pretrain_steps: int
    sft_steps: int
    dpo_steps: int
    rl_steps: int
    rl_prompts: int
    rl_samples: int
    rl_tokens: int
    eval_items: int  # per task of the library, but for `write`
    compose_items: int | None = None  # of `compose` and of `compose_long`; None: all of them
    write_items: int  # four answers each
    tokenizer_mb: float
    validation_batches: int
    priming_bytes: int | None
    enough_tokens: int = 0
    renamed: int  # copies of each function under random names in fine-tuning, about as many as there is time to read
    function_bytes: int = FUNCTION_BYTES  # of the largest function that is trained on
    library: bool = False
    library_rows: float = 1.0  # in fine-tuning, for each row of composed functions
    library_prompts: float | None = None  # in reinforcement, for each composed function; None: as many as there are
    library_rl_share: float = 0.25  # the time of reinforcement relative to pretraining
    demonstrations: int = 2000
    data: Path = Path("data")
    seed: int = 0  # of the first weights and of the composed functions

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.context

    @property
    def later_rows(self) -> int:
        """Rows of a step of fine-tuning and of preferences: there is less data than for pretraining, so its steps are
        smaller and more."""
        return min(self.rows, 16)

    @property
    def later_share(self) -> float:
        """The time of all later stages of training relative to pretraining."""
        return self.sft_share + self.dpo_share + self.rl_share

    @property
    def rl_share(self) -> float:
        """The time of reinforcement relative to pretraining. Functions of the library need much pretraining."""
        return self.library_rl_share if self.library else 1.3

    @property
    def sft_share(self) -> float:
        return self.sft_steps / self.pretrain_steps

    @property
    def dpo_share(self) -> float:
        return DPO_COST * self.dpo_steps / self.pretrain_steps

    def model(self) -> ModelConfig:
        heads = self.hidden_size // self.head_dim
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=self.head_dim,
            intermediate_size=self.hidden_size * 11 // 4,
            max_len=self.context,
            tie_embeddings=True,
        )

    def pretrain(self) -> Run:
        n = self.pretrain_steps
        return Run(
            model=self.model(),
            tokenizer=TokenizerConfig(vocab_size=self.vocab_size),
            data=DataConfig(context=self.context, rows=self.rows),
            eval_batches=self.validation_batches,
            train=TrainConfig(
                seed=self.seed,
                steps=n,
                eval_every=max(n // EVALUATED, 1),
                sample_every=max(n // 3, 1),
                save_every=max(n // 3, 1),
                optimizer=OptimizerConfig(kind="muon", lr=self.lr),
                schedule=ScheduleConfig(kind="wsd", warmup_steps=max(n // 20, 1), decay_share=COOLDOWN),
            ),
        )

    def sft(self, base: Path) -> Run:
        n = self.sft_steps
        sources = self._sources("sft", renamed=self.renamed)
        shares = MixConfig(weights={COMPOSED: 1.0, STDLIB: self.library_rows}) if self.library else MixConfig()
        return Run(
            objective=SupervisedFineTuning(),
            init_from=str(base),
            sources=sources,
            data=DataConfig(context=self.context, rows=self.later_rows, packing="whole", mix=shares),
            eval_batches=self.validation_batches,
            train=TrainConfig(
                seed=self.seed,
                steps=n,
                eval_every=max(n // EVALUATED, 1),
                save_every=n,
                optimizer=OptimizerConfig(kind="muon", lr=0.003 if self.library else self.lr),
                schedule=ScheduleConfig(kind="wsd", warmup_steps=max(n // 20, 1), decay_share=COOLDOWN),
            ),
        )

    def dpo(self, base: Path) -> Run:
        n = self.dpo_steps
        return Run(
            objective=PreferenceOptimization(reference="live"),  # a demo makes too few steps for a cache to pay
            init_from=str(base),
            sources=self._sources("dpo"),
            data=DataConfig(context=self.context, rows=self.later_rows),
            eval_batches=self.validation_batches,
            train=TrainConfig(
                seed=self.seed,
                steps=n,
                eval_every=max(n // EVALUATED, 1),
                save_every=n,
                optimizer=OptimizerConfig(kind="adamw", lr=1e-4),
                schedule=ScheduleConfig(kind="linear", warmup_steps=max(n // 10, 1)),
            ),
        )

    def grpo(self, base: Path) -> Run:
        n = self.rl_steps
        mix = MixConfig()
        if self.library and self.library_prompts is not None:
            mix = MixConfig(weights={COMPOSED: 1.0, STDLIB: self.library_prompts})
        return Run(
            objective=GroupRelative(
                reward="python", prompts=self.rl_prompts, samples=self.rl_samples, max_tokens=self.rl_tokens
            ),
            init_from=str(base),
            sources=self._sources("grpo"),
            data=DataConfig(context=self.context, rows=self.rows, mix=mix),
            eval_batches=1,
            train=TrainConfig(
                seed=self.seed,
                steps=n,
                sample_every=max(n // 3, 1),
                save_every=n,
                optimizer=OptimizerConfig(kind="adamw", lr=3e-4, weight_decay=0.0),
                schedule=ScheduleConfig(kind="constant", warmup_steps=1),
                stability=StabilityConfig(spike_threshold=None),  # a policy loss is near 0, and a spike means nothing
            ),
        )

    def _sources(self, stage: str, renamed: int = 0) -> dict[str, SourceConfig]:
        composed = {COMPOSED: SourceConfig(path=str(self.data / f"{stage}.jsonl"))}
        return {**composed, STDLIB: replace(self.functions(), renamed=renamed)} if self.library else composed

    def functions(self) -> SourceConfig:
        """The functions of the library that the later stages use."""
        return SourceConfig(max_bytes=self.function_bytes)


LARGE = Demo(
    name="large", hidden_size=256, num_layers=6, vocab_size=4096, context=256, rows=16, lr=0.007, pretrain_steps=300,
    sft_steps=140, renamed=7, dpo_steps=12, rl_steps=60, rl_prompts=16, rl_samples=8, rl_tokens=96, eval_items=128,
    write_items=48, tokenizer_mb=16, validation_batches=12, priming_bytes=None, enough_tokens=5_000_000,
    library_prompts=0.5, library_rl_share=0.5,
)  # fmt: skip
MEDIUM = replace(
    LARGE, name="medium", hidden_size=192, num_layers=4, rows=8, lr=0.01, pretrain_steps=600, sft_steps=400, renamed=3,
    dpo_steps=16, rl_steps=120, tokenizer_mb=8, priming_bytes=4_000_000, enough_tokens=2_500_000,
    library_prompts=0.1, library_rl_share=0.8,
)  # fmt: skip
# In 26 minutes on two x86 cores (AVX-512) the small size had 86 s for 96 steps of reinforcement, most of their
# prompts from the library, of which it writes nothing: 40 % of `compose` before them, 58 % after.
# For a slow CPU with a few minutes. Two layers were within 0.02 bits per byte of four after 75 steps; but after 160 of
# fine-tuning they wrote the right number of lines with the wrong verb in 101 of 160 functions, mostly another of the
# question: to find the next verb takes more layers and heads. Steps of pretraining, fine-tuning and reinforcement, and
# the share of `compose` that is right at the end, in about the same time on two x86 cores (seed 0): 260, 320, 55: 56 %;
# 200, 320, 90: 64 %; 160, 420, 55: 68 %; the first with a vocabulary of 2048 instead of 4096: 61 % in 0.88 of the time.
SMALL = replace(
    MEDIUM, name="small", hidden_size=128, num_layers=3, head_dim=32, vocab_size=2048, rows=4, pretrain_steps=1000,
    sft_steps=1600, renamed=1, dpo_steps=60, rl_steps=320, rl_prompts=8, rl_tokens=80, tokenizer_mb=4, eval_items=64,
    write_items=24, enough_tokens=40_960,
)  # fmt: skip
# For a CPU that is shared with other work: a sixth of `small`'s operations per token. It does not reach gzip.
TINY = replace(
    SMALL, name="tiny", hidden_size=64, vocab_size=1024, rows=2, rl_prompts=4, rl_samples=4, tokenizer_mb=1,
    eval_items=16, write_items=4, validation_batches=4, priming_bytes=1_000_000, enough_tokens=0,
)  # fmt: skip
CPU_SIZES = (LARGE, MEDIUM, SMALL, TINY)  # the largest first
# A step of 16384 tokens takes 6.6 ms on an H200 (docs/decisions/015), of which 2.6 ms are Muon, whose time does not
# depend on the number of tokens. 2,400 steps of 8192 are about 6 epochs of the library, and 860 of fine-tuning about 2
# of its functions and their copies.
GPU = replace(
    LARGE, rows=32, pretrain_steps=2400, sft_steps=860, dpo_steps=100, rl_steps=100, rl_prompts=32, write_items=128,
    library=True, library_rows=3.0, library_prompts=None, library_rl_share=0.25, demonstrations=4000,
)  # fmt: skip
QUICK = Demo(
    name="quick", hidden_size=64, num_layers=2, vocab_size=512, context=256, rows=4, lr=0.007, pretrain_steps=12,
    sft_steps=6, renamed=1, dpo_steps=2, rl_steps=2, rl_prompts=2, rl_samples=4, rl_tokens=24, eval_items=8,
    write_items=4, compose_items=8, tokenizer_mb=1, validation_batches=4, priming_bytes=1_000_000, function_bytes=80,
    library=True, demonstrations=100,
)  # fmt: skip
