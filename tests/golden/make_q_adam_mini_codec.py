"""Write golden vectors of the affine quantizer of Q-Adam-mini's authors.

Needs torch (a CPU will do) and a copy of q_adam_mini_8bit.py from their repository,
github.com/LouisCroix/Q-Adam-mini (commit 98a7868c), whose own imports are not needed:

    python make_q_adam_mini_codec.py q_adam_mini_8bit.py --out q_adam_mini_codec.npz

Names in the file, of shape (groups, 256) or (groups,), in the order of meta["groups"]:

    meta       one JSON string: versions, formulas, name of each group
    x          f32 input
    codes      uint8, 0 to 255
    scale      f32 Delta
    zero       f32 zero-point, a whole number of 0 to 255
    decoded    f32, by their decoder
"""

import argparse
import ast
import json
import types

import numpy as np
import torch

SEED, GROUP = 20261121, 256
FORMULAS = {
    "encode": "Delta = max(max(x) - min(x), 1e-5) / 255; zero = clip(-round(min(x) / Delta), 0, "
    "255); code = clip(round(x / Delta) + zero, 0, 255); round is half to even",
    "decode": "(code - zero) * Delta",
}
METHODS = ("_quantize", "_dequantize")


def ties():
    """All halves of Delta = 2^-7, from low to low + 255: ties at the ends too."""
    for low in (-100.5, -101.5, -127.5, -0.5, -254.5, -127.0):
        yield f"ties from {low}", (low + np.arange(GROUP) % 256) * 2.0**-7


def groups(rng):
    """name -> 256 values; the first words say what kind it is."""
    normal = rng.standard_normal
    out = {f"spans 0, size 1e{n}": normal(GROUP) * 10.0**n for n in (-4, -3, -2, 0, 3, 10, 30)}
    out["spans 0, log-normal"] = np.exp(2 * normal(GROUP)) * rng.choice([-1.0, 1.0], GROUP)
    out["spans 0, mostly positive"] = np.abs(normal(GROUP)) - 1e-3
    out["spans 0, mostly negative"] = 1e-3 - np.abs(normal(GROUP))
    out["spans 0, sparse"] = normal(GROUP) * (rng.uniform(size=GROUP) < 0.1)
    out["spans 0, integers"] = rng.integers(-100, 100, GROUP).astype(float)
    out["spans 0, under the floor"] = normal(GROUP) * 1e-7
    out["spans 0, at the floor"] = np.linspace(-4e-6, 6e-6, GROUP)
    out.update(ties())
    out["ends at 0, positive"] = np.linspace(0, 1, GROUP)
    out["ends at 0, negative"] = np.linspace(-1, 0, GROUP)
    out["zeros"] = np.zeros(GROUP)
    out["one sign, 1 to 1.001"] = np.linspace(1, 1.001, GROUP)
    out["one sign, constant 3"] = np.full(GROUP, 3.0)
    out["one sign, -2 to -1"] = np.linspace(-2, -1, GROUP)
    return {name: np.float32(x) for name, x in out.items()}


def methods_of(path):
    """Their two methods as functions, without running the rest of the file."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in METHODS]
    scope = {"torch": torch}
    exec(compile(ast.Module(found, []), path, "exec"), scope)  # the file that the user names
    return types.SimpleNamespace(**{name: scope[name] for name in METHODS})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", help="their q_adam_mini_8bit.py")
    parser.add_argument("--out", default="q_adam_mini_codec.npz")
    args = parser.parse_args()
    theirs, cases = methods_of(args.source), groups(np.random.default_rng(SEED))
    x = torch.tensor(np.stack(list(cases.values())))
    codes, scale, zero = theirs._quantize(None, x, GROUP)
    decoded = theirs._dequantize(None, codes, torch.float32, GROUP, scale, zero)
    meta = {
        "source": "github.com/LouisCroix/Q-Adam-mini, 98a7868c, q_adam_mini_8bit.py",
        "versions": {module.__name__: str(module.__version__) for module in (torch, np)},
        "formulas": FORMULAS,
        "groups": list(cases),
    }
    arrays = {"x": x, "codes": codes, "scale": scale[:, 0], "zero": zero[:, 0], "decoded": decoded}
    arrays = {name: array.numpy() for name, array in arrays.items()}
    np.savez_compressed(args.out, meta=np.array(json.dumps(meta)), **arrays)


if __name__ == "__main__":
    main()
