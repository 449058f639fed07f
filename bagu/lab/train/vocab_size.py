"""The size of the vocabulary: bits per byte of models that have cost the same FLOPs.

A larger vocabulary has fewer tokens for the same text, so a step reads more of it; but the head costs more a token, and
rare tokens are seen seldom.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, pairwise, product

from bagu.data import BpeTokenizer, DataConfig, StdlibSource, evaluation_batches, hold_out, in_memory, tokenize
from bagu.lab.core import Claim, Row, Setting, Verdict, number, numbers_in, share_met, where
from bagu.lab.parts.against import against, settled
from bagu.lab.parts.more_steps import go_on, new
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel, Rule
from bagu.nn import count
from bagu.train.cross_entropy import held_out_loss

CONTEXT, ROWS, WIDTH = 128, 8, 64
SIZES = (262, 512, 1024, 2048, 4096)
FLOPS = 3e11


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    modules = (d for d in StdlibSource().documents() if not d.id.startswith("encodings/"))
    train, held = hold_out(islice(modules, 0, None, 32 if quick else 4), fraction=0.15)
    sizes, seeds, flops = (SIZES[:2], (1, 2), 1e9) if quick else (SIZES, (1, 2, 3), FLOPS)
    stores = {}
    for size in sizes:
        tokenizer = BpeTokenizer.train((d.text for d in train), vocab_size=size)
        stores[size] = [
            in_memory(tokenize(part, tokenizer), token_bytes=tokenizer.token_bytes) for part in (train, held)
        ]
    for size, seed in setting.track(list(product(sizes, seeds))):
        config = tiny(size, WIDTH, heads=4, ffn=3 * WIDTH, max_len=CONTEXT, tie_embeddings=True)
        data = DataConfig(context=CONTEXT, rows=ROWS, seed=seed, packing="whole")
        steps = max(round(flops / count.flops(config, CONTEXT).training / data.tokens_per_step), 1)
        tokens, other = stores[size]
        model = go_on(new(config, seed, setting.device), tokens, data, steps=steps, seed=seed).eval()
        batches = partial(evaluation_batches, other, data, limit=2 if quick else 60)
        yield {
            "size": str(size),
            "vocabulary": size,
            "seed": seed,
            "steps": steps,
            "flops": flops,
            "parameters": count.parameters(config).total,
            "bytes_per_token": other.num_bytes() / other.num_tokens,
            "bits_per_byte": held_out_loss(batches)(model)["val_bits_per_byte"],
        }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if each size has fewer bits per byte than the one before; holds only where some steps up gain."""
    sizes = [str(int(size)) for size in numbers_in(rows, "vocabulary")]
    steps = {b: against(rows, a, by="size", value="bits_per_byte")[b] for a, b in pairwise(sizes)}
    bits = {s: [number(r, "bits_per_byte") for r in where(rows, size=s)] for s in sizes}
    mean = {s: sum(v) / len(v) for s, v in bits.items()}
    best = min(mean, key=mean.__getitem__)
    said = Verdict.say(
        share_met(step.high <= 0 for step in steps.values()),
        "At {flops:.0e} FLOPs a vocabulary of {best} is best, {bits:.3f} bits per byte. Each size against the one "
        "before: {told}.",
        "{flops:.0e} FLOPs 时词表 {best} 最好，每字节 {bits:.3f} 比特。各大小与前一个相比：{told}。",
        flops=number(rows[0], "flops"),
        best=best,
        bits=mean[best],
        told=", ".join(f"{s} {p}" for s, p in steps.items()),
    )
    if any(step.high <= 0 for step in steps.values()):
        return said  # some step up gains; the others do not change the kind unless all gain
    return settled(said, [(step, 0.0) for step in steps.values()])


def plot(rows: Sequence[Row]) -> list[Panel]:
    sizes = numbers_in(rows, "vocabulary")
    own = [where(rows, vocabulary=int(size)) for size in sizes]
    each = [[number(r, "bits_per_byte") for r in rows_] for rows_ in own]
    ends = [(min(v), max(v)) for v in each]
    line = Line(sizes, [sum(v) / len(v) for v in each], "mean and range of seeds", ends=ends)
    length = Line(sizes, [number(r[0], "bytes_per_token") for r in own])
    x = "vocabulary"
    return [
        Panel([line], f"At {number(rows[0], 'flops'):.0e} FLOPs", x, "bits per byte", "log2"),
        Panel([length, Rule(1)], "Length of a token", x, "bytes", "log2"),
    ]


LAB = Claim(
    title_en="The size of the vocabulary",
    title_zh="词表大小",
    claim_en="At equal compute a larger vocabulary is better.",
    claim_zh="同等算力下，词表越大越好。",
    regime=f"Models of 2 layers, width {WIDTH}, tied head, on the standard library in contexts of {CONTEXT} tokens; "
    f"{FLOPS:.0e} training FLOPs each; held-out modules; 3 seeds.",
    varies=f"The vocabulary of the byte-level BPE: {', '.join(map(str, SIZES))}.",
    measures="Bits per byte on held-out modules, per seed relative to the next smaller vocabulary.",
    evidence="training",
    published_en="The best vocabulary grows with the compute: 33M to 3B parameters, and a prediction of 216K for Llama "
    "2 70B, which has 32K (Tao et al. 2024, arXiv:2407.13623).",
    published_zh="最佳词表随算力增大：由 33M 到 3B 参数的模型推出 Llama 2 70B 应为 216K，而它只有 32K"
    "（Tao 等，2024，arXiv:2407.13623）。",
)
