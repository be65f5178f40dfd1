"""Levels of XLA's optimization for programs of tests on a CPU."""

from importlib.metadata import version

QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
FULL_COMPILE = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
# Of programs that are compared bit for bit: both contract multiply-adds alike
SAME_BITS: dict[str, bool | int] = dict(QUICK_COMPILE)
# From 0.11 on the flag is unknown; in 0.9 the other emitters round to FP8 twice.
if version("jaxlib").startswith("0.10."):
    # MLIR's emitters of fusions take a third of the time of a compilation
    QUICK_COMPILE["xla_cpu_use_fusion_emitters"] = False
    FULL_COMPILE["xla_cpu_use_fusion_emitters"] = True
    SAME_BITS["xla_cpu_use_fusion_emitters"] = True

# Devices of one CPU wait in a collective for each other, over 40 s where other work has its cores
_PATIENT = {"xla_cpu_collective_call_terminate_timeout_seconds": 300}
_FLAGS = {**QUICK_COMPILE, **_PATIENT}
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _FLAGS.items())
