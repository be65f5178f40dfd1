"""Times a torch optimizer, in a process of its own: reads a case, prints one JSON line.

python -m benchmarks.peers.in_torch < case.json, from benchmarks.peers.processes. It imports no
jax, and torch only where it is installed.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import operator
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# implementation -> (package, dtype of weights and gradients)
IMPLEMENTATIONS = {
    "flashoptim": ("flashoptim", "bfloat16"),
    "torch-fused": ("torch", "float32"),
    "bitsandbytes": ("bitsandbytes", "bfloat16"),
}
# (implementation, optimizer) -> (class, arguments beside the hyperparameters)
CLASSES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("flashoptim", "adamw"): ("FlashAdamW", {}),
    ("flashoptim", "lion"): ("FlashLion", {}),
    ("flashoptim", "sgd"): ("FlashSGD", {}),
    ("torch-fused", "adamw"): ("optim.AdamW", {"fused": True}),
    ("torch-fused", "sgd"): ("optim.SGD", {"fused": True}),
    ("bitsandbytes", "adamw"): ("optim.AdamW8bit", {}),
    ("bitsandbytes", "lion"): ("optim.Lion8bit", {}),
    # small leaves would be 32-bit, which has no momentum kernel for bf16
    ("bitsandbytes", "sgd"): ("optim.SGD8bit", {"min_8bit_size": 0}),
}
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace
WARM_UP, STEPS = 3, 10


def unavailable(implementation: str, optimizer: str) -> str | None:
    """Return why an implementation cannot run here, or None; import nothing but torch."""
    package, _ = IMPLEMENTATIONS[implementation]
    if (implementation, optimizer) not in CLASSES:
        return f"{package} has no such {optimizer}"
    for name in ("torch", package):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    there = importlib.import_module("torch").cuda.is_available()
    return None if there else "torch finds no GPU"


def versions(package: str) -> str:
    names = dict.fromkeys([package, "torch"])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def tensors(value: Any) -> dict[int, Any]:
    """The tensors on the device in an optimizer's state, also inside a peer's own classes.

    By address: one that several leaves share (a code book) counts once.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return {value.data_ptr(): value} if value.is_cuda else {}
    if hasattr(value, "__dict__"):
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {at: tensor for part in parts for at, tensor in tensors(part).items()}


def size(found: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(found).values())


def device_ms(trace: dict[str, Any]) -> float:
    """Milliseconds of kernels, copies and fills of a profiler's trace."""
    durations = [e["dur"] for e in trace["traceEvents"] if e.get("cat") in ON_DEVICE]
    if not durations:
        raise RuntimeError("the profiler saw nothing on the device")
    return sum(durations) / 1e3


def profiled(step: Callable[[], Any]) -> float:
    """Milliseconds on the device of one step: these optimizers' launches take longer."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return device_ms(json.loads(path.read_text(encoding="utf-8"))) / STEPS


def wall(step: Callable[[], Any]) -> float:
    """Milliseconds of one step, with what Python takes to launch it."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / STEPS * 1e3


def build(case: dict[str, Any]) -> tuple[Any, list[Any]]:
    import torch

    package, dtype = IMPLEMENTATIONS[case["implementation"]]
    torch.manual_seed(0)

    def random(shape: list[int], scale: float) -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda").normal_(0, scale)

    params = [torch.nn.Parameter(random(s, case["weight_scale"])) for s in case["shapes"]]
    for param in params:
        param.grad = random(param.shape, case["gradient_scale"])
    name, more = CLASSES[case["implementation"], case["optimizer"]]
    make = operator.attrgetter(name)(importlib.import_module(package))
    hyper = {"lr" if k == "learning_rate" else k: v for k, v in case["hyper"].items()}
    return make(params, **hyper, **more), params


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Measure for a torch implementation what `benchmarks.peers.device_loop` finds of a JAX one."""
    import torch

    optimizer, params = build(case)
    for _ in range(WARM_UP):
        optimizer.step()
    torch.cuda.synchronize()
    weights, grads = size(params), size([p.grad for p in params])
    state = size([optimizer.state[param] for param in params])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    profiled(optimizer.step)  # the first starts the profiler
    times = [profiled(optimizer.step) for _ in range(case["repeats"])]
    return {
        "times": times,
        "wall_ms": statistics.median(wall(optimizer.step) for _ in range(case["repeats"])),
        "moved_bytes": grads + 2 * (weights + state),
        "live_bytes": grads + weights + state,
        "peak_bytes": peak,
        "temp_bytes": peak - before,
        "steps": STEPS,
        "version": versions(IMPLEMENTATIONS[case["implementation"]][0]),
    }


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    """Measurements, or why there are none."""
    reason = unavailable(case["implementation"], case["optimizer"])
    if reason is not None:
        return {"skipped": reason}
    try:
        return measure(case)
    except Exception as error:  # the others are still worth their time
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


if __name__ == "__main__":
    print(json.dumps(outcome(json.load(sys.stdin))))
