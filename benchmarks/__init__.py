"""Benchmarks: `benchmarks.run` measures, `benchmarks.tables` writes the tables of the records.

Suites measure the programs of examples/, which are therefore on the path.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))
