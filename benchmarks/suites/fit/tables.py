"""Table 8's shape: what fits on one GPU by optimizer and activations, from fit's records."""

from benchmarks.records import Rows, on_gpus
from benchmarks.render import Rendered, Table

GIB = 2.0**30
BASE = "optax.adamw"
COAT = "coat_adamw+fp8"
ALL = "all"


def fits(rows: Rows) -> dict[str, dict[str, dict[str, dict]]]:
    """case -> configuration -> metric -> record, of the device measured last for each case."""
    here = [row for row in on_gpus(rows) if row["bench"] == "fit"]
    found: dict[str, dict[str, dict[str, dict]]] = {}
    for row in here:
        last = [r for r in here if r["case"] == row["case"]][-1]
        if (row["device"], row["jax"]) == (last["device"], last["jax"]):
            found.setdefault(row["case"], {}).setdefault(row["impl"], {})[row["metric"]] = row
    return found


def value(of: dict[str, dict], metric: str) -> float | None:
    """A record's, or None."""
    return of[metric]["value"] if metric in of else None


def table(rows: Rows) -> Table:
    """Bytes, the largest batch, and tokens a second at it and at a batch that all can run."""
    found = fits(rows)
    body, used = [], []
    for case, own in found.items():
        models = {name: of for name, of in own.items() if "max_batch" in of}
        common = value(own.get(ALL, {}), "common_batch")
        base = None
        for name, of in models.items():
            most = int(of["max_batch"]["value"])
            at = [found.get(f"{case}-b{int(b)}", {}).get(name, {}) if b else {}
                  for b in (common, most)]  # fmt: skip
            rates = [value(one, "tokens_per_s") for one in at]
            base = base or rates[1]
            peak = value(at[0], "peak_bytes") or value(at[0], "planned_bytes")
            body.append([
                case, f"`{name}`", f"{of['own_bytes']['value'] / GIB:.1f}",
                f"{of['sequence_bytes']['value'] / GIB:.2f}" if most else "",
                f"{peak / GIB:.1f} (batch {int(common)})" if peak else "",
                str(most) if most else "out of memory",
                *(f"{rate:,.0f}" if rate else "" for rate in rates),
                f"{rates[1] / base:.2f} x" if rates[1] and base else "",
            ])  # fmt: skip
            used += [*of.values(), *(row for one in at for row in one.values())]
    head = ["model", "optimizer, activations", "weights and state, GiB", "a sequence more, GiB",
            "peak, GiB", "largest batch", "tokens/s at the same batch", "tokens/s at the largest",
            "x the first that fits"]  # fmt: skip
    return head, body, used


TABLES = {"activation_fit": Rendered(table, "fit")}
