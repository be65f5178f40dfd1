"""Old names of classes in pickles of version 0.1.0, whose modules lay elsewhere.

`register` puts a small module under each old name, which looks a class up in its new module when
it is asked for one. A finder would not do: some old modules lay inside what is a module today.
"""

import importlib
import sys
import types
import warnings

_PACKAGE = "optax_lowmem"
# Old module -> new one, for those with classes of states and of what configures an optimizer.
MOVED = {
    "_core.block": "_src.core.block",
    "_core.hyperparameters": "_src.core.hyperparameters",
    "_core.policy": "_src.core.policy",
    "blocks.report": "_src.blocks.structure",
    "blocks.structure": "_src.blocks.structure",
    "codecs.affine": "_src.codecs.affine",
    "codecs.dynamic": "_src.codecs.float8",
    "codecs.expansion": "_src.codecs.expansion",
    "codecs.linear": "_src.codecs.companded",
    "codecs.master": "_src.codecs.master",
    "codecs.minifloat": "_src.codecs.float8",
    "codecs.scales": "_src.codecs.base",
    "codecs.softsign": "_src.codecs.companded",
    "codecs.sqrt": "_src.codecs.companded",
    "diagnostics.codes": "_src.diagnostics.codes",
    "diagnostics.detector": "_src.diagnostics.spikes",
    "diagnostics.prediction": "_src.diagnostics.spikes",
    "gaussws.bitwidth": "_src.noise.bitwidth",
    "gaussws.states": "_src.noise.states",
    "kernels.fp8_flow.reference": "_src.fp8_flow.kernels",
    "kernels.quantized_matmul.formats": "_src.switchback.quantized_matmul",
    "kernels.quantized_matmul.reference": "_src.switchback.quantized_matmul",
    "layers.fp8_flow.llama": "_src.fp8_flow.llama",
    "layers.fp8_flow.nnx": "_src.fp8_flow.nnx",
    "layers.fp8_flow.recipe": "_src.fp8_flow.storage",
    "layers.gaussws_linen": "_src.noise.linen",
    "layers.gaussws_nnx": "_src.noise.nnx",
    "layers.nnx": "_src.switchback.nnx",
    "memory.activations": "_src.memory.activations",
    "memory.state": "_src.memory.state",
    "optimizers.adam": "_src.optimizers.adam",
    "optimizers.lion": "_src.optimizers.lion",
    "optimizers.sgd": "_src.optimizers.sgd",
    "transforms.accumulate": "_src.wrappers.accumulate",
    "transforms.compress": "_src.wrappers.compress",
    "transforms.ema": "_src.wrappers.ema",
    "transforms.noisy": "_src.noise.noisy",
    "transforms.split": "_src.wrappers.split",
    "transforms.storage": "_src.update.storage",
    "transforms.update_clipping": "_src.wrappers.update_clipping",
}
# Packages that are gone: an import looks for them before their modules.
_GONE = (
    "_core",
    "kernels",
    "kernels.fp8_flow",
    "kernels.quantized_matmul",
    "optimizers",
    "transforms",
)


class _OldModule(types.ModuleType):
    """An old name of a module, which has the classes of the new one and nothing else."""

    def __init__(self, name: str, new: str | None):
        super().__init__(name, f"Was moved to {new}." if new else "Is gone.")
        self._new = new

    def __getattr__(self, name: str) -> type:
        if self._new is not None and not name.startswith("__"):
            found = getattr(importlib.import_module(self._new), name, None)
            if isinstance(found, type) and found.__module__ == self._new:
                warnings.warn(
                    f"{self.__name__}.{name} is {self._new}.{name} now: pickle this object again "
                    "to write the new name.",
                    DeprecationWarning,
                    stacklevel=2,
                )
                return found
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def register() -> None:
    """Make the old names of modules known to `pickle`."""
    for old in _GONE:
        sys.modules.setdefault(f"{_PACKAGE}.{old}", _OldModule(f"{_PACKAGE}.{old}", None))
    for old, new in MOVED.items():
        name = f"{_PACKAGE}.{old}"
        sys.modules.setdefault(name, _OldModule(name, f"{_PACKAGE}.{new}"))
