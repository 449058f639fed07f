"""Recipes: functions that return the configuration of a whole run. `--set` changes single values of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bagu.data.corpus import STDLIB, SourceConfig
from bagu.data.loader import DataConfig
from bagu.errors import BaguError, UnknownName
from bagu.nn.config import Rope
from bagu.nn.presets import preset
from bagu.recipes.run import LoraConfig, Run, TokenizerConfig
from bagu.train import OptimizerConfig, ScheduleConfig, StabilityConfig, TrainConfig
from bagu.train.objectives.contrastive import Contrastive
from bagu.train.objectives.distill import Distillation
from bagu.train.objectives.masked import MaskedLanguageModelling
from bagu.train.objectives.on_policy_distill import OnPolicyDistillation
from bagu.train.objectives.sft import SupervisedFineTuning
from bagu.train.preference.dpo import PreferenceOptimization
from bagu.train.preference.reward import RewardModelling
from bagu.train.rl.grpo import GroupRelative
from bagu.train.rl.ppo import ProximalPolicy


def small() -> Run:
    """5.9M parameters, trained on a few megabytes of text in minutes on two CPU cores."""
    return Run(
        model=preset("cpu_6m"),
        tokenizer=TokenizerConfig(vocab_size=4096),
        data=DataConfig(context=256, rows=16),
        train=TrainConfig(
            steps=600,
            eval_every=100,
            sample_every=200,
            save_every=100,
            optimizer=OptimizerConfig(kind="muon", lr=0.007),
            schedule=ScheduleConfig(kind="wsd", warmup_steps=30, decay_share=0.5),
        ),
    )


def reader() -> Run:
    """0.5M parameters, new, that find a value in a passage, on chats of `bagu data facts`. The first layer sees
    six tokens: name, attribute, value; the second the number of their passage, at most 32 tokens before. The third
    compares them over hundreds of tokens, by the features of a head that do not turn: where all 32 turn, most runs
    never match the name (journal 019). The gradient norm rises when copying begins, so that no step is refused."""
    return Run(
        objective=SupervisedFineTuning(new_weights=True), sources={"chats": SourceConfig()},
        model=replace(
            preset("cpu_1m"), vocab_size=1728, hidden_size=96, num_layers=3, num_heads=3, num_kv_heads=3, head_dim=32,
            intermediate_size=256, positions=Rope(base=500.0, dim=8), qk_norm=True, windows=(6, 32, None),
        ),
        tokenizer=TokenizerConfig(vocab_size=1728), data=DataConfig(context=512, rows=4, packing="whole"),
        train=TrainConfig(
            steps=3000, eval_every=500, save_every=500, optimizer=OptimizerConfig(kind="muon", lr=0.003),
            schedule=ScheduleConfig(kind="wsd", warmup_steps=50, decay_share=0.5),
            stability=StabilityConfig(spike_threshold=None),
        ),
    )  # fmt: skip


def gpt2_124m() -> Run:
    """GPT-2 small, for one GPU: 0.5M tokens a step."""
    return Run(
        model=preset("gpt2_124m"),
        tokenizer=TokenizerConfig(vocab_size=32768),
        data=DataConfig(context=1024, rows=32, micro_batches=16),
        train=TrainConfig(
            steps=10_000,
            eval_every=250,
            sample_every=1000,
            save_every=500,
            optimizer=OptimizerConfig(kind="adamw", lr=6e-4),
            schedule=ScheduleConfig(kind="cosine", warmup_steps=500, final=0.1),
        ),
    )


def llama_1b() -> Run:
    """TinyLlama's 1.1B, for one GPU of 80 GB or more: 0.5M tokens a step."""
    return Run(
        model=preset("llama_1b"),
        tokenizer=TokenizerConfig(vocab_size=32000),
        data=DataConfig(context=2048, rows=8, micro_batches=32),
        train=TrainConfig(
            steps=20_000,
            eval_every=500,
            sample_every=2000,
            save_every=500,
            optimizer=OptimizerConfig(kind="adamw", lr=4e-4),
            schedule=ScheduleConfig(kind="cosine", warmup_steps=1000, final=0.1),
        ),
    )


def mlm() -> Run:
    """A small BERT, 5.9M parameters, for masked language modelling.

    On the standard library, two CPU cores, about six minutes: 5.96 nats per masked position of held-out files, where
    token frequencies alone give 6.91. A step has 614 targets in 4096 tokens, so good predictions need more steps.
    """
    return Run(
        objective=MaskedLanguageModelling(mask_rate=0.15),
        model=preset("bert_6m"),
        tokenizer=TokenizerConfig(vocab_size=4096),
        data=DataConfig(context=256, rows=16),
        train=TrainConfig(
            steps=600,
            eval_every=100,
            save_every=100,
            # mean loss of steps 101 to 120: 6.28 nats, against 6.59 with AdamW at 1e-3 (linear, 60 steps of warm-up)
            optimizer=OptimizerConfig(kind="muon", lr=0.003),
            schedule=ScheduleConfig(kind="wsd", warmup_steps=30, decay_share=0.5),
        ),
    )


def contrastive() -> Run:
    """An embedder from the model given with `--from`, on pairs of query and passage; by default docstrings and
    functions of the standard library."""
    return Run(
        objective=Contrastive(),
        init_from="",
        sources={"pairs": SourceConfig()},
        data=DataConfig(context=128, rows=64, packing="whole"),
        train=TrainConfig(
            steps=200,
            eval_every=50,
            save_every=100,
            optimizer=OptimizerConfig(kind="adamw", lr=5e-4),
            schedule=ScheduleConfig(kind="linear", warmup_steps=10),
        ),
    )


def sft() -> Run:
    """Fine-tuning of the model given with `--from`, on chats: only the assistant's tokens are targets."""
    return Run(
        objective=SupervisedFineTuning(),
        init_from="",
        sources={"chats": SourceConfig()},
        data=DataConfig(context=256, rows=16, packing="whole"),
        train=TrainConfig(
            steps=200,
            eval_every=50,
            save_every=100,
            optimizer=OptimizerConfig(kind="adamw", lr=1e-4),
            schedule=ScheduleConfig(kind="linear", warmup_steps=10),
        ),
    )


def lora() -> Run:
    """`sft` with LoRA adapters of rank 8 instead of the weights, which makes the optimizer's state small."""
    run = sft()
    optimizer = OptimizerConfig(kind="adamw", lr=1e-3, weight_decay=0.0)
    return replace(run, lora=LoraConfig(), train=replace(run.train, optimizer=optimizer))


def distill() -> Run:
    """Distillation of the model `objective.teacher` into the model given with `--from`, on texts. Both must have the
    same vocabulary.
    """
    return Run(
        objective=Distillation(),
        init_from="",
        data=DataConfig(context=256, rows=16),
        train=TrainConfig(
            steps=200,
            eval_every=50,
            save_every=100,
            optimizer=OptimizerConfig(kind="adamw", lr=3e-4),
            schedule=ScheduleConfig(kind="linear", warmup_steps=10),
        ),
    )


def on_policy_distill() -> Run:
    """Distillation of the model `objective.teacher` into the model given with `--from`, on the answers that this model
    gives: 32 a step. Prompts are functions of the standard library, or JSON with a field `prompt`.
    """
    return Run(
        objective=OnPolicyDistillation(max_tokens=96),
        init_from="",
        sources={"prompts": SourceConfig()},
        data=DataConfig(context=256, rows=16),
        train=TrainConfig(
            steps=100,
            eval_every=25,
            sample_every=25,
            save_every=25,
            optimizer=OptimizerConfig(kind="adamw", lr=1e-4),
            schedule=ScheduleConfig(kind="linear", warmup_steps=5),
        ),
    )


def reward() -> Run:
    """A reward model from the model given with `--from`, on pairs of answers; by default functions of the standard
    library against broken ones.
    """
    return Run(
        objective=RewardModelling(),
        init_from="",
        sources={"pairs": SourceConfig()},
        data=DataConfig(context=256, rows=16),
        train=TrainConfig(
            steps=200,
            eval_every=50,
            save_every=100,
            optimizer=OptimizerConfig(kind="adamw", lr=1e-4),
            schedule=ScheduleConfig(kind="linear", warmup_steps=10),
        ),
    )


def dpo() -> Run:
    """Direct preference optimization of the model given with `--from`, on pairs of answers; by default functions of the
    standard library against broken ones. The learning rate is a tenth of fine-tuning's: the loss has no minimum, it
    falls as long as the margin of a pair grows.
    """
    run = reward()
    return replace(
        run,
        objective=PreferenceOptimization(),
        train=replace(run.train, optimizer=OptimizerConfig(kind="adamw", lr=1e-5)),
    )


def grpo() -> Run:
    """GRPO on the model given with `--from`, for the reward given with `--reward`: 16 prompts, 8 answers each, a step.

    Prompts are functions of the standard library, or JSON with a field `prompt`. The loss is that of DAPO: every token
    counts the same, and the ratio is clipped higher than low.
    """
    return Run(
        objective=GroupRelative(prompts=16, samples=8, max_tokens=96, clip_high=0.28),
        init_from="",
        sources={"prompts": SourceConfig()},
        data=DataConfig(context=256, rows=16),
        train=_rollout_training(),
    )


def ppo() -> Run:
    """PPO on the model given with `--from`, for the reward given with `--reward`: 64 prompts with an answer each, in
    two passes of two steps.

    The critic starts from the reward if that is a model, else from the policy.
    """
    return Run(
        objective=ProximalPolicy(prompts=64, max_tokens=96, epochs=2, minibatches=2),
        init_from="",
        sources={"prompts": SourceConfig()},
        data=DataConfig(context=256, rows=16),
        train=_rollout_training(),
    )


def _rollout_training() -> TrainConfig:
    return TrainConfig(
        steps=100,
        eval_every=25,
        sample_every=25,
        save_every=25,
        optimizer=OptimizerConfig(kind="adamw", lr=1e-5, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant", warmup_steps=5),
        # a policy loss is near 0 and scatters with the rewards: a spike of it means nothing
        stability=StabilityConfig(spike_threshold=None),
    )


RECIPES: dict[str, Callable[[], Run]] = {
    f.__name__: f
    for f in (
        small,
        reader,
        gpt2_124m,
        llama_1b,
        mlm,
        contrastive,
        sft,
        lora,
        distill,
        on_policy_distill,
        reward,
        dpo,
        grpo,
        ppo,
    )
}


def recipe(name: str) -> Run:
    UnknownName.check("recipe", name, RECIPES)
    return RECIPES[name]()


def with_data(run: Run, paths: Sequence[str]) -> Run:
    """The run with these files or folders instead of its own sources; each is a source with the name of its file."""
    if not paths:
        return run
    names = [STDLIB if p == STDLIB else _source_name(p) for p in paths]
    if len(set(names)) < len(names):
        raise BaguError(f"two sources would both be called {max(names, key=names.count)!r}", hint="rename one file")
    return replace(run, sources={n: SourceConfig(path=p) for n, p in zip(names, paths, strict=True)})


def _source_name(path: str) -> str:
    """The name of a file or folder without its endings. A dot would divide the name in `--set sources.NAME.field`."""
    place = Path(path)
    name = place.resolve().name if place.name in ("", "..") else place.name  # "." has the name ""
    return Path(name.removesuffix(".gz")).stem.replace(".", "_")


def with_start(run: Run, start: str | None) -> Run:
    """The run starting from the model `start`, if one is given; raises if the recipe needs one and none is given."""
    if start is not None:
        return replace(run, init_from=start, model=None, tokenizer=TokenizerConfig())
    if run.init_from == "":
        raise BaguError(f"objective {run.objective.kind!r} needs a model to start from", hint="give one with --from")
    return run
