"""Byte-level BPE: exact round trips, no control tokens from text, files that `transformers` reads."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from bagu.data import SPECIAL_TOKENS, BpeTokenizer, ChatEncoder, StdlibSource
from bagu.data.tokenizer_cli import stats, stats_main, train_main
from bagu.errors import BaguError

TEXTS = [Path(p).read_text(encoding="utf-8") for _, p in StdlibSource(Path(json.__file__).parent).files()]
TOKENIZER = BpeTokenizer.train(TEXTS, vocab_size=600, chat_template="{{ messages[0].content }}")
ADDED = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
with_markup = st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", " ", "\n", "é", "a"]), max_size=8).map("".join)


@settings(max_examples=300, derandomize=True)
@given(any_text | with_markup)
def test_round_trip_is_exact_and_text_never_makes_a_control_token(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert not set(ids) & set(TOKENIZER.special_ids.values())
    assert TOKENIZER.token_bytes[ids].sum() == len(text.encode())
    assert TOKENIZER.encode_batch([text, "x"])[0] == ids


def test_markup_becomes_control_tokens() -> None:
    ids = TOKENIZER.encode_markup("<|user|>hi<|end|>")
    assert [ids[0], ids[-1]] == [TOKENIZER.token_id("<|user|>"), TOKENIZER.token_id("<|end|>")]
    assert TOKENIZER.decode(ids) == "<|user|>hi<|end|>"
    assert TOKENIZER.encode("hi") == ids[1:-1]
    assert TOKENIZER.encode("<|user|>hi<|end|>") != ids  # also after encode_markup


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(BaguError, match=r"text 1 has a lone surrogate, '\\ud83d', at character 2"):
        TOKENIZER.encode_batch(["fine", "ab\ud83d"])
    with pytest.raises(BaguError, match="only Unicode text"):
        TOKENIZER.encode("\udcff")


def test_the_vocabulary() -> None:
    assert TOKENIZER.vocab_size == 600
    assert list(TOKENIZER.special_ids) == list(SPECIAL_TOKENS)
    assert TOKENIZER.eos_id == TOKENIZER.token_id("<|endoftext|>")
    assert TOKENIZER.token_bytes.shape == (600,)
    assert (TOKENIZER.token_bytes == 0).sum() == len(SPECIAL_TOKENS)
    with pytest.raises(BaguError, match="has no token '<nope>'"):
        TOKENIZER.token_id("<nope>")
    with pytest.raises(BaguError, match="a vocabulary of 200 is too small") as caught:
        BpeTokenizer.train(TEXTS, vocab_size=200)
    assert "at least 262" in caught.value.hint


def test_training_is_reproducible_and_small_texts_give_fewer_tokens() -> None:
    assert BpeTokenizer.train(TEXTS, vocab_size=600).fingerprint == TOKENIZER.fingerprint
    assert BpeTokenizer.train(TEXTS[:1], vocab_size=600).fingerprint != TOKENIZER.fingerprint
    assert BpeTokenizer.train(["ab"], vocab_size=600).vocab_size == 256 + len(SPECIAL_TOKENS) + 1


def test_save_and_load(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "new" / "folder")
    loaded = BpeTokenizer.load(tmp_path / "new" / "folder")
    assert loaded == TOKENIZER
    assert loaded.fingerprint == TOKENIZER.fingerprint
    assert BpeTokenizer.load(tmp_path / "new" / "folder" / "tokenizer.json") == TOKENIZER
    assert loaded.encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])
    (tmp_path / "new" / "folder" / "chat_template.jinja").write_text("{{ 1 }}")
    assert BpeTokenizer.load(tmp_path / "new" / "folder").chat_template == "{{ 1 }}"


@pytest.mark.parametrize("template", [{"a": "b"}, [{"template": "{{ 1 }}"}], ["{{ 1 }}"], 3])
def test_a_chat_template_of_another_form_is_named(tmp_path: Path, template: object) -> None:
    TOKENIZER.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    with pytest.raises(BaguError, match="the chat template of "):
        BpeTokenizer.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BaguError, match=r"the chat template of .* cannot be read: UnicodeDecodeError"):
        BpeTokenizer.load(tmp_path)


def test_a_failed_save_keeps_the_old_tokenizer(tmp_path: Path) -> None:
    """A kill or a full disk during a save once left a partial tokenizer.json, and the run could not be resumed."""
    resource = pytest.importorskip("resource")
    old, new = (BpeTokenizer.train([text * 50], vocab_size=300) for text in ("one two three ", "four five six "))
    old.save(tmp_path)
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(new.spec) // 2, before[1]))
        with pytest.raises(OSError) as caught:
            new.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.filename == str(tmp_path / "tokenizer.json")
    assert BpeTokenizer.load(tmp_path).fingerprint == old.fingerprint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("size", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_bad_max_mb_is_refused(tmp_path: Path, size: float) -> None:
    (tmp_path / "text.txt").write_text("some text")
    TOKENIZER.save(tmp_path / "t")
    for verb in (train_main, stats_main):
        with pytest.raises(BaguError, match="--max-mb is"):
            verb(tmp_path / "t", path=tmp_path / "text.txt", max_mb=size)


def test_transformers_reads_the_saved_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    TOKENIZER.save(tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert peer.mask_token == "<|mask|>"
    assert peer.eos_token_id == TOKENIZER.eos_id
    assert len(peer) == TOKENIZER.vocab_size
    for text in [*TEXTS[:2], "a . b , c 's\n", "  é 你好 12345"]:
        assert peer(text, add_special_tokens=False)["input_ids"] == TOKENIZER.encode(text)
        assert peer.decode(TOKENIZER.encode(text)) == text
    markup = "<|user|>hi<|end|>"
    assert peer(markup, add_special_tokens=False)["input_ids"] == TOKENIZER.encode_markup(markup)
    chat = [{"role": "user", "content": "hello"}]
    assert peer.apply_chat_template(chat, tokenize=False) == "hello"


def test_special_tokens_around_a_text_are_added(tmp_path: Path) -> None:
    """Llama's begin of text and BERT's [CLS] and [SEP]: in prompts, in chats, and after saving again."""
    transformers = pytest.importorskip("transformers")
    names = ("<|eot|>", "<|begin|>", "<|user|>", "<|assistant|>")
    template = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    trained = BpeTokenizer.train(TEXTS, vocab_size=400, special_tokens=names, chat_template=template)
    parsed = tokenizers.Tokenizer.from_str(trained.spec)
    begin, end = ((name, trained.token_id(name)) for name in ("<|begin|>", "<|eot|>"))
    parsed.post_processor = processors.TemplateProcessing(single="<|begin|> $A <|eot|>", special_tokens=[begin, end])
    config = {"eos_token": "<|eot|>", "bos_token": ADDED | {"content": "<|begin|>"}, "add_bos_token": True}
    loaded = BpeTokenizer.load(save_foreign(tmp_path / "a", parsed, config | {"chat_template": template}))
    loaded.save(tmp_path / "b")
    chat = [{"role": "user", "content": "def f"}]
    for text in ("def f", "def f" * 10_000):
        assert loaded.encode_prompt(text) == [begin[1], *loaded.encode(text), end[1]]
    for folder in ("a", "b"):
        peer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / folder)
        assert peer.bos_token == "<|begin|>"
        assert peer("def f")["input_ids"] == loaded.encode_prompt("def f")
        said = peer.apply_chat_template(chat, tokenize=True, return_dict=False)
        assert ChatEncoder(BpeTokenizer.load(tmp_path / folder)).prompt(chat) == said
    assert TOKENIZER.encode_prompt("def f") == TOKENIZER.encode("def f")


def save_foreign(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict | None) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_tokenizers_of_other_libraries_load(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "<0x0A>": 3, "▁": 4, "é": 5}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(["<unk>", "</s>", "<|stop|>"])
    made.add_tokens(["<think>"])  # not special: text may contain it
    made.enable_padding(length=64)
    made.enable_truncation(4)
    plain = BpeTokenizer.load(save_foreign(tmp_path / "plain", made, None))
    assert plain.eos_token == "</s>"
    assert plain.vocab_size == 9
    assert plain.token_bytes.tolist() == [0, 2, 1, 1, 1, 2, 0, 0, len("<think>")]
    assert len(plain.encode("b" * 10)) == 11  # neither padded to 64 nor cut to 4
    assert plain.token_id("<think>") in plain.encode("b<think>")
    config = {
        "eos_token": {"content": "<|stop|>", "special": True},
        "chat_template": [{"name": "default", "template": "t"}],
    }
    configured = BpeTokenizer.load(save_foreign(tmp_path / "configured", made, config))
    assert (configured.eos_id, configured.chat_template) == (made.token_to_id("<|stop|>"), "t")


def test_vocab_size_counts_unused_ids(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1, "é": 7}, merges=[]))
    made.add_special_tokens(["</s>"])
    loaded = BpeTokenizer.load(save_foreign(tmp_path / "holes", made, None))
    assert loaded.vocab_size == 8
    assert loaded.token_bytes.tolist() == [0, 1, 0, 0, 0, 0, 0, 2]


def test_unusable_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BaguError, match="there is no tokenizer at"):
        BpeTokenizer.load(tmp_path)
    file = tmp_path / "tokenizer.json"
    for content, says in (("{", "is not a tokenizer.json"), ("[]", "is not a tokenizer.json"),
                          ('{"added_tokens": null}', "is not a tokenizer.json"),
                          ('{"added_tokens": [{"id": 1}]}', "is not a tokenizer.json"),
                          (TOKENIZER.spec.replace('"merges"', '"mergers"'), "cannot use")):  # fmt: skip
        file.write_text(content)
        with pytest.raises(BaguError, match=says):
            BpeTokenizer.load(file)
    made = tokenizers.Tokenizer(models.BPE())
    made.add_special_tokens(["<s>"])
    folder = save_foreign(tmp_path / "endless", made, {})
    with pytest.raises(BaguError, match="does not define the token that ends a document") as caught:
        BpeTokenizer.load(folder)
    assert "special tokens: <s>" in caught.value.hint
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    with pytest.raises(BaguError, match="has no token '<gone>'"):
        BpeTokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(BaguError, match=r"tokenizer_config\.json is not JSON"):
        BpeTokenizer.load(folder)


def test_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = stats(TOKENIZER, TEXTS)
    encoded = TOKENIZER.encode_batch(TEXTS)
    assert found.bytes == sum(len(t.encode()) for t in TEXTS)
    assert found.tokens == sum(map(len, encoded))
    assert found.vocab_used == len(np.unique(np.concatenate(encoded)))
    assert found.changed == ()
    assert found.encode_seconds > 0
    with pytest.raises(BaguError, match="no text"):
        stats(TOKENIZER, [""])

    (tmp_path / "a.txt").write_text(TEXTS[0])
    train_main(tmp_path / "out", path=tmp_path / "a.txt", vocab_size=400)
    result = stats_main(tmp_path / "out", path=tmp_path / "a.txt")
    printed = capsys.readouterr().out
    assert "400 tokens" in printed
    assert f"{result.bytes_per_token:.3f} bytes/token" in printed
    assert "MB/s" in printed
    assert "exact" in printed


def test_stats_detect_a_tokenizer_that_loses_text() -> None:
    lossy = json.loads(TOKENIZER.spec)
    lossy["normalizer"] = {"type": "Lowercase"}
    found = stats(BpeTokenizer(spec=json.dumps(lossy), eos_token="<|endoftext|>"), ["abc", "ABC"])
    assert found.changed == (1,)
