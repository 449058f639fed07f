"""The SAS program has the layers and sizes asked for; its table is read back, and a wrong one is refused."""

from pathlib import Path

import pytest

from bagu.bench.layer_list import LAYERS
from bagu.bench.sas import read_sas, sas_lines, write_sas
from bagu.errors import BaguError


def test_a_program_is_written_and_its_table_read(tmp_path: Path) -> None:
    path = tmp_path / "timing.sas"
    assert write_sas(path, LAYERS["cpu"], (1, 8)) == ["linear", "conv2d", "batch_norm_relu"]
    assert path.read_text(encoding="utf-8").count("deepLearn.dlScore /") == 6
    table = tmp_path / "sas_layers.csv"
    table.write_text("layer,batch,pass,seconds,machine\nlinear,8,forward,0.004,node7\n", encoding="utf-8")
    (row,) = read_sas(table)
    ours = {"layer": "linear", "batch": 8, "pass": "forward", "implementation": "bagu", "median_s": 0.001}
    (line,) = sas_lines([row], [ours])
    assert line == "sas on node7: linear, batch 8, forward: 4.000 ms, bagu here 1.000 ms (4.00x)"
    table.write_text("layer,batch,pass,seconds,machine\nlinear,8,forward,soon,node7\n", encoding="utf-8")
    with pytest.raises(BaguError, match="not numbers"):
        read_sas(table)
