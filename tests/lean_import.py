"""Import optax_lowmem alone, and fail if that pulled in more than it may or started a backend.

Run as a script in a fresh interpreter, by test_architecture.py and, on the built wheel, by CI.
"""

import sys

import jax

import optax_lowmem

HEAVY = ("flax", "orbax", "triton", "jax_triton", "jax.experimental.pallas")


def heavy_modules() -> list[str]:
    """The packages of HEAVY that are loaded."""
    return [h for h in HEAVY if any(m == h or m.startswith(h + ".") for m in sys.modules)]


def backend_has_started(devices: int) -> bool:
    """Return whether JAX refuses a new number of CPU devices, as it does once a backend runs."""
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        return True
    return False


def main() -> None:
    """Print what is wrong and exit with 1, or print what was imported."""
    faults = [f"imports {name}" for name in heavy_modules()]
    if backend_has_started(3):
        faults.append("starts a JAX backend")
    jax.devices()
    if not backend_has_started(4):
        faults.append("(the probe is broken: it does not notice a running backend)")
    if faults:
        sys.exit("import optax_lowmem " + "; ".join(faults))
    print(f"imported {optax_lowmem.__file__} with jax {jax.__version__}")


if __name__ == "__main__":
    main()
