"""The plants are what their textbooks say, and their optimum is one."""

import numpy as np
import pytest

from bagu.process.plants import PLANTS
from bagu.process.plants.history import csv_text, history
from bagu.process.plants.weld import physics
from bagu.process.table import parse_csv


def test_the_welded_beam_costs_what_is_published() -> None:
    best = {"weld_leg": 0.205730, "weld_length": 3.470489, "bar_height": 9.036624, "bar_width": 0.205730}
    found = physics({k: np.array([v]) for k, v in {**best, "load": 6000.0, "filler_price": 1.0}.items()})
    assert found["cost"][0] == pytest.approx(1.724852, abs=1e-5)
    assert found["shear"][0] == pytest.approx(13600, rel=1e-4) and found["bending"][0] == pytest.approx(30000, rel=1e-4)
    assert found["reserve"][0] == pytest.approx(1, rel=1e-4)


def test_a_quarter_wave_layer_reflects_what_fresnel_says() -> None:
    coating = PLANTS["coating"]
    bare = {
        "outer_thickness": 0.0,
        "inner_thickness": 0.0,
        "outer_density": 0.0,
        "substrate_index": 1.5,
        "inner_index": 2.0,
    }
    found = coating.physics({k: np.array([v]) for k, v in bare.items()})
    assert found["reflectance"][0] == pytest.approx(4.0)  # ((1.5 - 1) / (1.5 + 1))²


@pytest.mark.parametrize("name", PLANTS)
def test_nothing_beats_the_optimum_and_operators_are_below_it(name: str) -> None:
    plant, past = PLANTS[name], history(PLANTS[name], 60, 5)
    for c in past.c[:3]:
        settings, best = plant.optimum(c)
        tries = np.random.default_rng(9).random((4000, len(settings)))
        assert plant.merit(tries, np.repeat(c[None], 4000, 0)).max() <= best + 1e-9
        assert past.operators(c) < best


def test_a_history_goes_through_csv_and_is_a_function_of_its_seed() -> None:
    a, b = (history(PLANTS["weld"], 40, 7, batches=True) for _ in range(2))
    assert csv_text(a.table) == csv_text(b.table)
    table = parse_csv(csv_text(a.table).encode())
    assert table.names == a.table.names
    np.testing.assert_allclose(table["cost"].values, a.table["cost"].values, rtol=1e-5)
    assert table["stamp"].kind == "time" and table["shear"].unit == "psi"
