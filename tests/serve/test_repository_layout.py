"""The files of a model repository: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagu.errors import BaguError
from bagu.serve.repository.layout import is_repository, read_model, read_repository


def model(folder: Path, text: str = "", versions: tuple[str, ...] = ("1", "2", "10")) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.toml").write_text(text)
    for version in versions:
        (folder / version).mkdir()
    return folder


def test_the_latest_version_is_loaded_by_default(tmp_path: Path) -> None:
    found = read_model(model(tmp_path / "chat"))
    assert list(found.folders) == [1, 2, 10] and found.initial == {10: 1.0}


def test_all_versions_share_the_traffic(tmp_path: Path) -> None:
    assert read_model(model(tmp_path / "chat", 'policy = "all"')).initial == {1: 1.0, 2: 1.0, 10: 1.0}


def test_weights_choose_the_versions_and_a_shadow_is_loaded_too(tmp_path: Path) -> None:
    text = "weights = {1 = 90, 2 = 10}\nshadow = {version = 10, share = 0.5}"
    found = read_model(model(tmp_path / "chat", text))
    assert found.initial == {1: 90.0, 2: 10.0} and found.loaded_at_start == (1, 2, 10)


def test_a_version_may_be_elsewhere(tmp_path: Path) -> None:
    found = read_model(model(tmp_path / "chat", 'versions = {3 = "../other", 4 = "/run"}', ()))
    assert found.folders == {3: tmp_path / "chat" / "../other", 4: Path("/run")}


WRONG = {
    "warmup_promts = []": "warmup_prompts",
    "[sampling]\ntemprature = 1": "temperature",
    "[sampling]\ntemperature = -1": "temperature",
    'policy = "newest"': "latest",
    "weights = {1 = 0, 2 = 0}": "sum to zero",
    "weights = {1 = -1, 2 = 2}": "0 or more",
    "weights = {1 = nan}": "finite",
    "weights = {first = 1}": "'first' is not a version",
    "weights = {7 = 1}": "has no version 7",
    "memory_share = 1.5": "above 0 and at most 1",
    "shadow = {version = 1, share = 2}": "above 0 and at most 1",
    "return_when = {after_requests = 3}": "no limit",
    "return_when = {error_percent = 200}": "below 100",
    "return_when = {error_percent = -1}": "0 or more",
    "return_when = {ttft_p99_ms = 0}": "above 0",
    "swap = \n": "line 1",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_field_is_refused_with_the_file_and_what_is_allowed(tmp_path: Path, text: str) -> None:
    with pytest.raises(BaguError) as refused:
        read_model(model(tmp_path / "chat", text))
    said = f"{refused.value} {refused.value.hint}"
    assert str(tmp_path / "chat" / "model.toml") in said and WRONG[text] in said


def test_a_model_without_versions_or_with_a_wrong_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaguError, match="no versions"):
        read_model(model(tmp_path / "chat", versions=("01", "latest")))
    with pytest.raises(BaguError, match="not a model name"):
        read_model(model(tmp_path / "chat@2"))


def test_a_repository_is_told_apart_from_a_model(tmp_path: Path) -> None:
    assert not is_repository(tmp_path) and not is_repository(tmp_path / "nothing")
    model(tmp_path / "chat")
    assert is_repository(tmp_path) and list(read_repository(tmp_path)) == ["chat"]
    (tmp_path / "config.json").write_text("{}")  # a Hugging Face folder
    assert not is_repository(tmp_path)
