"""A longer context by YaRN, by training on longer texts, or both: the loss past the training length.

short          trained at L tokens, read at 4 L
YaRN           the same weights, slow rotations interpolated
longer         the same weights, a tenth of the steps more at 4 L
YaRN, longer   both
trained        the first steps at 4 L already, with as many tokens
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from bagu.lab.core import Claim, Row, Setting, Verdict, share_met
from bagu.lab.model.positions.lengths import LONGER, ROWS, L, Text, config, losses
from bagu.lab.parts.against import against, dots, settled
from bagu.lab.parts.byte_models import rows_of, train_on_bytes
from bagu.lab.parts.more_steps import go_on
from bagu.lab.plot import Panel, Rule
from bagu.nn import Transformer
from bagu.nn.config import Rope, YarnScaling

MARGIN = 2.0  # percent of the loss: within it a model reads long texts as well as one that was trained on them
TENTH = 10
SHORT, YARN, TUNED, BOTH, TRAINED = "short", "YaRN", "longer", "YaRN, longer", "trained"


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    text = Text.read(every=16 if quick else 4, pieces=8 if quick else 250)
    seeds, steps = ((1, 2), 2) if quick else ((1, 2, 3, 4), 300)
    more = max(steps // TENTH, 1)
    long_rows = {seed: rows_of(LONGER * L, ROWS // LONGER, seed) for seed in seeds}
    models: dict[int, Transformer] = {}  # trained at L
    for seed, way in setting.track(list(product(seeds, (TRAINED, SHORT, YARN, TUNED, BOTH)))):
        if way == TRAINED:
            model = train_on_bytes(
                config(Rope()), text.train, long_rows[seed], steps=steps, seed=seed, device=setting.device
            )
        elif way == SHORT:
            short = rows_of(L, ROWS, seed)
            model = train_on_bytes(config(Rope()), text.train, short, steps=steps, seed=seed, device=setting.device)
            models[seed] = model
        else:
            model = scaled(models[seed]) if way in (YARN, BOTH) else copy.deepcopy(models[seed])
            if way in (TUNED, BOTH):
                go_on(model, text.train, long_rows[seed], steps=more, seed=seed + 100, lr=0.01)
        past = losses(model.eval(), text.pieces.to(setting.device))[:, L:]
        yield {
            "way": way,
            "seed": seed,
            "steps": steps,
            "parameters": sum(p.numel() for p in model.parameters()),
            "val_loss_nats": past.mean().item(),
        }


def scaled(model: Transformer) -> Transformer:
    """The same weights with YaRN."""
    scaling = YarnScaling(factor=LONGER, original_max_len=L)
    found = Transformer(replace(model.config, positions=Rope(scaling=scaling)), device=model.embedding.weight.device)
    found.load_state_dict(model.state_dict())
    return found


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if YaRN is within the margin of training at the length both with no further step and with a few."""
    found = against(rows, TRAINED, by="way")
    said = Verdict.say(
        share_met(found[way].high <= MARGIN for way in (YARN, BOTH)),
        "Loss past {length} tokens, against a model trained at {longer}: short {short}, YaRN {yarn}; with a tenth of "
        "the steps more at {longer} tokens: without YaRN {tuned}, with it {both}.",
        "超过 {length} token 处的损失，与以 {longer} 训练的模型相比：短 {short}，YaRN {yarn}；再以 {longer} token "
        "训练十分之一的步数：不用 YaRN {tuned}，用 YaRN {both}。",
        length=L,
        longer=L * LONGER,
        short=found[SHORT],
        yarn=found[YARN],
        tuned=found[TUNED],
        both=found[BOTH],
    )
    return settled(said, [(found[way], MARGIN) for way in (YARN, BOTH)])


def plot(rows: Sequence[Row]) -> list[Panel]:
    found = {way: p for way, p in against(rows, TRAINED, by="way").items() if way != TRAINED}
    title, y = f"Loss at {L} to {LONGER * L} tokens", "above a model trained at the length, %"
    return [Panel([Rule(0, style="-"), Rule(MARGIN), dots(found)], title, y=y, xnames=list(found))]


LAB = Claim(
    title_en="YaRN or longer training",
    title_zh="YaRN 还是更长的训练",
    claim_en="With YaRN a model reads texts four times as long as those it was trained on, as well as one that was "
    "trained on long ones.",
    claim_zh="用 YaRN，模型读四倍于训练长度的文本，效果与用长文本训练的模型一样。",
    regime=f"A model of 2 layers, width 64, with RoPE, on the bytes of the standard library; {L} and {LONGER * L} "
    "tokens; equal tokens a step; held-out modules; 4 seeds.",
    varies="Read as it is, with YaRN, after a tenth of the steps at the longer length, both; or trained there from the "
    "first step.",
    measures=f"The loss of tokens past the short length, per seed relative to the model that was trained at the long "
    f"one; up to {MARGIN:g} % more counts as the same.",
    evidence="training",
    published_en="Llama 2 reads up to 128k tokens with YaRN after fine-tuning, with 10 times fewer tokens than methods "
    "before it needed (Peng et al. 2023, arXiv:2309.00071).",
    published_zh="Llama 2 用 YaRN 微调后可读至多 128k token，所需 token 是此前方法的十分之一（Peng 等，2023，"
    "arXiv:2309.00071）。",
)
