"""Write golden weights of the adam-mini package.

Needs torch (a CPU will do) and ``pip install adam-mini==1.1.1``:

    python make_adam_mini.py --out adam_mini.npz

The model is one where the package's partition is right: heads times head_dim is the width, and
there are as many key as query heads. Names in the file, with torch's layout, (out, in), of weights:

    meta               one JSON string: versions, hyperparameters, notes
    <parameter>/0      f32 weights before the first step
    <parameter>/<t>    f32 weights after step t, for each t of meta["steps"]

Gradients are not stored: `gradients` makes them from integers, the same on every machine.
"""

import argparse
import json

import numpy as np

SEED, STEPS, KEPT = 20261121, 20, (1, 2, 5, 10, 20)
WIDTH, HEADS, HIDDEN, VOCABULARY = 16, 4, 24, 20
SHAPES = {
    "embed_tokens.weight": (VOCABULARY, WIDTH),
    "layers.0.self_attn.q_proj.weight": (WIDTH, WIDTH),
    "layers.0.self_attn.k_proj.weight": (WIDTH, WIDTH),
    "layers.0.self_attn.v_proj.weight": (WIDTH, WIDTH),
    "layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),
    "layers.0.mlp.up_proj.weight": (HIDDEN, WIDTH),
    "layers.0.mlp.down_proj.weight": (WIDTH, HIDDEN),
    "layers.0.mlp.up_proj.bias": (HIDDEN,),
    "layers.0.input_norm.weight": (WIDTH,),
    "lm_head.weight": (VOCABULARY, WIDTH),
}
HYPER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
NOTES = {
    "blocks": "q_proj, k_proj: a head (WIDTH / HEADS rows); norm: the whole tensor; bias: plain "
    "Adam; the rest: a row",
    "weight decay": "none for names that contain norm, ln or bias; before the step, w *= 1 - lr wd",
    "eps": "outside the root: h = sqrt(v_mean) / sqrt(1 - b2^t) + eps",
    "gradients": "see gradients(): rows and columns of very different sizes, so that blocks matter;"
    " row 3 of the embedding has a gradient in step 4 only, and its first rows none in odd steps",
}


def integers(shape, salt):
    """Pseudo-random integers of 0 to 1023, by a 32-bit mix of the element's number and `salt`."""
    h = (np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(salt) * 7919 + SEED) % 2**32
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        h = ((h ^ (h >> np.uint64(16))) * np.uint64(factor)) % 2**32
    return ((h ^ (h >> np.uint64(16))) % 1024).astype(np.int64).reshape(shape)


def weights():
    """name -> f32 weights of (-1, 1), all multiples of 2^-9."""
    return {
        name: np.float32((integers(shape, 1000 + at) - 511.5) * 2.0**-9)
        for at, (name, shape) in enumerate(SHAPES.items())
    }


def gradients():
    """For each step name -> f32 gradients: at most 10 bits times a power of two, so exact."""
    for t in range(1, STEPS + 1):
        found = {}
        for at, (name, shape) in enumerate(SHAPES.items()):
            g = (integers(shape, 31 * t + at) - 511.5) * 2.0**-12
            for axis, length in enumerate(shape):
                power = -(integers((length,), 5000 + 10 * at + axis) % 4)
                g = g * 2.0 ** power.reshape([-1 if a == axis else 1 for a in range(len(shape))])
            found[name] = np.float32(g)
        table = found["embed_tokens.weight"]
        table[3] *= t == 4
        table[:2] *= t % 2 == 0
        yield found


def run():
    """For each step name -> weights, by the package."""
    import torch
    from adam_mini import Adam_mini

    params = {name: torch.nn.Parameter(torch.tensor(w)) for name, w in weights().items()}
    lr, betas, eps, decay = HYPER.values()
    tx = Adam_mini(
        params.items(), lr, tuple(betas), eps, decay, dim=WIDTH, n_heads=HEADS, verbose=False
    )
    for g in gradients():
        for name, p in params.items():
            p.grad = torch.tensor(g[name])
        tx.step()
        yield {name: p.detach().numpy().copy() for name, p in params.items()}


def main():
    from importlib.metadata import version

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="adam_mini.npz")
    args = parser.parse_args()
    meta = {
        "versions": {name: version(name) for name in ("adam-mini", "torch", "numpy")},
        "hyperparameters": HYPER,
        "model": {"width": WIDTH, "heads": HEADS, "hidden": HIDDEN, "vocabulary": VOCABULARY},
        "steps": [0, *KEPT],
        "notes": NOTES,
    }
    arrays = {f"{name}/0": w for name, w in weights().items()}
    for t, row in enumerate(run(), start=1):
        if t in KEPT:
            arrays.update({f"{name}/{t}": w for name, w in row.items()})
    np.savez_compressed(args.out, meta=np.array(json.dumps(meta)), **arrays)


if __name__ == "__main__":
    main()
