"""Files as machines and spreadsheets write them: each is read, or refused in one sentence."""

import datetime
import io

import numpy as np
import pytest

from bagu.errors import BaguError
from bagu.process.files import parse_table
from bagu.process.guess import guess
from bagu.process.schema import Schema, read_schema, schema_text, write_schema
from bagu.process.table import parse_csv

PLAIN = "temp [°C],flow,yield\n180,7.5,91.2\n182,7.6,92.0\n184,7.4,90.1\n"


@pytest.mark.parametrize(
    "data",
    [
        PLAIN.encode(),
        b"\xef\xbb\xbf" + PLAIN.encode(),
        PLAIN.encode("utf-16"),
        PLAIN.encode("utf-16-le"),
        PLAIN.encode("gb18030"),
        PLAIN.replace(",", ";").encode(),
        PLAIN.replace(",", "\t").encode(),
        PLAIN.replace(",", ";").replace(".", ",").encode(),  # decimal comma
        PLAIN.replace("\n", "\r\n").encode(),
        PLAIN.replace("temp [°C]", "temp").replace("180", "180 °C").replace("182", "182 °C").encode(),
        b"temp,flow,yield\n[C],l/min,%\n180,7.5,91.2\n182,7.6,92.0\n184,7.4,90.1\n",
    ],
)
def test_the_same_numbers_are_read(data: bytes) -> None:
    table = parse_csv(data)
    assert table.names == ["temp", "flow", "yield"]
    assert [c.kind for c in table.columns] == ["number"] * 3
    np.testing.assert_array_equal(table["temp"].values, [180, 182, 184])
    np.testing.assert_array_equal(table["yield"].values, [91.2, 92.0, 90.1])


def test_parquet_is_read_as_the_same_table_and_a_bad_one_refused() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    stamps = [datetime.datetime(2025, 3, 1), None, datetime.datetime(2025, 3, 2)]
    made = pyarrow.table({
        "temp [°C]": [180, 182, 184], "yield": [91.2, None, float("inf")], "when": stamps,
        "tool": pyarrow.array(["a", "b", None]).dictionary_encode(), "wave": [[1.0], [2.0], [3.0]],
    })  # fmt: skip
    out = io.BytesIO()
    parquet.write_table(made, out)
    table = parse_table(out.getvalue())
    assert [(c.name, c.kind) for c in table.columns] == [
        ("temp", "number"), ("yield", "number"), ("when", "time"), ("tool", "category")
    ]  # fmt: skip
    assert table["temp"].unit == "°C" and any("wave holds list" in note for note in table.notes)
    np.testing.assert_array_equal(table["yield"].values, [91.2, np.nan, np.nan])
    assert table["when"].values[2] - table["when"].values[0] == 86400 and np.isnan(table["when"].values[1])
    assert list(table["tool"].values) == ["a", "b", ""]
    with pytest.raises(BaguError, match=r"^cannot read x\.parquet as Parquet"):
        parse_table(out.getvalue()[:200], "x.parquet")


def test_thousands_missing_words_and_text_among_numbers() -> None:
    rows = ['"1,234.5",1', '"2,000.0",NaN', "3,#DIV/0!", "4,n/a", "5,", '"6,000.25",7', "oops,8", "8,9", "9,1", "1,1"]
    table = parse_csv(("a,b\n" + "\n".join(rows)).encode())
    np.testing.assert_array_equal(table["a"].values[[0, 1, 5]], [1234.5, 2000.0, 6000.25])
    assert np.isnan(table["a"].values[6]) and np.isnan(table["b"].values[1:5]).all()
    assert any("not numbers" in note for note in table.notes)


@pytest.mark.parametrize(
    ("cells", "first_day"),
    [
        (["2025-03-01 06:00", "2025-03-02 06:00:30", "2025-03-13T07:00"], 1),
        (["01.03.2025", "02.03.2025", "13.03.2025"], 1),
        (["3/1/2025 6:00 AM", "3/2/2025 6:00 PM", "3/13/2025 6:00 PM"], 1),
        (["2025年3月1日", "2025年3月2日", "2025年3月13日"], 1),
        (["01/03/2025", "02/03/2025", "03/03/2025", "01/04/2025"], 1),  # the order of time decides
    ],
)
def test_dates_in_three_orders(cells: list[str], first_day: int) -> None:
    column = parse_csv(("when,x\n" + "\n".join(f"{c},1" for c in cells)).encode())["when"]
    assert column.kind == "time"
    assert (
        column.values[0] // 86400 * 86400
        == (np.datetime64("2025-03-01") - np.datetime64("1970-01-01")).astype(int) * 86400
    )
    assert (np.diff(column.values) > 0).all()


@pytest.mark.parametrize("data", [b"", b"\n\n", b"a,b,c\n", b"PK\x03\x04\x00\x01binary", b"a\n1,2,3\n4,5,6\n"])
def test_what_is_not_a_table_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(BaguError) as error:
        parse_csv(data, "x.csv")
    assert str(error.value).startswith("x.csv") and "\n" not in str(error.value)


def test_duplicate_names_ragged_rows_and_many_columns() -> None:
    table = parse_csv(b"x,x,,y\n1,2,3,4\n5,6\n7,8,9,10,11\n")
    assert table.names == ["x", "x.2", "column_3", "y"] and table.rows == 2
    assert any("more cells" in note for note in table.notes)
    wide = parse_csv((",".join(f"c{i}" for i in range(5000)) + "\n" + ",".join(["1"] * 5000) + "\n").encode())
    assert len(wide.columns) == 5000 and wide.rows == 1


def test_roles_are_guessed_and_kept_in_toml(tmp_path) -> None:
    rows = "\n".join(
        f"2025-01-{1 + i // 4:02d} 0{i % 4}:00,B{i // 4},{180 + 2 * (i % 5)},{20 + i * 0.137:.3f},{90 + i % 7}.5"
        for i in range(40)
    )
    table = parse_csv(f"stamp,batch,temp [°C],ambient,yield [%]\n{rows}\n".encode())
    schema = guess(table)
    assert [f.role for f in schema.columns] == ["time", "group", "setting", "context", "target"]
    assert schema["temp"].step == 2 and schema.target.goal == "max"
    write_schema(schema, tmp_path / "a.toml")
    assert read_schema(tmp_path / "a.toml") == schema
    hostile = Schema(columns=(schema["temp"].__class__(name='<script>"]\n\x00', role="setting"),))
    (tmp_path / "b.toml").write_text(schema_text(hostile), encoding="utf-8")
    assert read_schema(tmp_path / "b.toml") == hostile
