"""What Megatron-Core 0.14 to 0.19 needs to run on a machine without CUDA.

Guarantees:

- Where torch finds a CUDA device, `install` changes nothing.
- Without one, `install` makes `torch.cuda` answer as one device whose memory is the host's.
  Training, the distributed optimizer, pipeline schedules and `dist_checkpointing` then run on the
  CPU over gloo, with Megatron's own code.
- `install` imports no part of Megatron. It must run before the first import of Megatron, and at
  module level of the program: the helper processes that Megatron spawns import that file again.
- `install_into_megatron` and `install_into_megatron_training` come after it, before training.
- Each of the three may be called any number of times.
"""

import contextlib
import inspect
import os
import types
import typing
import warnings

import numpy
import torch
from torch.overrides import TorchFunctionMode

_state = {"mode": None}


def install() -> None:
    """Let `torch.cuda` and device="cuda" mean the host, on a machine without CUDA."""
    if torch.cuda.is_available() or _state["mode"] is not None:
        return
    # Megatron's jit_fuser is torch.compile: slow here, and it would ask the absent CUDA device.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if not hasattr(typing, "override"):  # megatron.training from 0.17 on, under Python 3.11
        typing.override = lambda function: function
    if not hasattr(numpy, "product"):  # exchange_utils up to 0.15, under numpy 2
        numpy.product = numpy.prod
    _replace_device_functions(torch.cuda)
    _replace_random_functions(torch.cuda)
    _replace_stream_functions(torch.cuda)
    _silence_known_warnings()
    _state["mode"] = _CudaMeansHost()
    _state["mode"].__enter__()


def install_into_megatron() -> None:
    """Change what Megatron-Core itself holds: its view of CUDA's generator, and its Adam.

    Adam is replaced wherever neither Transformer Engine nor Apex is installed, CUDA or not.
    Megatron then falls back to `torch.optim.AdamW`, which keeps a `step` tensor per parameter, and
    loading a fully reshardable checkpoint fails with `KeyError: 'step'`.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    if _state["mode"] is not None:
        # Megatron reaches past torch.cuda.get_rng_state, to torch.cuda.default_generators.
        random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        random._set_cuda_rng_state = lambda new_state, *args, **kwargs: torch.set_rng_state(
            new_state
        )
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = (
            None  # 0.16 asks for it whether Transformer Engine is there or not
        )
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        optimizer.Adam = distrib_optimizer.Adam = FusedAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = True
        distrib_optimizer.USING_APEX_OPTIMIZER = True


def install_into_megatron_training() -> None:
    """Let `megatron.training` (a `pretrain_gpt.py`) start without CUDA."""
    if _state["mode"] is None:
        return
    install_into_megatron()
    from megatron.core.datasets import utils
    from megatron.training import initialize

    function = initialize.initialize_megatron
    defaults = [
        (parameter.name, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is not parameter.empty
    ]
    # Its callers leave allow_no_cuda out, and import the function by name: change it in place.
    function.__defaults__ = tuple(
        True if name == "allow_no_cuda" else default for name, default in defaults
    )
    with contextlib.suppress(ImportError):
        # A wheel ships the data set helpers compiled, without the Makefile that Megatron would run.
        from megatron.core.datasets import helpers_cpp  # noqa: F401

        utils.compile_helpers = lambda: None


class FusedAdam(torch.optim.Optimizer):
    """Adam with the state layout of Apex's and Transformer Engine's FusedAdam, in plain torch.

    The step is an integer of the parameter group; a parameter's own state is `exp_avg` and
    `exp_avg_sq`, in float32.

    Parameters
    ----------
    params
        Parameters or parameter groups, as any torch optimizer takes them.
    lr, bias_correction, betas, eps, adam_w_mode, weight_decay
        As in Apex.
    **ignored
        What Megatron passes for the fused kernels, without meaning here.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        **ignored,
    ):
        self.adam_w_mode = adam_w_mode
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None, **ignored):
        """Take one step with every parameter that has a gradient."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        gradient = parameter.grad.float()
        if not self.adam_w_mode:
            gradient = gradient.add(parameter.float(), alpha=group["weight_decay"])
        first_beta, second_beta = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first_beta)
        state["exp_avg_sq"].mul_(second_beta).addcmul_(gradient, gradient, value=1 - second_beta)
        first_correction = second_correction = 1.0
        if group["bias_correction"]:
            first_correction = 1 - first_beta ** group["step"]
            second_correction = 1 - second_beta ** group["step"]
        denominator = (state["exp_avg_sq"] / second_correction).sqrt_().add_(group["eps"])
        update = (state["exp_avg"] / first_correction).div_(denominator)
        if self.adam_w_mode:
            update.add_(parameter.float(), alpha=group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])


class _CudaMeansHost(TorchFunctionMode):
    """Rewrites the device of calls that go through torch's dispatch; entered once, never left."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort parameters by names such as 'torch.cuda.FloatTensor'.
            name = func(*args)
            return (
                name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
            )
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class _Stream:
    """A CUDA stream of a device that does everything at once."""

    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def wait_stream(self, *args):
        pass

    def wait_event(self, *args):
        pass

    def record_event(self, *args):
        return _Event()

    def synchronize(self):
        pass

    def query(self):
        return True


class _Event:
    """A CUDA event of such a stream: always reached."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


def _is_cuda(device) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(
        device, bool
    )  # torch.cuda.set_device's numbers


def _always(answer):
    """Make a function that returns `answer`: a new one each time, as torch._dynamo demands."""
    return lambda *args, **kwargs: answer


def _replace_device_functions(cuda) -> None:
    properties = types.SimpleNamespace(
        major=8,
        minor=0,
        name="cpu",
        gcnArchName="cpu",
        total_memory=1 << 34,
        multi_processor_count=1,
    )
    cuda.current_device = _always("cpu")  # Megatron passes the answer on as device=...
    cuda.device_count = _always(1)
    cuda.get_device_capability = _always((properties.major, properties.minor))
    cuda.get_device_properties = _always(properties)
    cuda.memory_stats = _always({})
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "ipc_collect",
    ):
        setattr(cuda, name, _always(None))
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(cuda, name, _always(0))


def _replace_random_functions(cuda) -> None:
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: (
        torch.set_rng_state(state)
    )
    # Not torch.manual_seed, which calls torch.cuda.manual_seed_all and would never end.
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: torch.default_generator.manual_seed(
        int(seed)
    )


def _replace_stream_functions(cuda) -> None:
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()


def _silence_known_warnings() -> None:
    """Silence what torch and Megatron say about Megatron: no user of a CPU can act on it."""
    for message, category in (
        ("`load_state_dict` is deprecated and will be removed", FutureWarning),
        ("Please use DTensor instead and we are deprecating ShardedTensor", FutureWarning),
        ("`torch.distributed.reduce_scatter_tensor` is deprecated", FutureWarning),
        ("`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning),
        ("The .grad attribute of a Tensor that is not a leaf", UserWarning),
        ("Transformer Engine and Apex are not installed", UserWarning),
        ("Apex is not installed. Falling back to Torch Norm", UserWarning),
        ("full scope is deprecated. Use empty cuda_graph_scope", UserWarning),
        ("absl.logging is not installed", UserWarning),
        ("MimoModelConfig is experimental", UserWarning),
        ("torch.distributed is ", UserWarning),
        ("When using async grad allreduce it is recommended", UserWarning),
    ):
        warnings.filterwarnings("ignore", message=message, category=category)
