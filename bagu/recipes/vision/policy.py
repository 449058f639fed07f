"""GRPO (https://arxiv.org/abs/2402.03300) on questions about scenes: the engine that serves a model samples its
answers, and an exact answer is rewarded with 1.

A batch is made when it is due, from the weights of that step: questions by the step's generator, some answers to each,
and their advantages: the reward minus the mean of the question's answers, in deviations. Every batch is used for one
update, so the sampling policy is the updated one and no ratio is clipped. Questions whose answers are all right or all
wrong say nothing, and are left out.
"""

from __future__ import annotations

import torch

from bagu.data.pictures.glyphs import Language
from bagu.data.pictures.scenes import draw_scenes, paint_scenes
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.vision.vlm import VLM
from bagu.recipes.vision.batches import Make, prompt_of
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.images.prompt import PromptImage
from bagu.serve.request import Request, Sampling, TokenEvent
from bagu.train.objectives.vision_losses import PictureBatch, packed_texts
from bagu.types import IGNORE

LONGEST = 12  # tokens of an answer; names have up to 8
LANGUAGES: tuple[Language, ...] = ("en", "zh")


def rollout_batches(model: VLM, tokenizer: BpeTokenizer, rows: int, samples: int) -> Make:
    """Batches of `rows` questions with `samples` answers each, drawn from the weights that `model` then has."""
    engine = Engine(model, tokenizer, EngineConfig(max_num_seqs=rows * samples, prefix_cache=False))
    assert engine.images is not None
    spec, end = engine.images.spec, tokenizer.token_id("<|end|>")

    def make(stream: torch.Generator) -> PictureBatch:
        engine.weights_changed()
        scenes = draw_scenes(rows, stream, least=2)
        pictures = paint_scenes(scenes, stream).pictures
        prompts, wanted = [], []
        for number, scene in enumerate(scenes):
            dice = torch.randint(2**31, (2,), generator=stream).tolist()
            found = scene.questions(LANGUAGES[dice[0] % 2])
            question = found[dice[1] % len(found)]
            prompt = prompt_of(tokenizer, spec.tokens, question.ask)
            pixels = pictures[number].permute(1, 2, 0).contiguous().numpy().tobytes()
            sampling = Sampling(
                max_tokens=LONGEST, n=samples, seed=dice[0], stop_token_ids=(end,), temperature=1.0, ignore_eos=True
            )
            image = PromptImage.of(prompt.index(spec.token), pixels, spec)
            engine.submit(Request(id=str(number), prompt=tuple(prompt), images=(image,), sampling=sampling))
            prompts.append(prompt)
            wanted.append([*tokenizer.encode(question.answer), end])
        answers = _answers(engine, rows, samples)
        return rewarded_batch(pictures, prompts, answers, wanted)

    return make


def _answers(engine: Engine, rows: int, samples: int) -> list[list[list[int]]]:
    found: list[list[list[int]]] = [[[] for _ in range(samples)] for _ in range(rows)]
    with torch.no_grad():
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenEvent) and event.token is not None:
                    found[int(event.request_id)][event.index].append(event.token)
    return found


def rewarded_batch(
    pictures: torch.Tensor, prompts: list[list[int]], answers: list[list[list[int]]], wanted: list[list[int]]
) -> PictureBatch:
    rewards = torch.tensor([[float(a == w) for a in group] for group, w in zip(answers, wanted, strict=True)])
    spread = rewards.std(1, correction=0)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / spread.clamp(min=1e-6).unsqueeze(1)
    informative = torch.nonzero(spread > 0).squeeze(1).tolist() or [0]
    texts, targets, weights, owners = [], [], [], []
    for i in informative:
        for answer, advantage in zip(answers[i], advantages[i].tolist(), strict=True):
            texts.append([*prompts[i], *answer[:-1]])
            targets += [IGNORE] * (len(prompts[i]) - 1) + answer
            weights += [advantage] * len(answer)
            owners.append(i)
    learned = torch.tensor(targets)
    return PictureBatch(
        images=pictures[owners],
        targets=learned,
        num_targets=len(weights),
        weights=torch.tensor(weights),
        reward=float(rewards.mean()),
        **packed_texts(texts),
    )
