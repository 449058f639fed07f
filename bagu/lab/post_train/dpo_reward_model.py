"""DPO and the reward model: does DPO's implicit reward rank answers as a trained reward model does?

    reward model      a score head, trained by Bradley-Terry on pairs of answers
    implicit reward   log p(answer) of the policy after DPO minus that of its reference, trained on the same pairs

DPO's derivation says that both fit the same preferences; it says nothing of answers they were not trained on. A pair is
a function of the standard library and the same function with one thing broken. Both start from one language model and
see the same pairs in the same order. Each is trained in three orders: two reward models do not agree on every pair
either, and their agreement is what the agreement of DPO with a reward model is compared with.
"""

import copy
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bagu.data import DataConfig, Document, in_memory
from bagu.data.broken_code import broken
from bagu.data.preference_batch import PreferenceBatch, batches_of
from bagu.data.preference_loader import PreferenceLoader
from bagu.data.preference_rows import Preference
from bagu.data.preference_set import PreferenceSet
from bagu.data.preferences import PreferenceEncoder
from bagu.data.stdlib import documented_functions
from bagu.eval.intervals import compare, estimate
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, number
from bagu.lab.parts.confidence import known
from bagu.lab.parts.library_models import STEP_TOKENS, Library, new_model, read_library, sized, train
from bagu.lab.plot import Bars, Mark, Panel, Rule
from bagu.nn import Transformer
from bagu.nn.score import with_score_head
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, fit
from bagu.train.preference.dpo import PreferenceOptimization
from bagu.train.preference.reward import RewardModelling, answer_scores
from bagu.train.rl.logprobs import segment_sums, token_logprobs

KINDS = {  # of broken_code.py
    "syntax": ("drop_bracket", "shift_line"),
    "missing": ("drop_statement", "cut_end"),
    "changed": ("swap_names", "change_operator", "change_constant"),
    "other body": ("other_body",),
}
GROUP = {kind: group for group, kinds in KINDS.items() for kind in kinds}
WIDTH, BASE_STEPS, STEPS = 64, 600, 160
CONTEXT, ROWS = 256, 8  # of a step of preferences: about twelve pairs
BYTES, HELD_PAIRS = 300, 800
RATES = {"reward": 1e-3, "dpo": 3e-4}
ORDERS = (1, 2, 3)
MARGIN = 5.0  # points: DPO ranks as a reward model does if it agrees with one at most this much less than another does


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of a real and a broken function, as tokens; the group and file of each that fits."""

    data: PreferenceSet
    groups: list[str]
    files: list[str]

    def batches(self, config: DataConfig) -> Iterator[PreferenceBatch]:
        """All pairs in their order, so few at a time that the longest fit."""
        each = config.rows // 2
        for first in range(0, len(self.data.units), each):
            units = np.arange(first, min(first + each, len(self.data.units)))
            yield from batches_of([(self.data, units)], config)


def pairs(documents: Iterable[Document], library: Library, config: DataConfig, most: int | None = None) -> Pairs:
    """A pair of each function, at most `most`, in the order of the files."""
    encoder, kinds, tokens = PreferenceEncoder(library.tokenizer, text=True), {}, []
    made = itertools.islice(_preferences(documents), most)
    for preference, kind in made:
        kinds[preference.id] = kind
        tokens += list(encoder.documents(preference))
    data = PreferenceSet.of(
        "functions", in_memory(tokens, token_bytes=library.tokenizer.token_bytes), config, paired=True
    )
    ids = [data.store.document_id(int(first))[:-1] for first, _ in data.units]
    return Pairs(data=data, groups=[GROUP[kinds[id]] for id in ids], files=[id.split(":")[0] for id in ids])


def _preferences(documents: Iterable[Document]) -> Iterator[tuple[Preference, str]]:
    others: list[str] = []
    for function in documented_functions(documents, max_bytes=BYTES):
        worse = broken(function.answer, others=others[-4:])
        others.append(function.answer)
        if worse is not None:
            yield Preference(
                id=function.id, place=function.id, prompt=({"role": "user", "content": function.question + "\n"},),
                chosen={"role": "assistant", "content": function.answer},
                rejected={"role": "assistant", "content": worse.code}, strings=True,
            ), worse.kind  # fmt: skip


def run(setting: Setting) -> list[Row]:
    library, quick = read_library(quick=setting.quick), setting.quick
    config = DataConfig(context=CONTEXT, rows=ROWS)
    base = new_model(width=WIDTH, seed=1, device=setting.device)
    train(base, library.train_tokens, steps=2 if quick else BASE_STEPS, seed=1)
    steps = 2 if quick else STEPS
    taught = pairs(library.train, library, config, 24 if quick else None)
    asked = pairs(library.held, library, config, 12 if quick else HELD_PAIRS)
    margins: dict[tuple[str, int], list[float]] = {}
    for kind, order in setting.track(list(itertools.product(RATES, ORDERS))):
        data = DataConfig(context=CONTEXT, rows=ROWS, seed=order)
        margins[kind, order] = learned_margins(kind, base, taught, asked, data, steps)
    rows = [row(margins, asked, group) for group in ("all", *KINDS) if group == "all" or group in asked.groups]
    return sized(rows, base, steps)


def learned_margins(
    kind: str, base: Transformer, taught: Pairs, asked: Pairs, config: DataConfig, steps: int
) -> list[float]:
    """Train a copy of `base` on the pairs; how much more it gives the real than the broken function of each held-out
    pair."""
    model = copy.deepcopy(base)
    device = model.embedding.weight.device
    objective: RewardModelling | PreferenceOptimization
    if kind == "reward":
        objective, model = RewardModelling(), with_score_head(model)
    else:
        objective = PreferenceOptimization(reference="live")
    settings = TrainConfig(
        steps=steps,
        optimizer=OptimizerConfig(lr=RATES[kind], weight_decay=0.0),
        schedule=ScheduleConfig(kind="linear", warmup_steps=max(steps // 10, 1)),
    )
    loader = PreferenceLoader({"functions": taught.data}, config)
    if fit(settings, model, loader, loss=objective.loss(model)).interrupted:
        raise KeyboardInterrupt
    model.eval()
    found: list[float] = []
    with torch.no_grad():
        for batch in asked.batches(config):
            here = batch.to(device)
            scores = answer_scores(model, here)[1] if kind == "reward" else logprob(model, here) - logprob(base, here)
            found += (scores[0::2] - scores[1::2]).tolist()
    return found


def logprob(model: Transformer, batch: PreferenceBatch) -> torch.Tensor:
    """log p of each answer."""
    return segment_sums(token_logprobs(model, batch.batch)[0], batch.batch.cu_seqlens, batch.num_sequences)


def row(margins: dict[tuple[str, int], list[float]], asked: Pairs, group: str) -> Row:
    """Accuracy of both and the agreements, in percent of the pairs of a group."""
    own = [i for i, g in enumerate(asked.groups) if group in ("all", g)]
    files = [asked.files[i] for i in own]
    ranks = {key: [values[i] > 0 for i in own] for key, values in margins.items()}
    models = [ranks["reward", order] for order in ORDERS]
    between = [statistics.fmean(a[i] == b[i] for a, b in itertools.combinations(models, 2)) for i in range(len(own))]
    across = [
        statistics.fmean(ranks["dpo", o][i] == ranks["reward", p][i] for o, p in itertools.product(ORDERS, ORDERS))
        for i in range(len(own))
    ]
    accuracy = {
        kind: known(estimate([statistics.fmean(ranks[kind, o][i] for o in ORDERS) for i in range(len(own))], files))
        for kind in RATES
    }
    less = known(compare(between, across, files))
    return {
        "group": group,
        "seeds": len(ORDERS),
        "pairs": len(own),
        "files": less.clusters,
        **{
            f"{kind}_{name}_percent": 100 * getattr(found, part)
            for kind, found in accuracy.items()
            for name, part in (("accuracy", "mean"), ("low", "low"), ("high", "high"))
        },
        "two_reward_models_agree_percent": 100 * statistics.fmean(between),
        "dpo_agrees_percent": 100 * statistics.fmean(across),
        "difference_points": 100 * less.difference,
        "difference_low_points": 100 * less.low,
        "difference_high_points": 100 * less.high,
    }


def same(r: Row) -> bool:
    """Whether DPO agrees with a reward model as two reward models do: the interval of the difference is above -MARGIN,
    and the reward models have learned to rank this group at all."""
    return number(r, "difference_low_points") > -MARGIN and number(r, "reward_low_percent") > 50


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if they agree in every group of broken functions that the reward models rank better than chance."""
    groups = [r for r in rows if r["group"] != "all"]
    able = [r for r in groups if number(r, "reward_low_percent") > 50]
    found = [same(r) for r in able]
    kind: Kind = "held" if able and all(found) else "holds only where" if any(found) else "did not hold"
    names = {"all": "全部", "syntax": "语法错误", "missing": "缺语句", "changed": "改动", "other body": "别的函数体"}
    en = [
        f"{r['group']}: reward models right on {number(r, 'reward_accuracy_percent'):.0f} %, DPO on "
        f"{number(r, 'dpo_accuracy_percent'):.0f} %; two reward models agree on "
        f"{number(r, 'two_reward_models_agree_percent'):.0f} %, DPO with them on "
        f"{number(r, 'dpo_agrees_percent'):.0f} % ({difference(r)} points)"
        for r in rows
    ]
    zh = [
        f"{names[str(r['group'])]}：奖励模型答对 {number(r, 'reward_accuracy_percent'):.0f} %，DPO "
        f"{number(r, 'dpo_accuracy_percent'):.0f} %；两个奖励模型一致 "
        f"{number(r, 'two_reward_models_agree_percent'):.0f} %，DPO 与其一致 {number(r, 'dpo_agrees_percent'):.0f} %"
        f"（{difference(r).replace(' to ', ' 至 ')} 个百分点）"
        for r in rows
    ]
    agreeing = ", ".join(str(r["group"]) for r in groups if same(r)) or "none"
    agreeing_zh = "、".join(names[str(r["group"])] for r in groups if same(r)) or "无"
    decided = Verdict(
        kind=kind,
        sentence_en=f"DPO agrees with a reward model as two of them do, to {MARGIN:g} points, for: {agreeing}; "
        f"{len(groups) - len(able)} of {len(groups)} groups are at chance. {'. '.join(en)}.",
        sentence_zh=f"DPO 与奖励模型的一致程度（相差 {MARGIN:g} 个百分点以内）等于两个奖励模型之间的：{agreeing_zh}；"
        f"{len(groups)} 组中有 {len(groups) - len(able)} 组处于随机水平。{'。'.join(zh)}。",
    )
    if not able:
        return decided.undecided(
            "reward models that rank some group better than chance: more pairs or steps.",
            "需要至少在一组上好于随机的奖励模型：更多样本对或步数。",
        )
    return decided


def difference(r: Row) -> str:
    low, high = number(r, "difference_low_points"), number(r, "difference_high_points")
    return f"{number(r, 'difference_points'):+.0f}, {low:+.0f} to {high:+.0f}"


def plot(rows: Sequence[Row]) -> list[Panel]:
    right: list[Mark] = [Rule(50)]
    for i, (kind, name) in enumerate((("reward", "reward model"), ("dpo", "DPO's implicit reward"))):
        ends = list(zip(column(rows, f"{kind}_low_percent"), column(rows, f"{kind}_high_percent"), strict=True))
        right.append(Bars(column(rows, f"{kind}_accuracy_percent"), name, i, ends))
    same = [
        Bars(column(rows, "two_reward_models_agree_percent"), "two reward models", 2),
        Bars(column(rows, "dpo_agrees_percent"), "DPO and a reward model", 3),
    ]
    names = [f"{r['group']}\n({r['pairs']})" for r in rows]
    return [
        Panel(right, "Held-out pairs ranked right", y="%", ylim=(0, 118), xnames=names),
        Panel([*same, Rule(50)], "Held-out pairs ranked the same", ylim=(0, 118), xnames=names),
    ]


LAB = Claim(
    title_en="DPO and the reward model",
    title_zh="DPO 与奖励模型",
    claim_en="DPO's implicit reward ranks answers as a reward model trained on the same pairs does.",
    claim_zh="DPO 的隐式奖励对回答的排序与在同样偏好对上训练的奖励模型相同。",
    regime=f"A decoder of width {WIDTH} with 2 layers, pretrained on {BASE_STEPS * STEP_TOKENS:,} tokens of the "
    f"standard library; {STEPS} steps of {ROWS * CONTEXT:,} tokens of pairs, functions of up to {BYTES} bytes against "
    f"broken ones; AdamW at {RATES['reward']:g} (reward model) and {RATES['dpo']:g} (DPO, β = 0.1). Up to {HELD_PAIRS} "
    "pairs of held-out modules.",
    varies="What is trained on the pairs, the order of the pairs, how a function is broken.",
    measures="Share of held-out pairs ranked right, and ranked the same by two reward models and by DPO and a reward "
    "model; the difference of the last two with a 95 % interval, by the bootstrap over files.",
    evidence="training",
)
