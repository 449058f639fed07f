"""An evaluation loop: multiple choice and generation."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""The parts of an evaluation: choose, cut, match, and the score with its error.

choose(choices, normalization) -> int
    choices: a list of (text, logprobs), logprobs the log-probabilities of the text's tokens after the question.
    The score of a choice is their sum ("none"), divided by the number of tokens ("tokens") or by the UTF-8 bytes of the
    text ("bytes"). A choice without tokens scores -inf. The largest score wins, the first of equal ones.
cut(pieces, stops) -> str
    The text of the pieces (strings, one per token) up to the first place where one of the stop strings begins; a stop
    string may span pieces. An empty stop string never stops.
match(answer, gold) -> bool
    Whether they are equal after: lower case, punctuation (string.punctuation) removed, the words a, an, the removed,
    runs of white space as one space, ends stripped.
accuracy(right) -> (mean, standard_error)
    right: a list of bools. standard_error = sqrt(mean (1 - mean) / (n - 1)); None for n < 2, and the mean is None for n = 0.
"""


def choose(choices, normalization):
    raise NotImplementedError


def cut(pieces, stops):
    raise NotImplementedError


def match(answer, gold):
    raise NotImplementedError


def accuracy(right):
    raise NotImplementedError
'''
SOLUTION = """import math
import re
import string


def choose(choices, normalization):
    best, most = 0, -math.inf
    for i, (text, logprobs) in enumerate(choices):
        score = sum(logprobs)
        if normalization == "tokens" and logprobs:
            score /= len(logprobs)
        if normalization == "bytes" and logprobs:
            score /= len(text.encode())
        if not logprobs:
            score = -math.inf
        if score > most:
            best, most = i, score
    return best


def cut(pieces, stops):
    text = "".join(pieces)
    places = [text.find(s) for s in stops if s and s in text]
    return text[: min(places)] if places else text


def plain(text):
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    text = re.sub(r"\\b(a|an|the)\\b", " ", text)
    return " ".join(text.split())


def match(answer, gold):
    return plain(answer) == plain(gold)


def accuracy(right):
    n = len(right)
    if not n:
        return None, None
    mean = sum(right) / n
    return mean, math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None
"""

DRILL = Drill(
    name="evaluation",
    topic="evaluation",
    difficulty=2,
    title=Text("an evaluation loop: choice, generation, error", "评测框架：选择题、生成题、误差"),
    task=Text(STUB.split('"""')[1], "写出评测的四个部分：选择题打分、在停止串处截断、归一化匹配、带标准误的准确率。\n" + STUB.split('"""')[1]),
    stubs={"python": STUB},
    solutions={"python": SOLUTION},
    oracle="basics",
    functions=("choose", "cut", "match", "accuracy"),
    hints=(
        Text("A longer choice has a lower sum: when is that unfair?", "更长的选项对数概率和更低：什么时候不公平？"),
        Text("Stop strings live in the text, not in tokens: join first.", "停止串存在于文本中而不是词元中：先拼接。"),
        Text("Bytes are those of the UTF-8 text; the first of equal scores wins, so compare with >; remove punctuation before the articles.", "字节数按 UTF-8 计；并列取第一个，所以用 >；先去标点再去冠词。"),
    ),
    questions=(
        Question("Which normalisation does a benchmark report?", "各基准用哪种归一化？", "bagu eval --help"),
        Question("How many items separate two models by one point?", "需要多少题才能分辨 1 分之差？", "bagu lab run few_shot_noise"),
    ),
    planted=(
        Planted("python", "if score > most:", "if score >= most:", "ties"),
        Planted("python", "len(text.encode())", "len(text)", "special"),
        Planted("python", "score /= len(logprobs)", "score /= len(text)", "normalize"),
        Planted("python", "        if not logprobs:\n            score = -math.inf\n", "", "empty|edge"),
        Planted("python", "best, most = 0, -math.inf", "best, most = 0, 0.0", "formula|order|normalize"),
        Planted("python", "score = sum(logprobs)", "score = sum(logprobs) / max(1, len(logprobs))", "normalize|formula"),
        Planted("python", "min(places)", "max(places)", "order"),
        Planted("python", "    text = \"\".join(pieces)\n    places", "    for i, piece in enumerate(pieces):\n        if piece in stops:\n            return \"\".join(pieces[:i])\n    return \"\".join(pieces)\n    places", "edge|formula|order"),
        Planted("python", "if s and s in text", "if s in text", "empty|edge"),
        Planted("python", "text[: min(places)] if places else text", "text[: min(places)]", "raises|edge"),
        Planted("python", "text.lower()", "text", "formula"),
        Planted("python", "re.sub(r\"\\b(a|an|the)\\b\", \" \", text)", "text.replace(\"the\", \" \")", "edge|formula"),
        Planted("python", "\" \".join(text.split())", "text.strip()", "edge|formula"),
        Planted("python", "(n - 1)) if n > 1", "n) if n > 1", "off_by_one"),
        Planted("python", "    if not n:\n        return None, None\n", "", "raises|empty"),
    ),
)  # fmt: skip
