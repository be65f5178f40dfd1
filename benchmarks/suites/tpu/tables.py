"""The table of steps compiled for TPUs: what they move and hold."""

from benchmarks.records import Rows, grouped, select
from benchmarks.render import Rendered, Table
from benchmarks.suites.tpu.cases import BASE, LEAVES

_CYCLES = "128256x2048"  # the case whose cycles are shown
_Values = dict[str, float]  # of the metrics of a program


def steps(rows: Rows) -> Table:
    """A line for each step, and the values of each case, of all chips where they differ."""
    found, body = select(rows, bench="tpu"), []
    made = grouped(found, "impl", "case", "device", "metric")

    def values(impl: str, case: str) -> dict[str, _Values]:
        of = made.get(impl, {}).get(case, {})
        return {chip: {name: row["value"] for name, row in of[chip].items()} for chip in sorted(of)}

    bases = values(BASE, _CYCLES)
    for impl in made:
        cells = []
        for case in LEAVES:
            of = values(impl, case).values()
            cells.append([f"{one['traffic_ratio']:.2f} x, {one['temp_bytes'] / 1e6:,.1f} MB"
                          for one in of])  # fmt: skip
        cells.append([f"{one['cycles'] / bases[chip]['cycles']:.1f} x"
                      for chip, one in values(impl, _CYCLES).items()
                      if "cycles" in one and chip in bases])  # fmt: skip
        body.append([f"`{impl}`", *(" / ".join(dict.fromkeys(each)) for each in cells)])
    return ["step", *LEAVES, f"{_CYCLES}, XLA's cycles over `{BASE}`'s"], body, found


TABLES = {"tpu": Rendered(steps, "tpu")}
