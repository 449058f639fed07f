"""Random small Python functions, and a policy that writes them: reinforcement learning on code in seconds.

    # merge
    def merge(a, n):
        y = a + n
        return y

The comment is the prompt. Two thirds of the functions pass the strict checks of the reward `python`: the others leave
an argument unread or have one statement.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bagu.data import BpeTokenizer, DataConfig, Document, Loader, Prompt, in_memory, tokenize
from bagu.lab.parts.tiny import tiny
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.recipes.rollout import EngineSampler, engine_config
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, fit
from bagu.train.rl.loader import PromptLoader, RolloutConfig, RolloutLoader
from bagu.train.rl.policy_loss import PolicyLoss
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.rl.reward_function import RewardFunction
from bagu.train.rl.rollout import PackShape

NAMES = ("add", "bound", "clean", "count", "merge", "order", "scale", "split")
ARGUMENTS, LOCALS, OPERATORS = ("a", "b", "n", "x"), ("y", "z", "out", "total"), ("+", "-", "*", "//", "%")
VOCAB, CONTEXT, ROWS, WIDTH = 384, 96, 16, 64
STEP_TOKENS = CONTEXT * ROWS
ANSWER_TOKENS = 56


def prompt_text(name: str) -> str:
    return f"# {name}\n"


def function_text(name: str, draw: random.Random) -> str:
    """A function of one or two arguments with one to four statements."""
    arguments = draw.sample(ARGUMENTS, draw.choice((1, 2)))
    known, lines = list(arguments), []
    for _ in range(draw.randrange(4)):
        left, right = draw.choice(known), draw.choice([*known, str(draw.randrange(10))])
        lines.append(f"    {draw.choice(LOCALS)} = {left} {draw.choice(OPERATORS)} {right}")
        known.append(lines[-1].split()[0])
    lines.append(f"    return {draw.choice(known)} {draw.choice(OPERATORS)} {draw.choice(known)}")
    return "\n".join([f"def {name}({', '.join(arguments)}):", *lines]) + "\n"


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A model that was trained on such functions, and its tokenizer."""

    model: Transformer
    tokenizer: BpeTokenizer

    def prompts(self) -> list[Prompt]:
        """One for each name."""
        texts = {name: prompt_text(name) for name in NAMES}
        return [
            Prompt(id=name, ids=tuple(self.tokenizer.encode_prompt(text)), text=text, facts={"name": name})
            for name, text in texts.items()
        ]

    def rollouts(
        self, objective: PolicyObjective, loss: PolicyLoss, reward: RewardFunction, *, seed: int
    ) -> RolloutLoader:
        o, prompts = objective, self.prompts()
        answers = o.prompts * o.samples
        source = PromptLoader(
            sources={"functions": prompts},
            held_out_prompts=prompts,
            config=RolloutConfig(
                prompts=o.prompts,
                samples=o.samples,
                max_tokens=o.max_tokens,
                epochs=o.epochs,
                minibatches=o.minibatches,
                max_draws=o.max_draws,
                fill=o.fills,
                seed=seed,
            ),
            shape=PackShape(tokens=16 * CONTEXT, segments=answers, context=CONTEXT),
        )
        return RolloutLoader(
            source,
            model=self.model,
            sampler=self._sampler(answers),
            reward=reward,
            learner=loss,
            decode=self.tokenizer.decode,
        )

    def answers(self, each: int) -> list[tuple[Prompt, str]]:
        """`each` sampled answers to every prompt, at temperature 1."""
        prompts = self.prompts()
        found = self._sampler(each * len(prompts)).sample(
            [prompt.ids for prompt in prompts], n=each, max_tokens=ANSWER_TOKENS, seeds=range(len(prompts))
        )
        return [(prompts[c.prompt], c.text or "") for c in found]

    def _sampler(self, answers: int) -> EngineSampler:
        config = engine_config(answers=answers, max_len=CONTEXT, invariant=False)
        return EngineSampler(self.model, self.tokenizer, config)


def new_writer(*, steps: int, seed: int, device: str) -> Writer:
    """Train a writer on random functions for `steps` steps."""
    documents = _documents(steps * STEP_TOKENS // 24)  # a function has at least 24 tokens: few come twice
    tokenizer = BpeTokenizer.train((d.text for d in documents[:400]), vocab_size=VOCAB)
    model = init_weights(Transformer(_config(tokenizer.vocab_size), device=device), seed)
    loader = Loader(
        {"functions": in_memory(tokenize(documents, tokenizer), token_bytes=tokenizer.token_bytes)},
        DataConfig(context=CONTEXT, rows=ROWS, seed=seed, packing="whole"),
    )
    config = TrainConfig(
        steps=steps,
        seed=seed,
        optimizer=OptimizerConfig(kind="muon", lr=0.02),
        schedule=ScheduleConfig(kind="linear", warmup_steps=max(steps // 10, 1)),
    )
    if fit(config, model, loader).interrupted:  # Ctrl-C ends the lab, not only this training
        raise KeyboardInterrupt
    return Writer(model=model, tokenizer=tokenizer)


def _documents(count: int) -> Sequence[Document]:
    draw = random.Random(0)
    names = [draw.choice(NAMES) for _ in range(max(count, 400))]
    return [Document(id=str(i), text=prompt_text(n) + function_text(n, draw)) for i, n in enumerate(names)]


def _config(vocab_size: int) -> ModelConfig:
    return tiny(vocab_size, WIDTH, heads=2, ffn=3 * WIDTH, max_len=CONTEXT, tie_embeddings=True)
