"""Records and the printed table of a run of the step benchmark."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.peers.processes import Case

BASE = "optax-f32"
UNITS = {"device_ms": "ms", "compile_s": "s", "temp_bytes": "bytes", "peak_bytes": "bytes"}
RATIOS = ("device_ms", "compile_s")
# fields that say more about a metric, where an outcome has them
DETAILS = {
    "device_ms": ("steps", "moved_bytes", "loop_temp_bytes", "call_ms", "wall_ms", "version"),
    "temp_bytes": ("unaliased_bytes", "live_bytes"),
    "peak_bytes": ("live_bytes", "setup_peak_bytes"),
}
HEAD = ("case", "implementation", "ms", "of bound", "x optax", "temp MB", "peak MB", "compile s")
STARTED = time.perf_counter()


def say(case: Case, name: str, what: str) -> None:
    """Progress."""
    seconds = time.perf_counter() - STARTED
    print(f"[{seconds:4.0f} s] {'/'.join(case):<20} {name:<22} {what}", flush=True)


class Report:
    """Records of a run, each stored as it comes so that a run that is cut off loses none.

    Attributes:
      best: of the times of a step, the one that is recorded.
      tbps: the speed of a copy in this run, measured a few times.
      store: takes new rows.
      rows: every record so far.
      failed: whether an implementation did.
    """

    def __init__(self, best: Callable, tbps: list[float], store: Callable[[list], None]) -> None:
        self.best, self.tbps, self.store = best, tbps, store
        self.rows: list[dict[str, Any]] = []
        self.failed = False

    def copy(self, case: Case) -> None:
        """Records the speed of a copy."""
        spread = [min(self.tbps), max(self.tbps)]
        rate = statistics.median(self.tbps)
        self._add(self._record(case, "copy", "copy_tbps", rate, "TB/s", spread=spread))

    def outcome(self, case: Case, name: str, outcome: dict[str, Any]) -> None:
        """Records what one implementation did in one case."""
        for why in ("skipped", "failed"):
            if why in outcome:
                self.failed |= why == "failed"
                return say(case, name, f"{why}: {outcome[why]}")
        if "times" in outcome:
            outcome = {**outcome, "device_ms": self.best(outcome["times"])}
        found = [metric for metric in UNITS if metric in outcome]
        rows = [self._row(case, name, metric, outcome) for metric in found]
        if "device_ms" in outcome:
            rows.append(self._share(case, name, outcome))
        self._add(*rows)
        say(case, name, ", ".join(f"{metric} {outcome[metric]:.4g}" for metric in found))

    def value(self, case: str, name: str, metric: str) -> float | None:
        """A value of this run."""
        for row in reversed(self.rows):
            if (row["case"], row["impl"], row["metric"]) == (case, name, metric):
                return row["value"]
        return None

    def table(self) -> str:
        """A line for each case and implementation."""
        lines = [HEAD, *map(self._line, dict.fromkeys((r["case"], r["impl"]) for r in self.rows))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if index < 2 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )

    def _line(self, key: tuple[str, str]) -> tuple[str, ...]:
        case, name = key
        if name == "copy":
            rate = f"{self.value(case, name, 'copy_tbps'):.3f} TB/s"
            return case, name, rate, *[""] * (len(HEAD) - 3)

        def cell(metric: str, form: str, unit: float = 1.0) -> str:
            value = self.value(case, name, metric)
            return "" if value is None else format(value / unit, form)

        ms, base = (self.value(case, n, "device_ms") for n in (name, BASE))
        return (
            case,
            name,
            cell("device_ms", ".3f"),
            cell("bound_share", ".0%"),
            f"{ms / base:.2f}" if ms and base else "",
            cell("temp_bytes", ".1f", 1e6),
            cell("peak_bytes", ".1f", 1e6),
            cell("compile_s", ".1f"),
        )

    def _row(self, case: Case, name: str, metric: str, outcome: dict[str, Any]) -> dict[str, Any]:
        more = {key: outcome[key] for key in DETAILS.get(metric, ()) if key in outcome}
        if metric == "device_ms":
            times = outcome["times"]
            more |= {"median": statistics.median(times), "spread": [min(times), max(times)]}
        value = outcome[metric]
        base = value if name == BASE else self.value("/".join(case), BASE, metric)
        if metric in RATIOS and base is not None:
            more["ratio_to_optax"] = value / base
        return self._record(case, name, metric, value, UNITS[metric], **more)

    def _share(self, case: Case, name: str, outcome: dict[str, Any]) -> dict[str, Any]:
        """Time that the bytes alone would take, as a share of the step's."""
        rate = statistics.median(self.tbps)
        bound = outcome["moved_bytes"] / rate / 1e9
        more = {"bound_ms": bound, "moved_bytes": outcome["moved_bytes"], "copy_tbps": rate}
        return self._record(case, name, "bound_share", bound / outcome["device_ms"], "1", **more)

    def _record(
        self, case: Case, name: str, metric: str, value: float, unit: str, **more: Any
    ) -> dict[str, Any]:
        return records.record("step", "/".join(case), name, metric, value, unit, **more)

    def _add(self, *rows: dict[str, Any]) -> None:
        self.rows += rows
        self.store(list(rows))


class Storage:
    """Appends records to a file; on a CPU only what is compared there, times."""

    def __init__(self, to: str | bool | None, on_cpu: bool) -> None:
        self.to, self.on_cpu = to, on_cpu

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        kept = [r for r in rows if not self.on_cpu or r["metric"] in RATIOS]
        if self.to and kept:
            records.append(kept, Path(self.to) if isinstance(self.to, str) else None)
