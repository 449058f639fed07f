"""Four plants whose physics and optimum are known: the truth against which recommendations are scored."""

from bagu.errors import UnknownName
from bagu.process.plants.coating import COATING
from bagu.process.plants.plant import Plant
from bagu.process.plants.reactor import REACTOR
from bagu.process.plants.turbojet import TURBOJET
from bagu.process.plants.weld import WELD

PLANTS = {plant.name: plant for plant in (WELD, COATING, TURBOJET, REACTOR)}


def plant(name: str) -> Plant:
    UnknownName.check("plant", name, PLANTS)
    return PLANTS[name]
