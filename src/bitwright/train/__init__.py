"""Training: compiled steps, optimizers, schedules, data, checkpoints, adapters.

    optimizers, schedules, losses, groups   what a step does
    modes, step, program                    graphs of steps, and their compiled form
    data, checkpoints, metrics, trainer     the run around them
    qat, lora, quantized_activations        quantized and frozen weights

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from bitwright.lazy import lazy_names

if TYPE_CHECKING:  # for type checkers and editors only
    from bitwright.train.checkpoints import Checkpoints as Checkpoints
    from bitwright.train.comparisons import Pooled as Pooled
    from bitwright.train.history import History as History
    from bitwright.train.modes import eval_mode as eval_mode
    from bitwright.train.modes import train_mode as train_mode
    from bitwright.train.optimizers import SGD as SGD
    from bitwright.train.optimizers import Adam as Adam
    from bitwright.train.optimizers import AdamW as AdamW
    from bitwright.train.optimizers import Lion as Lion
    from bitwright.train.optimizers import Optimizer as Optimizer
    from bitwright.train.quantized_activations import straight_through as straight_through
    from bitwright.train.schedules import Schedule as Schedule
    from bitwright.train.schedules import constant as constant
    from bitwright.train.schedules import cosine as cosine
    from bitwright.train.schedules import linear as linear
    from bitwright.train.schedules import step_decay as step_decay
    from bitwright.train.schedules import warmup as warmup
    from bitwright.train.trainer import Trainer as Trainer

_NAMES = {
    "bitwright.train.checkpoints": "Checkpoints",
    "bitwright.train.comparisons": "Pooled",
    "bitwright.train.history": "History",
    "bitwright.train.modes": "eval_mode train_mode",
    "bitwright.train.optimizers": "Adam AdamW Lion Optimizer SGD",
    "bitwright.train.quantized_activations": "straight_through",
    "bitwright.train.schedules": "Schedule constant cosine linear step_decay warmup",
    "bitwright.train.trainer": "Trainer",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOME)

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
