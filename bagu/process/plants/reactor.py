"""A stirred-tank batch of A -> B -> C, both steps of first order with Arrhenius rates: the yield of B in percent.

B = k1 / (k2 - k1) (exp(-k1 t) - exp(-k2 t)) (Levenspiel, Chemical Reaction Engineering). Too cold or too short leaves
A, too hot or too long makes C. Settings are temperature, residence time and feed concentration; the catalyst's activity
and the impurity of the raw material, which drives the second step, are given.
"""

import numpy as np

from bagu.process.plants.plant import Input, Plant, Values


def physics(v: Values) -> Values:
    inverse = 1 / v["temperature"] - 1 / 360
    first = 0.08 * v["activity"] * np.exp(-6000 * inverse)
    second = 0.01 * (1 + 2 * v["impurity"] + v["feed"]) * np.exp(-11000 * inverse)
    gap = np.where(np.abs(second - first) < 1e-9, 1e-9, second - first)
    made = first / gap * (np.exp(-first * v["residence"]) - np.exp(-second * v["residence"]))
    return {"yield": 100 * made * (1 - 0.25 * (v["feed"] - 0.6) ** 2)}


REACTOR = Plant(
    name="reactor",
    settings=(Input("temperature", "K", 320, 420), Input("residence", "min", 1, 30), Input("feed", "mol/l", 0.2, 1.0)),
    contexts=(Input("activity", "", 0.5, 1.5), Input("impurity", "%", 0, 0.3)),
    target="yield",
    unit="%",
    goal="max",
    physics=physics,
)
