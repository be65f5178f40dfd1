"""Tables of what no suite measures any more: 6013456878 is the last commit that has the suites."""

from collections.abc import Callable

from benchmarks import records
from benchmarks.records import Rows
from benchmarks.render import Table, markdown, source
from benchmarks.suites.formats.tables import torchao

KINDS = ("drop-in", "chain")


def checksums(rows: Rows) -> Table:
    found = records.select(rows, bench="checkpoint", metric="save_s")
    body = [[row["impl"], f"{row['value']:.2f} s", f"{100 * row['share']:.1f} %",
             f"{100 * (row['ratio'] - 1):+.1f} %"] for row in found]  # fmt: skip
    return ["saving", "time", "summing, of the rest", "median of pairs"], body, found


def composition(rows: Rows) -> Table:
    """Bytes per parameter, of the drop-in's state and of both kinds' temporaries."""
    found, body = records.select(rows, bench="composition"), []
    for name, of in records.grouped(found, "case", "impl", "metric").items():
        temporaries = [f"{of[kind]['temp_bytes_per_param']['value']:.1f}" for kind in KINDS]
        state = f"{of['drop-in']['state_bytes_per_param']['value']:.2f}"
        body.append([f"`{name}`", state, *temporaries])
    return ["", "state", "temporaries of a step, drop-in", "chain"], body, found


def instructions(rows: Rows) -> Table:
    """What a step takes; the first five are of steps that each have one thing less."""
    found, body = records.select(rows, bench="instructions"), []
    for index, row in enumerate(found):
        saved = f"{found[index - 1]['value'] - row['value']:.1f}" if 0 < index < 5 else ""
        often = ", ".join(f"{one} {count}" for one, count in list(row["names"].items())[:6])
        body.append([row["impl"], f"{row['value']:.1f}", saved, often])
    head = ["step", "instructions per element", "fewer than above", "most often, in its code"]
    return head, body, found


def masters(rows: Rows) -> Table:
    found = records.select(rows, bench="masters")
    body = [[row["case"], row["impl"], f"{row['value']:.2f} ms", f"{row['ratio_to_nearest']:.3f}"]
            for row in found]  # fmt: skip
    return ["step", "kernel and rounding", "time", "to nearest"], body, found


def rendered(make: Callable[[Rows], Table]) -> Callable[[Rows], str]:
    def table(rows: Rows) -> str:
        head, body, used = make(records.newest(rows))
        return markdown(head, body) + source(used)

    return table


MADE = (checksums, composition, instructions, masters, torchao)
TABLES = {make.__name__: rendered(make) for make in MADE}
