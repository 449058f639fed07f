"""API keys with request rates, token quotas and models."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bagu.errors import BaguError
from bagu.serve.http.errors import ApiError
from bagu.serve.http.keys import DAY_S, Key, Keys, KeyUse, read_keys

START = 1000.0 * DAY_S  # 00:00 UTC of a day


def refusal(use: KeyUse, now: float) -> ApiError:
    with pytest.raises(ApiError) as refused:
        use.admit(now)
    assert refused.value.status == 429 and refused.value.code == "rate_limit_exceeded"
    return refused.value


def test_a_minutes_requests_may_come_at_once_and_then_at_their_rate() -> None:
    use = KeyUse(Key(name="a", key="k", requests_per_minute=6))
    for _ in range(6):
        use.admit(START)
    assert refusal(use, START).headers == {"Retry-After": "10"}
    assert refusal(use, START + 4).headers == {"Retry-After": "6"}
    use.admit(START + 10)
    refusal(use, START + 10)
    assert use.requests == 7 and use.refused["requests_per_minute"] == 3


def test_a_clock_that_is_set_back_neither_gives_nor_takes_credit() -> None:
    use = KeyUse(Key(name="a", key="k", requests_per_minute=1))
    use.admit(START)
    assert refusal(use, START - 3600).headers == {"Retry-After": "60"}


def test_tokens_are_counted_by_day() -> None:
    use = KeyUse(Key(name="a", key="k", tokens_per_day=100))
    use.admit(START)
    use.charge(99, START)
    use.admit(START + 1)
    use.charge(1, START + 1)
    assert refusal(use, START + 2).headers == {"Retry-After": str(DAY_S - 2)}
    use.admit(START + DAY_S)
    assert use.tokens == 100


def test_models_that_a_key_may_not_use_are_refused() -> None:
    use = KeyUse(Key(name="a", key="k", models=("chat",)))
    use.check_model("chat@2", "chat")
    with pytest.raises(ApiError, match="may not use") as refused:
        use.check_model("other")
    assert refused.value.status == 403 and "chat" in refused.value.body["error"]["message"]


def test_a_key_is_found_by_its_text_or_digest() -> None:
    digest = hashlib.sha256(b"second").hexdigest()
    keys = Keys([Key(name="a", key="first"), Key(name="b", sha256=digest)])
    names = {h: found.key.name for h in (b"Bearer first", b"bearer  second") if (found := keys.find(h))}
    assert names == {b"Bearer first": "a", b"bearer  second": "b"}
    assert not any(map(keys.find, (b"", b"Bearer", b"Bearer third", b"Basic first", b"first")))
    assert keys and not Keys()


WRONG = {
    "": "no keys",
    "[[key]]\nname = 'a'": "either key or sha256",
    "[[key]]\nname = 'a'\nkey = ''": "either key or sha256",
    "[[key]]\nname = 'a'\nsha256 = 'abc'": "64 hexadecimal",
    "[[key]]\nname = 'a'\nkey = 'k'\nrequest_per_minute = 3": "requests_per_minute",
    "[[key]]\nname = 'a'\nkey = 'k'\ntokens_per_day = 0": "1 or more",
    "[[key]]\nname = 'a'\nkey = 'k'\n[[key]]\nname = 'a'\nkey = 'l'": "same name",
    "[[key]]\nname = 'a'\nkey = 'k'\n[[key]]\nname = 'b'\nkey = 'k'": "same digest",
    "[[key\n": "line 1",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(BaguError) as refused:
        read_keys(file)
    said = f"{refused.value} {refused.value.hint}"
    assert str(file) in said and WRONG[text] in said
    assert "'k'" not in said  # no secret in a message
