"""Configuration trees: JSON round trips, overrides, and errors that name the dotted key."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagu.config import ConfigError, diff, fingerprint, from_dict, load, override, save, to_dict
from bagu.errors import ArgumentError, BaguError, UnknownName


@dataclass(frozen=True, kw_only=True)
class Adam:
    kind: Literal["adam"] = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class Sgd:
    kind: Literal["sgd"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rope:
    theta: float = 1e4

    def __post_init__(self) -> None:
        if self.theta <= 0:
            raise ArgumentError(f"theta is {self.theta} and must be above 0", hint="the usual value is 10000")


@dataclass(frozen=True, kw_only=True)
class Source:
    path: Path
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Tree:
    steps: int = 10
    name: str = ""
    compile: bool | Literal["auto"] = "auto"
    dtype: Literal["bf16", "fp32"] = "fp32"
    clip: float | None = None
    optimizer: Adam | Sgd = Adam()
    rope: Rope | None = None
    window: int | tuple[int, ...] | None = None
    sources: tuple[Source, ...] = ()
    mix: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    span: tuple[int, str] = (0, "")
    windows: tuple[int | None, ...] = ()


finite = st.floats(allow_nan=False, allow_infinity=False)
trees = st.builds(
    Tree,
    steps=st.integers(),
    name=st.text(),
    compile=st.one_of(st.booleans(), st.just("auto")),
    dtype=st.sampled_from(["bf16", "fp32"]),
    clip=st.none() | finite | st.integers(-9, 9),
    optimizer=st.builds(Adam, lr=finite, betas=st.tuples(finite, finite)) | st.builds(Sgd, momentum=finite),
    rope=st.none() | st.builds(Rope, theta=st.floats(1e-3, 1e9)),
    window=st.none() | st.integers() | st.lists(st.integers(), max_size=3).map(tuple),
    sources=st.lists(st.builds(Source, path=st.sampled_from([Path("a"), Path("b/中文")]), weight=finite)).map(tuple),
    mix=st.dictionaries(st.text(), finite, max_size=3),
    notes=st.lists(st.text(), max_size=3),
)


@given(trees)
def test_round_trip_through_json(tree: Tree) -> None:
    assert from_dict(Tree, to_dict(tree)) == tree
    again = from_dict(Tree, json.loads(json.dumps(to_dict(tree), allow_nan=False)))
    assert again == tree
    assert fingerprint(again) == fingerprint(tree)
    assert diff(again, tree) == []


@given(trees, trees)
def test_diff_and_fingerprint_detect_every_difference(a: Tree, b: Tree) -> None:
    assert (diff(a, b) == []) == (to_dict(a) == to_dict(b))
    assert (fingerprint(a) == fingerprint(b)) == (to_dict(a) == to_dict(b))


@given(trees, st.integers(), finite, st.sampled_from(["bf16", "fp32"]))
def test_override_changes_only_the_given_keys(tree: Tree, steps: int, lr: float, dtype: str) -> None:
    changed = override(tree, [f"steps={steps}", f"optimizer.lr={lr!r}", f"dtype={dtype}"])
    assert (changed.steps, changed.optimizer.lr, changed.dtype) == (steps, lr, dtype)
    kept = {line.split(":")[0] for line in diff(tree, changed)}
    assert kept <= {"steps", "optimizer.lr", "dtype"}


def test_save_and_load(tmp_path: Path) -> None:
    tree = Tree(name="中文", sources=(Source(path=Path("a.txt")),))
    save(tree, tmp_path / "runs" / "config.json")
    assert load(Tree, tmp_path / "runs" / "config.json") == tree
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["config.json"]
    assert "中文" in (tmp_path / "runs" / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("steps=1_000", "steps", 1000),
        ("name=3", "name", "3"),
        ("name=a=b", "name", "a=b"),
        ("compile=true", "compile", True),
        ("compile=auto", "compile", "auto"),
        ("clip=1", "clip", 1.0),
        ("clip=null", "clip", None),
        ("window=3", "window", 3),
        ("window=1,2", "window", (1, 2)),
        ("window=[1, 2]", "window", (1, 2)),
        ("optimizer.betas=0.8,0.9", "optimizer", Adam(betas=(0.8, 0.9))),
        ("optimizer.betas.1=0.99", "optimizer", Adam(betas=(0.9, 0.99))),
        ("optimizer.kind=sgd", "optimizer", Sgd(lr=1e-3)),
        ('optimizer={"kind": "sgd", "momentum": 0.5}', "optimizer", Sgd(momentum=0.5)),
        ("rope.theta=5e5", "rope", Rope(theta=5e5)),
        ("sources.0.path=b.txt", "sources", (Source(path=Path("b.txt"), weight=2.0),)),
        ('sources=[{"path": "c"}]', "sources", (Source(path=Path("c")),)),
        ("mix.code=0.5", "mix", {"code": 0.5}),
        ("notes=a,3", "notes", ["a", "3"]),
        ("span=3,4", "span", (3, "4")),
        ("windows=4,null", "windows", (4, None)),
    ],
)
def test_override_parses_values_by_field_type(setting: str, name: str, value: object) -> None:
    tree = Tree(clip=2.0, sources=(Source(path=Path("a.txt"), weight=2.0),))
    got = override(tree, [setting])
    assert getattr(got, name) == value
    assert type(getattr(got, name)) is type(value)
    assert replace(got, **{name: getattr(tree, name)}) == tree


def test_dependent_settings_work_in_any_order() -> None:
    settings = ["optimizer.momentum=0.9", "optimizer.kind=sgd"]
    assert override(Tree(), settings) == override(Tree(), settings[::-1])
    assert override(Tree(), settings).optimizer == Sgd(lr=1e-3, momentum=0.9)


@pytest.mark.parametrize(
    ("data", "error", "says", "hint"),
    [
        ({"stepz": 1}, UnknownName, "'stepz'", "'steps'"),
        ({"optimizer": {"kind": "adam", "momentum": 1.0}}, UnknownName, "'optimizer.momentum'", "known"),
        ({"rope": {"thta": 1.0}}, UnknownName, "'rope.thta'", "'rope.theta'"),
        ({"steps": True}, ConfigError, "steps: expected an integer, got true", ""),
        ({"steps": 1.0}, ConfigError, "steps: expected an integer, got 1.0", ""),
        ({"steps": "1"}, ConfigError, 'steps: expected an integer, got "1"', ""),
        ({"steps": None}, ConfigError, "steps: expected an integer, got null", ""),
        ({"clip": "1"}, ConfigError, "clip: expected a number", ""),
        ({"clip": float("nan")}, ConfigError, "clip: nan is not finite", ""),
        ({"dtype": "fp8"}, UnknownName, "dtype: unknown value 'fp8'; expected one of bf16, fp32", ""),
        ({"compile": 1}, ConfigError, "compile: expected true or false or 'auto', got 1", ""),
        ({"sources": [{"path": "a"}, {"weight": 1}]}, ConfigError, "sources.1.path: has no default", "sources.1.path"),
        ({"sources": "a"}, ConfigError, "sources: expected a list of an object", ""),
        ({"optimizer": {"lr": 1}}, ConfigError, "optimizer: has no kind", "adam, sgd"),
        ({"optimizer": {"kind": "adm"}}, UnknownName, "optimizer.kind: unknown value 'adm'", "adam"),
        ({"optimizer": {"kind": "adam", "betas": [1.0]}}, ConfigError, "optimizer.betas: expected 2 items, got 1", ""),
        ({"optimizer": {"kind": "adam", "betas": [1.0, "x"]}}, ConfigError, "optimizer.betas.1: expected a number", ""),
        ({"rope": {"theta": -1}}, ArgumentError, "rope: theta is -1.0", "10000"),
        ({"window": [1, "x"]}, ConfigError, "window.1: expected an integer", ""),
        ([], ConfigError, "the configuration: expected an object", ""),
    ],
)
def test_from_dict_errors_name_the_key(data: object, error: type[BaguError], says: str, hint: str) -> None:
    with pytest.raises(error) as caught:
        from_dict(Tree, data)
    assert says in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("steps", "'steps' is not a setting"),
        ("=1", "'=1' is not a setting"),
        ("stepz=1", "there is no setting 'stepz'"),
        ("optimizer.momentum=1", "there is no setting 'optimizer.momentum'"),
        ("steps=1.5", 'steps: expected an integer, got "1.5"'),
        ("steps=null", 'steps: expected an integer, got "null"'),
        ("clip=inf", "clip: inf is not finite"),
        ("compile=maybe", "compile: expected true or false or 'auto', got \"maybe\""),
        ("steps.x=1", "steps.x: steps is an integer and has no keys"),
        ("sources.0.path=a", "sources.0: sources has no items"),
        ("optimizer.kind=lion", "optimizer.kind: unknown value 'lion'"),
        ("rope.theta=-1", "rope: theta is -1.0"),
    ],
)
def test_override_errors_name_the_key(setting: str, says: str) -> None:
    with pytest.raises(BaguError) as caught:
        override(Tree(), [setting])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("stepz=1", "did you mean 'steps'?"),
        ("optimizer.lrr=1", "did you mean 'optimizer.lr'?"),
        ("lr=1", "did you mean 'optimizer.lr'?"),  # the same name elsewhere wins over a similar name here
        ("train.lr=1", "did you mean 'optimizer.lr'?"),
        ("optimizer.kind=sgdd", "did you mean 'sgd'?"),  # the key is right, the value is wrong
    ],
)
def test_unknown_settings_suggest_a_known_one(setting: str, hint: str) -> None:
    with pytest.raises(BaguError) as caught:
        override(Tree(), [setting])
    assert caught.value.hint == hint


def test_diff_lines() -> None:
    old = Tree(sources=(Source(path=Path("a")),))
    new = override(old, ["optimizer.lr=3e-4", "sources=[]", "name=x"])
    assert diff(old, new) == [
        'name: "" → "x"',
        "optimizer.lr: 0.001 → 0.0003",
        'sources.0.path: "a" → absent',
        "sources.0.weight: 1.0 → absent",
        "sources: absent → []",
    ]
    assert diff(to_dict(old), new) == diff(old, new)


def test_equal_trees_have_equal_fingerprints() -> None:
    assert fingerprint(Sgd(lr=1)) == fingerprint(Sgd(lr=1.0))
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint(Sgd(lr=1)) != fingerprint(Sgd(lr=2))
    assert fingerprint({"a.b": 1}) != fingerprint({"a": {"b": 1}})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"steps": 1,\n}', ":2: not JSON"),
        ('{"steps": 1, "steps": 2}', "duplicate key 'steps'"),
        ('{"stepz": 1}', "there is no setting 'stepz'"),
        ("\xff", "cannot read"),
    ],
)
def test_load_errors_name_the_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BaguError) as caught:
        load(Tree, path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="does not exist"):
        load(Tree, tmp_path / "absent.json")


def test_save_refuses_numbers_that_are_not_finite(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr: inf is not finite"):
        save(Tree(optimizer=Sgd(lr=float("inf"))), tmp_path / "config.json")
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    kind: str

    @abstractmethod
    def area(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Square(Shape):
    kind: Literal["square"] = "square"
    side: float = 1.0

    def area(self) -> float:
        return self.side**2


@dataclass(frozen=True, kw_only=True)
class Rectangle(Square):
    """A subclass of a subclass, with a kind of its own."""

    kind: Literal["rectangle"] = "rectangle"  # type: ignore[assignment]
    height: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Drawing:
    shape: Shape = field(default_factory=Square)


def test_an_abstract_dataclass_is_the_union_of_its_subclasses() -> None:
    drawing = Drawing(shape=Rectangle(side=3.0))
    assert from_dict(Drawing, json.loads(json.dumps(to_dict(drawing)))) == drawing
    assert override(Drawing(shape=Square(side=3.0)), ["shape.height=5", "shape.kind=rectangle"]) == Drawing(
        shape=Rectangle(side=3.0, height=5.0)
    )

    @dataclass(frozen=True, kw_only=True)
    class Circle(Shape):
        kind: Literal["circle"] = "circle"
        radius: float = 1.0

        def area(self) -> float:
            return 3.14 * self.radius**2

    assert override(drawing, ["shape.kind=circle"]).shape == Circle()  # known as soon as it is defined
    refusals = [
        ({"shape": {"side": 1.0}}, "shape: has no kind"),
        ({"shape": {"kind": "squar"}}, "shape.kind: unknown value 'squar'"),
        ({"shape": {"kind": "square", "height": 1.0}}, "'shape.height'"),
        ({"shape": 3}, "shape: expected an object, got 3"),
    ]
    for data, said in refusals:
        with pytest.raises(BaguError, match=said):
            from_dict(Drawing, data)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("optimizer.momentum=0.9", "it belongs to kind sgd: set optimizer.kind too"),
        ("optimizer=sgd", "set optimizer.kind to one of adam, sgd"),
    ],
)
def test_a_setting_of_another_kind_says_which(setting: str, hint: str) -> None:
    with pytest.raises(BaguError) as caught:
        override(Tree(), [setting])
    assert caught.value.hint == hint
