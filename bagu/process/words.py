"""The sentences of reports, refusals and the page, in English and Chinese. `{name}` is replaced by a fact."""

from collections.abc import Mapping
from typing import Any, Literal

Lang = Literal["en", "zh"]

WORDS: dict[str, tuple[str, str]] = {
    # findings of the health report
    "few_rows": (
        "{n} rows: too few to trust a model (30 or more are needed)",
        "只有 {n} 行：太少，模型不可信（至少需要 30 行）",
    ),
    "many_rows": (
        "{n:,} rows: models are fitted on {most:,} of them, evenly over time",
        "{n:,} 行：模型在其中按时间均匀取出的 {most:,} 行上拟合",
    ),
    "note": ("{text}", "{text}"),
    "missing": ("{column}: {share:.0%} of the rows have no value", "{column}：{share:.0%} 的行没有数值"),
    "missing_with_target": (
        "{column}: rows without a value have another {target} (by {shift:.1f} sd): missing is not random here",
        "{column}：缺失行的 {target} 不同（相差 {shift:.1f} 个标准差）：缺失并非随机",
    ),
    "constant": ("{column} never changes: nothing can be learned from it", "{column} 从不变化：无法从中学到任何东西"),
    "stuck": (
        "{column} repeats the same value for {n} rows from row {row}: a stuck sensor?",
        "{column} 从第 {row} 行起连续 {n} 行数值相同：传感器卡住了？",
    ),
    "duplicates": ("{n} rows are exact copies of others", "{n} 行与其他行完全相同"),
    "repeats": (
        "{share:.0%} of the rows repeat the inputs of another row: give their batch as a group",
        "{share:.0%} 的行与别的行输入相同：请把批次设为 group",
    ),
    "leak": (
        "{column} tells {target} almost exactly (r = {r:.4f}): it is probably measured after it; set it to ignore",
        "{column} 几乎完全决定 {target}（r = {r:.4f}）：很可能是事后测得；请设为 ignore",
    ),
    "lagged": (
        "{column} is {target} of another row (r = {r:.4f}, {n} rows apart): set it to ignore",
        "{column} 就是另一行的 {target}（r = {r:.4f}，相隔 {n} 行）：请设为 ignore",
    ),
    "unit_jump": (
        "{column} jumps at row {row} as if its unit had changed ({change})",
        "{column} 在第 {row} 行跳变，像是换了单位（{change}）",
    ),
    "mixed_units": ("{column} has cells in {units}", "{column} 的单元格单位不一：{units}"),
    "outliers": (
        "{column}: {n} values are more than 8 quartile ranges away",
        "{column}：{n} 个值偏离超过 8 倍四分位距",
    ),
    "together": (
        "{column} and {other} always moved together (r = {r:.3f}): their effects cannot be told apart",
        "{column} 与 {other} 总是同时变化（r = {r:.3f}）：无法区分各自的作用",
    ),
    "drift": (
        "{target} of the last 30 % of the time differs by {shift:.1f} sd from before",
        "最后 30 % 时间的 {target} 与之前相差 {shift:.1f} 个标准差",
    ),
    "reverse": (
        "{column} follows the {target} of the row before (r = {r:.2f}): operators may react to it, so the association may "
        "run backwards",
        "{column} 跟随上一行的 {target} 变化（r = {r:.2f}）：可能是操作员在作出反应，关联方向可能相反",
    ),
    "healthy": ("nothing suspicious was found", "没有发现可疑之处"),
    # refusals
    "no_skill": (
        "no recommendation: on held-out rows the model does not predict {target} better than its mean does (R² {r2:.2f}, "
        "at least {bound:.2f} is shown)",
        "不作推荐：在留出的行上，模型对 {target} 的预测并不优于均值（R² {r2:.2f}，可证实的下限 {bound:.2f}）",
    ),
    "context_outside": (
        "no recommendation: this context is outside of the data; farthest is {column} = {value} (the data has {low} to "
        "{high})",
        "不作推荐：该工况不在数据范围内；偏离最大的是 {column} = {value}（数据为 {low} 到 {high}）",
    ),
    "drifted": (
        "no recommendation: the process has moved: {column} is {value} in the mean of the last {n} rows ({n} rows in a row of "
        "the data had {low} to {high}); fit again with the new rows",
        "不作推荐：过程已漂移：最近 {n} 行 {column} 的均值为 {value}（数据中连续 {n} 行的均值为 {low} 到 {high}）；请加入新数据重新拟合",
    ),
    "drifted_level": (
        "no recommendation: the process has moved: the last {n} rows have other shares of {column} than any {n} rows in a row "
        "of the data; fit again with the new rows",
        "不作推荐：过程已漂移：最近 {n} 行 {column} 的构成与数据中任何连续 {n} 行都不同；请加入新数据重新拟合",
    ),
    "results_drifted": (
        "no recommendation: the process has changed: the last {n} results of {target} differ from their prediction by "
        "{shift:+.3g} in the median, and {out} are outside of their 90 % interval; fit again with the new rows",
        "不作推荐：过程已改变：最近 {n} 个 {target} 结果与预测相差 {shift:+.3g}（中位数），其中 {out} 个落在 90 % 区间之外；"
        "请加入新数据重新拟合",
    ),
    "nothing_inside": (
        "no recommendation: no setting within the bounds, moves and steps is near any run of the data",
        "不作推荐：在边界、步幅和步长之内，没有任何设定接近已有的运行",
    ),
    "limits_unlikely": (
        "no recommendation: no setting near the data keeps {limits} with a probability of {p:.0%}; the best reaches {best:.0%}",
        "不作推荐：数据附近没有设定能以 {p:.0%} 的概率满足 {limits}；最好的只有 {best:.0%}",
    ),
    "never_apart": (
        "no recommendation: {column} and {other} never moved apart in the data (r = {r:.3f}), and only one may move now",
        "不作推荐：{column} 与 {other} 在数据中从未分开变化（r = {r:.3f}），而现在只允许其中一个变化",
    ),
    "unseen_level": (
        "no recommendation: {column} = {value} was never seen (known: {known})",
        "不作推荐：从未见过 {column} = {value}（已知：{known}）",
    ),
    "no_gain": (
        "no recommendation: nothing near the data is better than the present settings with confidence",
        "不作推荐：数据附近没有任何设定能可靠地优于当前设定",
    ),
    # notes on the models
    "coverage": ("90 % interval: got {got:.0%} on held-out rows", "90 % 区间：在留出的行上实际覆盖 {got:.0%}"),
    "by_group": (
        "groups of 30 rows or more: coverage {low:.0%} ({worst}) to {high:.0%}",
        "30 行以上的组：覆盖率 {low:.0%}（{worst}）到 {high:.0%}",
    ),
    "over_time": ("forward in time, block by block: {each}", "按时间向前，逐段覆盖率：{each}"),
    "drifts": (
        "the process drifts: later rows leave the interval more often than promised",
        "过程在漂移：之后的行超出区间的次数多于承诺",
    ),
    "no_time": ("{model} was left out: the time budget was over", "未用 {model}：时间已用完"),
    "time_ended": ("{model} was left out: the time budget ended during its training", "未用 {model}：训练中时间用完"),
    "no_lightgbm": (
        "{model} was left out: LightGBM is not installed (pip install 'bagu[process]')",
        "未用 {model}：没有安装 LightGBM（pip install 'bagu[process]'）",
    ),
    # the report
    "report_title": ("{goal}: {rows:,} rows, {inputs} inputs", "{goal}：{rows:,} 行，{inputs} 个输入"),
    "findings": ("Findings in the data", "数据中的发现"),
    "roles": ("Roles", "列的角色"),
    "role_heads": ("column|role|unit|low|high|step", "列|角色|单位|下限|上限|步长"),
    "models_of": ("Models of {target}, on rows they have not seen", "{target} 的模型（在未见过的行上）"),
    "model_heads": ("model|weight", "模型|权重"),
    "split_forward": ("R², later rows", "R²，之后的行"),
    "split_group": ("R², other batches", "R²，其他批次"),
    "split_random": ("R², random rows", "R²，随机行"),
    "chart": ("Measured against predicted", "实测与预测"),
    "chart_measured": ("measured, mean of similar rows", "实测（相近行的均值）"),
    "chart_equal": ("equal", "相等"),
    "chart_predicted": ("predicted", "预测"),
    # remarks beside an answer
    "association": (
        "These are associations in your data, not proven causes. Try a recommendation as an experiment first.",
        "这些是数据中的关联，不是已证明的因果。请先把推荐当作试验。",
    ),
    "outside_setting": (
        "outside of the data: the nearest runs differ most in {column}",
        "超出数据范围：与最近的运行相比，{column} 相差最大",
    ),
}


def say(kind: str, facts: Mapping[str, Any], lang: Lang = "en") -> str:
    return WORDS[kind][lang == "zh"].format(**facts)
