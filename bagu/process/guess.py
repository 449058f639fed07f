"""Guess the role of every column from its name and its values. The guess is written to a file for a person to check."""

import re

import numpy as np

from bagu.errors import BaguError, UnknownName
from bagu.process.schema import Field, Role, Schema
from bagu.process.table import Column, Table

WORDS: dict[str, str] = {
    "time": r"^(time|date|datetime|timestamp|stamp|ts|when|zeit|datum|时间|日期|时刻)$|_(time|date|stamp)$|timestamp",
    "group": r"batch|lot(?!ion)|heat_?(no|id)|coil|campaign|charge|cassette|wafer|melt|批|炉号|批次|卷号",
    "id": r"^(id|no|nr|index|row|serial|run|sample)$|_(id|no|nr)$|serial|序号|编号",
    "target": r"yield|quality|strength|purity|defect|scrap|reject|efficien|reflect|transmi|tsfc|fuel_?cons|consumption|"
    r"hardness|roughness|cost|throughput|output|loss|conversion|selectiv|porosity|deviation|良率|产率|收率|纯度|强度|质量|能耗|成本|缺陷",
    "context": r"ambient|humid|outside|weather|raw|feedstock|supplier|material|moisture|incoming|impur|wear|age|"
    r"activity|season|shift|operator|upstream|inlet|substrate|thickness_?in|load|环境|湿度|原料|来料|磨损|班次|操作员",
    "setting": r"set_?p|_sp$|setting|temp|speed|rate|flow|press|current|voltage|power|feed|dose|rpm|time|duration|"
    r"dwell|residence|ratio|position|gap|angle|valve|thick|width|length|depth|温度|速度|流量|压力|电流|电压|功率|转速|剂量|时长",
}
LESS = r"defect|scrap|reject|cost|loss|consum|tsfc|reflect|roughness|porosity|deviation|能耗|成本|缺陷"
FEW = 12  # levels of a number that a person sets


def guess(table: Table, targets: dict[str, str] | None = None) -> Schema:
    """A schema of the table. `targets` are names of target columns with their goal; the first is the one to improve."""
    for name in targets or {}:
        UnknownName.check("column", name, table.names)
    roles = [_role(column, table.rows) for column in table.columns]
    if targets:
        roles = [
            "target" if c.name in targets else "context" if r == "target" else r
            for c, r in zip(table.columns, roles, strict=True)
        ]
    elif "target" not in roles:  # a table of experiments has its result last
        numbers = [i for i, c in enumerate(table.columns) if c.kind == "number" and roles[i] in ("setting", "context")]
        if numbers:
            roles[numbers[-1]] = "target"
    first = "time" not in roles
    goals = dict(targets or {})
    if not targets:
        named = [c.name for c, r in zip(table.columns, roles, strict=True) if r == "target"]
        goals = {name: "min" if re.search(LESS, name.casefold()) else "max" for name in named[-1:]}
    found = []
    for column, role in zip(table.columns, roles, strict=True):
        if column.kind == "time" and role != "time":
            role = "time" if first else "ignore"
        first = first and role != "time"
        if column.kind == "category" and role == "target":
            raise BaguError(f"the target {column.name} is text", hint="give a column of numbers as the target")
        found.append(_field(column, role, goals.get(column.name, "none")))
    return Schema(columns=tuple(found))


def _role(column: Column, rows: int) -> Role:
    name, filled = column.name.casefold(), column.values[~column.missing]
    distinct = len(np.unique(filled))
    if distinct == 0:
        return "ignore"
    if column.kind == "time" or (column.kind == "number" and re.search(WORDS["time"], name) and _ascends(filled)):
        return "time"
    if re.search(WORDS["group"], name) and distinct < rows:
        return "group"
    whole = column.kind == "number" and bool(np.all(filled == np.round(filled)))
    if distinct == rows and rows > 5 and (column.kind == "category" or (whole and _ascends(filled))):
        return "id"
    if re.search(WORDS["id"], name) and (column.kind == "category" or whole) and distinct > rows / 2:
        return "id"
    if column.kind == "category":
        return "ignore" if distinct > max(30, rows / 10) else "context"
    for role in ("context", "target", "setting"):  # "impurity" is not "purity"
        if re.search(WORDS[role], name):
            return role
    return "setting" if distinct <= max(FEW, rows / 10) else "context"


def _ascends(values: np.ndarray) -> bool:
    return len(values) > 2 and bool(np.all(np.diff(values) >= 0))


def _field(column: Column, role: Role, goal: str) -> Field:
    filled = column.values[~column.missing]
    low = high = step = None
    levels: tuple[str, ...] = ()
    if column.kind == "category" and role in ("setting", "context"):
        names, counts = np.unique(filled, return_counts=True)
        levels = tuple(str(names[i]) for i in np.lexsort((names, -counts)))
    elif role == "setting":
        low, high, step = float(filled.min()), float(filled.max()), resolution(filled)
    return Field(
        name=column.name,
        role=role,
        kind=column.kind,
        unit=column.unit,
        goal=goal,  # type: ignore[arg-type]
        low=low,
        high=high,
        step=step,
        levels=levels,
    )


def resolution(values: np.ndarray) -> float | None:
    """The step of a machine, if the values are on a grid of at most 200 points; else None."""
    points = np.unique(values)
    if not 2 < len(points) <= 200 or len(points) > len(values) / 3:
        return None
    step = float(np.diff(points).min())
    on_grid = np.abs((points - points[0]) / step - np.round((points - points[0]) / step)) < 1e-6
    return float(f"{step:.9g}") if on_grid.all() and (points[-1] - points[0]) / step <= 200 else None
