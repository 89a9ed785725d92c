"""Where Megatron-Core changes, moves or frees saved tensors outside of an optimizer's step.

Guarantees
----------
- Every class of `_MODULES` that defines one of `_NAMES` itself is named once.
- A module, class or method that this version lacks is left out: then nothing there can change
  tensors either.

Steps of the optimizers inside of Megatron's own are PyTorch's, which `lazy.watch` covers; what
Megatron changes after them (model parameters, their gathering, clipping) comes behind that fence.
Not covered: ``router.expert_bias`` and other buffers, which are never copied lazily.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = (
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.layer_wise_optimizer",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer_cuda_graph",
    "megatron.core.full_cuda_graph",
)
_NAMES = (
    "load_state_dict",
    "load_parameter_state",
    "load_parameter_state_from_dp_reshardable",
    "load_parameter_state_from_dp_zero",
    "load_parameter_state_from_fs_model_space",
    "load_parameter_state_from_fully_reshardable",
    "reload_model_params",
    "offload_to_cpu",
    "reload_from_cpu",
)
# A captured step calls no hook.
_CALLED = ("OptimizerCudaGraphWrapper",)


def places() -> list[tuple[type[Any], str]]:
    """Classes, and names of their methods that the fence has to stand before."""
    found = []
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        own = [one for one in vars(module).values() if isinstance(one, type)]
        for one in [one for one in own if one.__module__ == name]:
            names = (*_NAMES, "__call__") if one.__name__ in _CALLED else _NAMES
            found += [(one, method) for method in names if callable(vars(one).get(method))]
    return found
