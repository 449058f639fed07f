"""The tokenizer in the metadata of a GGUF file, both ways.

GGUF holds the vocabulary and the merges of a byte-level BPE, and names the pattern that splits text into words;
llama.cpp has the patterns. Under `tokenizer.huggingface.json` a file may also hold the whole tokenizer.json, which is
then read instead. bagu writes both: llama.cpp has no name for bagu's own pattern, and splits by GPT-2's.
"""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from bagu.data.chat import turn_ends
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError

HUGGING_FACE = "tokenizer.huggingface.json"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types of GGUF
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS = {"llama-bpe": LLAMA_3, "qwen2": LLAMA_3.replace("{1,3}", "")}  # by tokenizer.ggml.pre
NAMED = ("gpt-2", "smollm", *PATTERNS)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> BpeTokenizer:
    """The tokenizer of a GGUF file; raises if it is not a byte-level BPE with a known pattern."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    if HUGGING_FACE in metadata:
        spec = metadata[HUGGING_FACE]
    elif kind != "gpt2" or pre not in NAMED:
        raise BaguError(
            f"the GGUF file has a tokenizer of kind {kind} ({pre})",
            hint=f"bagu reads kind gpt2 with {', '.join(NAMED)}: pass the model's own with --tokenizer",
        )
    else:
        spec = _built(metadata, tokens, pre).to_str()
    ends = metadata.get("tokenizer.ggml.eos_token_id")
    if not isinstance(ends, int) or not 0 <= ends < len(tokens):
        raise BaguError("the GGUF file names no token that ends a text", hint="pass a tokenizer with --tokenizer")
    names = {"bos_token": "bos_token_id", "pad_token": "padding_token_id", "unk_token": "unknown_token_id"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
    named = {name: tokens[id] for name, id in ids.items() if isinstance(id, int) and 0 <= id < len(tokens)}
    return BpeTokenizer(
        spec=spec, eos_token=tokens[ends], chat_template=metadata.get("tokenizer.chat_template"), named=named
    )


def _built(metadata: Mapping[str, Any], tokens: list[str], pre: str) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    built = tokenizers.Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in PATTERNS)
    before: list[pre_tokenizers.PreTokenizer] = []
    if pre in PATTERNS:
        before = [pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")]
    elif pre == "smollm":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    built.pre_tokenizer = pre_tokenizers.Sequence([*before, whole])
    built.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            built.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    first = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and isinstance(first, int):
        built.post_processor = processors.TemplateProcessing(
            single=[tokens[first], "$A"], special_tokens=[(tokens[first], first)]
        )
    return built


def gguf_metadata(tokenizer: BpeTokenizer, vocab_size: int) -> dict[str, Any]:
    """The metadata of a file with this tokenizer and a model of `vocab_size` tokens."""
    spec = json.loads(tokenizer.spec)
    if spec["model"].get("type") != "BPE" or not tokenizer.byte_level:
        raise BaguError(
            "the tokenizer is not a byte-level BPE, which is the kind that bagu writes to GGUF",
            hint="convert the safetensors with llama.cpp's convert_hf_to_gguf.py",
        )
    kinds = {t["id"]: (t["content"], CONTROL if t["special"] else USER_DEFINED) for t in spec["added_tokens"]}
    known = {id: (token, NORMAL) for token, id in spec["model"]["vocab"].items()} | kinds
    rows = [known.get(id, (f"[PAD{id}]", UNUSED)) for id in range(max(vocab_size, max(known) + 1))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    before = json.dumps(spec.get("pre_tokenizer"))
    pre = next((name for name, pattern in PATTERNS.items() if json.dumps(pattern) in before), "gpt-2")
    out: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm" if '"Digits"' in before else pre,
        "tokenizer.ggml.tokens": [token for token, _ in rows],
        "tokenizer.ggml.token_type": [kind for _, kind in rows],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
        "tokenizer.ggml.add_bos_token": False,
        HUGGING_FACE: tokenizer.spec,
    }
    if ends := turn_ends(tokenizer):
        out["tokenizer.ggml.eot_token_id"] = ends[0]
    if "bos_token" in tokenizer.named:
        out["tokenizer.ggml.bos_token_id"] = first = tokenizer.token_id(tokenizer.named["bos_token"])
        out["tokenizer.ggml.add_bos_token"] = tokenizer.encode_prompt("a")[:1] == [first]
    if tokenizer.chat_template is not None:
        out["tokenizer.chat_template"] = tokenizer.chat_template
    return out
