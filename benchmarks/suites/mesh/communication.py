"""Bytes that GPUs send in a training step, and their time, computed from measured bandwidth.

Dtypes and collectives are those of examples/train_llama.py compiled for two GPUs. Activations that
the lookup of the embedding moves, norms and the gradients' global norm are left out.
"""

import dataclasses
from collections.abc import Callable

from _llama.config import PRESETS, Shape

from benchmarks.records import Rows, newest
from benchmarks.render import markdown, source

PRESETS_SHOWN = {"Llama-3.2-1B": "1b", "Llama-3.1-8B": "8b"}
TOKENS = 16_384  # of each GPU
HOST = 8  # GPUs
LINK = 50e9  # bytes/s of a network link of 400 Gb/s, by its data sheet
# columns: devices, and network links of a host
CLUSTERS = {
    "2 GPUs": (2, HOST),
    "8 GPUs": (8, HOST),
    f"64 GPUs, {HOST} links per host": (64, HOST),
    "64 GPUs, 1 link per host": (64, 1),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a step communicates.

    Attributes:
      name: of the layout.
      optimizer: whose step it is.
      moved: what is moved, in words.
      sent: bytes of a training step, times n / (n - 1): a function of a model and of n.
      most: the largest number of devices that the layout is for.
    """

    name: str
    optimizer: str
    moved: str
    sent: Callable[[Shape, int], float]
    most: int = 64


def matrices(shape: Shape) -> int:
    """Parameters of the layers' matrices."""
    heads = 2 * shape.head_width * (shape.heads + shape.kv_heads)
    return shape.layers * shape.width * (heads + 3 * shape.hidden)


def embedding(shape: Shape) -> int:
    """Parameters of the embedding and the output head."""
    return shape.vocab * shape.width * (1 if shape.tied else 2)


def per_parameter(of_matrices: int, of_embedding: int) -> Callable[[Shape, int], float]:
    def sent(shape: Shape, devices: int) -> float:
        del devices
        return of_matrices * matrices(shape) + of_embedding * embedding(shape)

    return sent


def of_activations(shape: Shape, devices: int) -> float:
    """Two all-reduces of a layer's activations in bf16, forward and backward."""
    return 4 * shape.layers * 2 * (2 * devices * TOKENS * shape.width)


BOTH = "`flash_adamw`, `optax.adamw`"
LAYOUTS = (
    # the gradient of the output head is reduced in f32, and its weights are gathered once
    Layout("FSDP", BOTH, "weights twice and gradients, in bf16", per_parameter(6, 6)),
    Layout("FSDP, FP8 activations", "`flash_adamw`",
           "weights' FP8 codes twice, gradients in bf16", per_parameter(4, 6)),
    Layout("ZeRO-1", "`flash_adamw`", "gradients (all-reduce) and new weights in bf16",
           per_parameter(6, 6)),
    Layout("ZeRO-1", "`optax.adamw`", "gradients (all-reduce) and new weights in f32",
           per_parameter(8, 8)),
    Layout("replicated", BOTH, "gradients (all-reduce) in bf16", per_parameter(4, 8)),
    Layout("tensor parallelism", BOTH, "activations, four all-reduces per layer",
           of_activations, HOST),
)  # fmt: skip


def seconds(layout: Layout, shape: Shape, devices: int, links: int, nvlink: float) -> float:
    """Return the time of a ring, whose slowest edge is NVLink's or a host's network."""
    edge = nvlink if devices <= HOST else min(nvlink, links * LINK)
    return sent(layout, shape, devices) / edge


def sent(layout: Layout, shape: Shape, devices: int) -> float:
    """Return the bytes that a GPU sends in a training step."""
    return layout.sent(shape, devices) * (devices - 1) / devices


def communication(rows: Rows) -> str:
    """Return a table of bytes and times, and where the bandwidth is from."""
    used = newest(rows, bench="zero")
    times = {row["impl"]: row for row in used}
    if not times:
        return "No record yet.\n"
    zero, fsdp = times["ZeRO-1"], times["FSDP"]
    received = zero["parameters"] * 2 / 2  # bf16, the other GPU's half
    nvlink = received / (zero["value"] - fsdp["value"]) * 1e3
    body = []
    for title, preset in PRESETS_SHOWN.items():
        shape = PRESETS[preset].shape
        for layout in LAYOUTS:
            cells = []
            for devices, links in CLUSTERS.values():
                size = sent(layout, shape, devices) / 1e9
                ms = seconds(layout, shape, devices, links, nvlink) * 1e3
                cells.append(f"{size:.1f}, {ms:.0f}" if devices <= layout.most else "")
            body.append([title, layout.name, layout.optimizer, layout.moved, *cells])
    head = ["model", "layout", "optimizer", "moved", *(f"{c}: GB, ms" for c in CLUSTERS)]
    bandwidth = (
        f"\nComputed, with {TOKENS:,} tokens per GPU. Bandwidth between GPUs of a host: "
        f"{nvlink / 1e9:.0f} GB/s or more, the {received / 1e6:.0f} MB that a GPU receives divided "
        "by the time that the optimizer's step takes longer with ZeRO-1 than with FSDP on two GPUs "
        f"({zero['value']:.2f} and {fsdp['value']:.2f} ms, measured; copies are a part of it). "
        f"Between hosts of {HOST} GPUs: links of 400 Gb/s, by their data sheet.\n"
    )
    return markdown(head, body) + bandwidth + source(used)


TABLES = {"communication": communication}
