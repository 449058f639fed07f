"""The welded beam of the engineering-optimization textbooks (Ragsdell and Phillips, 1976; Rao): a bar welded to a wall.

Settings are the weld's leg and length and the bar's height and width in inches; the load and the price of filler metal
are given. Cost is to be small; shear stress in the weld and bending stress are limited, and the bar must not buckle.
With a load of 6000 lb and the price at 1 the published optimum costs 1.7249 (leg 0.2057, length 3.4705, height 9.0366,
width 0.2057); tests/process/test_plants.py checks it.
"""

import numpy as np

from bagu.process.plants.plant import Input, Limit, Plant, Values

LENGTH, YOUNG, SHEAR = 14.0, 30e6, 12e6  # in, psi, psi


def physics(v: Values) -> Values:
    h, l, t, b, p = v["weld_leg"], v["weld_length"], v["bar_height"], v["bar_width"], v["load"]
    direct = p / (np.sqrt(2) * h * l)
    r = np.sqrt(l**2 / 4 + ((h + t) / 2) ** 2)
    polar = 2 * np.sqrt(2) * h * l * (l**2 / 12 + ((h + t) / 2) ** 2)
    torsion = p * (LENGTH + l / 2) * r / polar
    buckling = 4.013 * YOUNG * t * b**3 / 6 / LENGTH**2 * (1 - t / (2 * LENGTH) * np.sqrt(YOUNG / (4 * SHEAR)))
    return {
        "cost": 1.10471 * v["filler_price"] * h**2 * l + 0.04811 * t * b * (LENGTH + l),
        "shear": np.sqrt(direct**2 + direct * torsion * l / r + torsion**2),
        "bending": 6 * p * LENGTH / (b * t**2),
        "reserve": buckling / p,
    }


WELD = Plant(
    name="weld",
    settings=(
        Input("weld_leg", "in", 0.15, 0.5),
        Input("weld_length", "in", 2, 8),
        Input("bar_height", "in", 6, 10),
        Input("bar_width", "in", 0.2, 0.6),
    ),
    contexts=(Input("load", "lbf", 4500, 6500), Input("filler_price", "", 0.6, 1.4)),
    target="cost",
    unit="$",
    goal="min",
    physics=physics,
    limits=(Limit("shear", "psi", False, 13600), Limit("bending", "psi", False, 30000), Limit("reserve", "", True, 1)),
)
