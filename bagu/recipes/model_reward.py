"""A trained reward model as a reward: the score of the last token of each answer, many answers in a packed forward."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from bagu.data.preference_rows import Preference
from bagu.data.preferences import PreferenceEncoder
from bagu.data.sequences import Tokens, micro_batches, pack
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.machine.hub import find
from bagu.recipes.find import find_model
from bagu.recipes.models import load_model, tokenizer_folder
from bagu.runs.files import RunFiles
from bagu.train.rl.reward_function import Sample, Scored

TOKENS = 8192  # of a forward


class ModelReward:
    """The model in `folder` must have a score head (objective `reward`). An answer that the model has no room for has
    the reward `default`."""

    def __init__(self, folder: str, *, default: float = 0.0, device: torch.device | str = "cpu") -> None:
        self.model = load_model(folder, device=device)
        if self.model.score is None:
            raise BaguError(
                f"the model at {folder} has no score head, and a reward needs one",
                hint="train one: bagu train --recipe reward --from MODEL",
            )
        words = tokenizer_folder(find_model(folder))
        if words is None:
            raise BaguError(f"the reward model at {folder} has no tokenizer", hint="put its tokenizer.json there")
        self.tokenizer = BpeTokenizer.load(words)
        self._encoder = PreferenceEncoder(self.tokenizer, text=_reads_plain_text(folder, self.tokenizer))
        self._folder, self.default = folder, default
        self._capacity = max(TOKENS, self.model.config.max_len)

    @property
    def name(self) -> str:
        return Path(self._folder).name

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        most = self.model.config.max_len
        sequences = [self._tokens(sample) for sample in samples]
        fits = [i for i, tokens in enumerate(sequences) if len(tokens.ids) <= most]
        scores: dict[int, float] = {}
        for chosen in micro_batches([len(sequences[i].ids) for i in fits], capacity=self._capacity):
            indices = [fits[i] for i in chosen]
            scores |= zip(indices, self._scores([sequences[i] for i in indices]), strict=True)
        return [self._scored(scores.get(i), len(tokens.ids)) for i, tokens in enumerate(sequences)]

    def close(self) -> None:
        """Nothing is open; the weights are freed with this object."""

    @torch.no_grad()
    def _scores(self, sequences: Sequence[Tokens]) -> list[float]:
        device = self.model.embedding.weight.device
        batch = pack(
            sequences,
            tokens=sum(len(s.ids) for s in sequences),
            max_segments=len(sequences),
            context=self.model.config.max_len,
        ).to(device)
        hidden = self.model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len).hidden
        last = batch.cu_seqlens[1 : len(sequences) + 1].long() - 1
        assert self.model.score is not None
        return self.model.score(hidden[last]).tolist()

    def _tokens(self, sample: Sample) -> Tokens:
        """Encoded as in training: the chat of the prompt, and the answer with the token that ends the turn."""
        prompt = sample.messages or [{"role": "user", "content": sample.prompt}]
        answer = {"role": "assistant", "content": sample.completion}
        pair = Preference(
            id="",
            place="a sampled answer",
            prompt=tuple(prompt),
            chosen=answer,
            rejected=None,
            strings=len(prompt) == 1,
        )
        (document,) = self._encoder.documents(pair)
        assert document.mask is not None
        return Tokens(ids=tuple(document.tokens), start=list(document.mask).index(1))

    def _scored(self, score: float | None, length: int) -> Scored:
        if score is None:
            fault = f"has {length} tokens with its prompt, and the reward model takes {self.model.config.max_len}"
            return Scored(reward=self.default, fault=fault)
        if not math.isfinite(score):
            return Scored(reward=self.default, fault=f"was scored {score}")
        return Scored(reward=score)


def _reads_plain_text(folder: str, tokenizer: BpeTokenizer) -> bool:
    """Whether the model was trained on plain text (objective.text): a run says so, other models read chats if they have
    a template."""
    run = RunFiles(find(folder))
    if run.environment_path.is_file():
        return bool(run.config().get("objective", {}).get("text", False))
    return tokenizer.chat_template is None
