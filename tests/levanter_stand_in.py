"""Levanter's `OptimizerConfig` in a few lines, where Levanter is not installed."""

import dataclasses
import importlib.util
import sys
import types

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = 6e-4
    weight_decay: float = 0.1

    choices = {}

    @classmethod
    def register_subclass(cls, name):
        return lambda subclass: cls.choices.setdefault(name, subclass)

    def lr_scheduler(self, num_train_steps):
        return optax.linear_schedule(self.learning_rate, 0.0, num_train_steps)

    def build_weight_decay_mask(self):
        return lambda model: jax.tree.map(lambda w: w.ndim > 1, model)


if importlib.util.find_spec("levanter") is None:
    for name in ("levanter", "levanter.optim", "levanter.optim.config"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["levanter.optim.config"].OptimizerConfig = OptimizerConfig
