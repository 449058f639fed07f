"""A turbojet in cruise at Mach 0.8: thrust-specific fuel consumption by the Brayton cycle with component losses.

Stations and symbols as in Mattingly, Elements of Gas Turbine Propulsion: 2 compressor inlet, 3 its outlet, 4 turbine
inlet, 5 turbine outlet, 9 nozzle. Settings are the pressure ratio, the turbine inlet temperature and the cooling
bleed; the ambient temperature and the wear of the blades are given. Efficiencies fall away from the design pressure
ratio of 18 and where the cooled metal is above 1350 K.
"""

import numpy as np

from bagu.process.plants.plant import Input, Plant, Values

GAMMA, CP, HEATING, MACH, GAS = 1.4, 1005.0, 42.8e6, 0.8, 287.0  # -, J/(kg K), J/kg, -, J/(kg K)


def physics(v: Values) -> Values:
    ratio, t4, bleed, t0, wear = v["pressure_ratio"], v["turbine_temp"], v["bleed"] / 100, v["ambient"], v["wear"]
    power = (GAMMA - 1) / GAMMA
    ram = 1 + (GAMMA - 1) / 2 * MACH**2
    compressor = 0.88 - 0.06 * wear - 0.08 * ((ratio - 18) / 22) ** 2
    turbine = 0.9 - 0.04 * wear - 6e-5 * np.maximum(t4 * (1 - 1.2 * bleed) - 1350, 0)
    t2 = t0 * ram
    t3 = t2 * (1 + (ratio**power - 1) / compressor)
    fuel = np.maximum(CP * (t4 - t3) / HEATING, 1e-4)
    t5 = t4 * (1 - 0.3 * bleed) - (t3 - t2) / (1 - bleed)
    expansion = np.clip(1 - (1 - t5 / t4) / turbine, 0.05, 1) ** (1 / power)
    nozzle = np.maximum(ram ** (1 / power) * ratio * expansion * 0.95, 1.02)
    jet = np.sqrt(np.maximum(2 * CP * t5 * (1 - nozzle**-power), 1.0))
    thrust = np.maximum((1 + fuel) * (1 - bleed) * jet - MACH * np.sqrt(GAMMA * GAS * t0), 60.0)
    return {"tsfc": 3600 * fuel / thrust}


TURBOJET = Plant(
    name="turbojet",
    settings=(Input("pressure_ratio", "", 4, 40), Input("turbine_temp", "K", 1200, 1800), Input("bleed", "%", 0, 15)),
    contexts=(Input("ambient", "K", 230, 300), Input("wear", "", 0, 1)),
    target="tsfc",
    unit="kg/(N h)",
    goal="min",
    physics=physics,
)
