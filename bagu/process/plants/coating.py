"""A two-layer anti-reflection coating on glass: mean reflectance from 450 to 650 nm at normal incidence.

The transfer matrix of each layer is the textbook's (Macleod, Thin-Film Optical Filters): with the phase
p = 2 pi n d / lambda, [[cos p, i sin p / n], [i n sin p, cos p]]. Settings are the two thicknesses and the density of
the outer layer, which sets its index; the substrate's index and that of the inner material are given.
"""

import numpy as np

from bagu.process.plants.plant import Input, Plant, Values

WAVELENGTHS = np.linspace(450, 650, 9)  # nm


def physics(v: Values) -> Values:
    layers = ((1.38 + 0.1 * v["outer_density"], v["outer_thickness"]), (v["inner_index"], v["inner_thickness"]))
    rows = len(v["outer_thickness"])
    total = np.zeros(rows)
    for wavelength in WAVELENGTHS:
        product = np.repeat(np.eye(2, dtype=complex)[None], rows, 0)
        for index, thickness in layers:
            phase = 2 * np.pi * index * thickness / wavelength
            layer = np.empty((rows, 2, 2), complex)
            layer[:, 0, 0] = layer[:, 1, 1] = np.cos(phase)
            layer[:, 0, 1], layer[:, 1, 0] = 1j * np.sin(phase) / index, 1j * index * np.sin(phase)
            product = product @ layer
        field = product[:, 0, 0] + product[:, 0, 1] * v["substrate_index"]
        flux = product[:, 1, 0] + product[:, 1, 1] * v["substrate_index"]
        total += np.abs((field - flux) / (field + flux)) ** 2
    return {"reflectance": 100 * total / len(WAVELENGTHS)}


COATING = Plant(
    name="coating",
    settings=(
        Input("outer_thickness", "nm", 30, 180),
        Input("inner_thickness", "nm", 30, 180),
        Input("outer_density", "", 0, 1),
    ),
    contexts=(Input("substrate_index", "", 1.45, 1.95), Input("inner_index", "", 1.9, 2.2)),
    target="reflectance",
    unit="%",
    goal="min",
    physics=physics,
)
