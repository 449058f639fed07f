"""The size of a passage: how often the right function is among the passages that fit a budget of tokens.

Modules lose the docstrings of their functions and are cut into passages; the first sentence of a docstring is the
query. It counts as found if a returned passage has the function's first line. Small passages are many for the same
budget, but each has fewer words to match.
"""

import ast
from collections.abc import Iterator, Sequence
from itertools import product
from sqlite3 import connect

import numpy as np

from bagu.data import StdlibSource
from bagu.data.docstrings import first_sentence
from bagu.data.stdlib import Function, documented_functions, functions, parsed
from bagu.eval.intervals import estimate
from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.plot import Line, Panel
from bagu.retrieve import postings
from bagu.retrieve.split import Chunking, split, tokens
from bagu.retrieve.words import runs, terms

SIZES = (32, 64, 128, 256, 512, 1024)
OVERLAP = 4  # a quarter of the size
BUDGET = 2048  # estimated tokens of the passages that are returned
USUAL = (128, 256, 512)
QUERIES = 500


def stripped(text: str) -> tuple[str, dict[int, int]]:
    """A module without the docstrings of its functions, and where the function that begins at each line is in it."""
    lines = text.split("\n")
    nodes = list(functions(parsed(text)))
    gone: set[int] = set()
    for node in nodes:
        if ast.get_docstring(node) and node.body[0].lineno > node.lineno:
            gone |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    kept = [at for at in range(1, len(lines) + 1) if at not in gone]
    starts = np.cumsum([0, *(len(lines[at - 1]) + 1 for at in kept)])
    offsets = dict(zip(kept, starts.tolist(), strict=False))
    begins = {n.lineno: offsets[n.lineno] + n.col_offset for n in nodes if n.lineno in offsets}
    return "\n".join(lines[at - 1] for at in kept), begins


Module = tuple[str, dict[int, int], list[Function]]  # without docstrings, where functions begin, those with a docstring


def found_shares(modules: Sequence[Module], size: int, overlap: int, count: int) -> list[Row]:
    """For each of `count` queries whether it was found, and its file."""
    passages: list[list[str]] = []
    places: list[tuple[int, int, int, int]] = []  # module, start, end, tokens
    asked: list[tuple[str, int, int]] = []
    for number_of, (plain, starts, documented) in enumerate(modules):
        for span in split(plain, "python", Chunking(size=size, overlap=overlap)):
            piece = plain[span.start : span.end]
            passages.append(runs(piece))
            places.append((number_of, span.start, span.end, tokens(piece)))
        asked += [(first_sentence(f.docstring), number_of, starts[f.line]) for f in documented if f.line in starts]
    db = connect(":memory:")
    db.executescript(postings.SCHEMA)
    postings.write_segment(db, 0, passages)
    lexicon = postings.Lexicon.load(db)
    rows: list[Row] = []
    for which in np.random.default_rng(0).permutation(len(asked))[:count]:
        query, module, at = asked[which]
        left, hit = BUDGET, False
        for id, _ in postings.best(lexicon.score(db, terms(query))[0], BUDGET // 8):
            where_, start, end, cost = places[id]
            left -= cost
            if left < 0:
                break
            hit |= where_ == module and start <= at < end
        rows.append({"hit": float(hit), "module": module})
    return rows


def run(setting: Setting) -> Iterator[Row]:
    documents = list(StdlibSource().documents())[: 30 if setting.quick else None]
    modules = [(*stripped(d.text), list(documented_functions([d], max_bytes=1 << 20))) for d in documents]
    base: dict[int, list[float]] = {}
    for size, part in setting.track(list(product(SIZES, (0, OVERLAP)))):
        overlap = size // part if part else 0
        rows = found_shares(modules, size, overlap, 40 if setting.quick else QUERIES)
        hits, files = [number(row, "hit") for row in rows], [row["module"] for row in rows]
        share, more = estimate(hits, files), None
        if overlap:
            more = estimate([a - b for a, b in zip(hits, base[size], strict=True)], files)
        else:
            base[size] = hits
        yield {
            "size_tokens": size,
            "overlap_tokens": overlap,
            "queries": len(hits),
            "found": share.mean,
            "low": share.low,
            "high": share.high,
            "overlap_gain": None if more is None else more.mean,
            "overlap_gain_low": None if more is None else more.low,
        }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the best size without overlap is a usual one, above the smallest and the largest beyond their intervals'
    half widths, and if overlap finds more at 256 tokens."""
    plain = where(rows, overlap_tokens=0)
    best = max(plain, key=lambda row: number(row, "found"))
    ends = (plain[0], plain[-1])
    middle = number(best, "size_tokens") in USUAL and all(number(e, "high") < number(best, "found") for e in ends)
    lapped = next(row for row in rows if row["size_tokens"] == 256 and row["overlap_tokens"])
    return Verdict.say(
        share_met([middle, number(lapped, "overlap_gain_low") > 0]),
        "Without overlap {best:.0f} tokens find most, {share:.1%}; {small:.0f} find {few:.1%}, {large:.0f} {many:.1%}. "
        "An overlap of a quarter changes 256 by {gain:+.1%}.",
        "不重叠时 {best:.0f} token 找到最多，{share:.1%}；{small:.0f} 为 {few:.1%}，{large:.0f} 为 {many:.1%}。"
        "重叠四分之一使 256 变化 {gain:+.1%}。",
        best=number(best, "size_tokens"),
        share=number(best, "found"),
        small=number(ends[0], "size_tokens"),
        few=number(ends[0], "found"),
        large=number(ends[1], "size_tokens"),
        many=number(ends[1], "found"),
        gain=number(lapped, "overlap_gain"),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    plain, lapped = where(rows, overlap_tokens=0), [row for row in rows if row["overlap_tokens"]]
    lines = [
        Line.of(plain, "size_tokens", "found", "no overlap", ends=("low", "high")),
        Line.of(lapped, "size_tokens", "found", "a quarter", ends=("low", "high")),
    ]
    title = f"The right function among {BUDGET:,} tokens of passages"
    ticks = numbers_in(rows, "size_tokens")
    return [Panel(lines, title, f"passage, tokens ({ticks[0]:.0f} to {ticks[-1]:.0f})", "share found", xscale="log2")]


LAB = Claim(
    title_en="The size of a passage",
    title_zh="段落多大",
    claim_en="Passages should have a few hundred tokens and overlap.",
    claim_zh="段落应有几百个 token，并且相互重叠。",
    regime=f"BM25 over the modules of the standard library without docstrings; passages returned up to {BUDGET:,} "
    "estimated tokens, as a prompt would hold.",
    varies=f"The longest passage, {SIZES[0]} to {SIZES[-1]} tokens; overlap 0 or a quarter of it.",
    measures=f"The share of {QUERIES} docstrings whose function begins in a returned passage, with 95 % intervals over "
    f"files. Usual sizes: {USUAL[0]} to {USUAL[-1]}.",
    evidence="counting",
)
