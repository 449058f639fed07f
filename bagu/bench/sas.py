"""Layers timed by SAS: a program for the owner of a licence to run, and the reader of the table that it writes.

No SAS was run for bagu: it needs a licence and a server. The program is written from the documentation of the deepLearn
action set (buildModel, addLayer, dlScore); correct it where your release differs, and keep its columns.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bagu.bench.layer_list import Layer
from bagu.config.files import write_atomic
from bagu.errors import BaguError

COLUMNS = ("layer", "batch", "pass", "seconds", "machine")
OFFERED = {  # layers of bagu bench layers that SAS has, as the options of addLayer
    "linear": "type='FC', n={outputs}, act='IDENTITY'",
    "conv2d": "type='CONVO', nFilters={channels}, width=3, height=3, stride=1, includeBias=False, act='IDENTITY'",
    "batch_norm_relu": "type='BATCHNORM', act='RELU'",
}
HEAD = """\
/* Times layers as `bagu bench layers` has them. Run it in SAS Viya with a CAS session, then:
   bagu bench layers --read-sas sas_layers.csv
   Written from the documentation; no SAS was run by bagu's authors. */
cas bagu; libname mycas cas;
data times; length layer $32 pass $16 machine $64; stop; run;
"""
LAYER = """
/* {name}, batch {batch}, input {shape} */
data mycas.input; call streaminit(0); array x{{{numbers}}}; do row = 1 to {batch};
  do i = 1 to {numbers}; x{{i}} = rand('normal'); end; y = 0; output; end; drop i; run;
proc cas; loadactionset 'deepLearn';
  deepLearn.buildModel / modelTable={{name='m', replace=True}} type='CNN';
  deepLearn.addLayer / model='m' name='data' layer={{{source}}};
  deepLearn.addLayer / model='m' name='timed' layer={{{layer}}} srcLayers={{'data'}};
  deepLearn.addLayer / model='m' name='out' layer={{type='OUTPUT', n=1, act='IDENTITY'}} srcLayers={{'timed'}};
  deepLearn.dlTrain / table='input' model='m' modelWeights={{name='w', replace=True}} target='y'
    inputs=${{x1-x{numbers}}} optimizer={{maxEpochs=1}};
  t0 = datetime(); do k = 1 to 100;
  deepLearn.dlScore / table='input' model='m' initWeights='w'; end;
  t = (datetime() - t0) / 100; call symputx('seconds', t); quit;
data row; length layer $32 pass $16 machine $64; layer = '{name}'; batch = {batch}; pass = 'forward';
  seconds = &seconds; machine = "&syshostname"; run;
proc append base=times data=row force; run;
"""
TAIL = "\nproc export data=times outfile='sas_layers.csv' dbms=csv replace; run;\n"


def write_sas(path: Path, layers: Mapping[str, Layer], batches: tuple[int, ...]) -> list[str]:
    """Write the program for the layers that SAS has; return their names."""
    offered = [layers[name] for name in OFFERED if name in layers]
    if not offered:
        raise BaguError("SAS has none of these layers", hint=f"give some of {', '.join(OFFERED)}")
    parts = [HEAD]
    for layer in offered:
        numbers = 1
        for size in layer.shape:
            numbers *= size
        channels = layer.shape[0]
        image = f"type='INPUT', nChannels={channels}, width={layer.shape[-1]}, height={layer.shape[-2]}"
        source = (
            image if len(layer.shape) == 3 else f"type='INPUT', nChannels=1, width={layer.shape[-1]}, height={channels}"
        )
        made = OFFERED[layer.name].format(outputs=4 * layer.shape[-1], channels=channels)
        parts += [
            LAYER.format(name=layer.name, batch=b, shape=list(layer.shape), numbers=numbers, source=source, layer=made)
            for b in batches
        ]
    write_atomic(path, "".join([*parts, TAIL]))
    return [layer.name for layer in offered]


def read_sas(path: Path) -> list[dict[str, Any]]:
    """The rows of the table that the program wrote, as rows of the benchmark; their machine is the user's."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        found = list(csv.DictReader(file))
    rows = []
    for number, row in enumerate(found, start=2):
        named = {str(key).strip().casefold(): (value or "").strip() for key, value in row.items()}
        if missing := [c for c in COLUMNS if not named.get(c)]:
            raise BaguError(f"{path}:{number}: no {missing[0]}", hint=f"the columns are {', '.join(COLUMNS)}")
        try:
            batch, seconds = int(float(named["batch"])), float(named["seconds"])
        except ValueError:
            raise BaguError(f"{path}:{number}: batch and seconds are not numbers", hint="correct the line") from None
        if batch < 1 or not 0 < seconds < float("inf"):
            raise BaguError(f"{path}:{number}: batch {batch}, {seconds} s", hint="both are above 0")
        rows.append(
            {
                "layer": named["layer"],
                "batch": batch,
                "pass": named["pass"],
                "implementation": "sas",
                "median_s": seconds,
                "per_s": batch / seconds,
                "machine": named["machine"],
            }
        )
    if not rows:
        raise BaguError(f"{path} has no rows", hint="run the program of --write-sas first")
    return rows


def sas_lines(theirs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each time of SAS that has one of bagu beside it, with the name of its machine."""
    lines = []
    for row in theirs:
        same = [
            r for r in ours if all(r[k] == row[k] for k in ("layer", "batch", "pass")) and r["implementation"] == "bagu"
        ]
        lines += [
            f"sas on {row['machine']}: {row['layer']}, batch {row['batch']}, {row['pass']}: "
            f"{1e3 * row['median_s']:.3f} ms, bagu here {1e3 * r['median_s']:.3f} ms "
            f"({row['median_s'] / r['median_s']:.2f}x)"
            for r in same
        ]
    return lines
