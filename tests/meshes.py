"""Meshes of the devices that tests have."""

import math

import jax
from jax.sharding import AxisType


def mesh_of(kind=AxisType.Auto, **axes):
    """A mesh of the first CPU devices, by the names and sizes of its axes."""
    sizes = tuple(axes.values())
    devices = jax.devices("cpu")[: math.prod(sizes)]
    return jax.make_mesh(sizes, tuple(axes), axis_types=(kind,) * len(sizes), devices=devices)
