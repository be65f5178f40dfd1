"""`flash_adamw` as an optimizer of Levanter's configs: `type: flash_adamw`."""

import dataclasses

import optax

from optax_lowmem._src.optim.optimizers.adam import flash_adamw
from optax_lowmem._src.optim.wrappers.chain import chain
from optax_lowmem._src.optim.wrappers.fuse import fuse_updates
from optax_lowmem._src.optim.wrappers.inject import inject_hyperparams

try:
    from levanter.optim.config import OptimizerConfig
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "levanter":
        raise  # Levanter is installed, but one of its dependencies is missing
    raise ImportError(
        "optax_lowmem.levanter needs Levanter: pip install --pre marin-levanter", name="levanter"
    ) from error

__all__ = ["FlashAdamWConfig"]


@OptimizerConfig.register_subclass("flash_adamw")
@dataclasses.dataclass(frozen=True)
class FlashAdamWConfig(OptimizerConfig):  # type: ignore[misc]
    """`flash_adamw` with the fields of Levanter's `AdamConfig`, and its learning rate is logged.

    The state has the named axes of the parameters, so Levanter shards and saves it like them. With
    `mp: p=bfloat16,...` the weights are bf16 and the state holds their corrections.

    Attributes:
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      epsilon: added to the root of the second moment.
      max_grad_norm: global norm to which gradients are clipped; None does not clip.
      nesterov: as in `flash_adamw`.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    nesterov: bool = False

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Return the optimizer of a run of this many steps, with the fused step."""

        def optimizer(learning_rate: float) -> optax.GradientTransformation:
            tx = flash_adamw(
                learning_rate, self.beta1, self.beta2, self.epsilon, nesterov=self.nesterov,
                weight_decay=self.weight_decay, mask=self.build_weight_decay_mask(),
            )  # fmt: skip
            clip = self.max_grad_norm
            return chain(optax.clip_by_global_norm(clip), tx) if clip else tx

        rate = self.lr_scheduler(num_train_steps)
        return fuse_updates(inject_hyperparams(optimizer)(learning_rate=rate))
