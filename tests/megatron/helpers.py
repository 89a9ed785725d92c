"""A tiny Megatron-Core GPT with all its training state, for tests of save and restore.

Guarantees:

- Importing this module is enough to import Megatron on a machine without CUDA.
- What a `Tiny` holds is determined by its parameters: same model, same batches, same state.
- `Tiny.spoil` changes every saved tensor, so that a load which does nothing cannot pass a test.

The callers start torch.distributed (gloo) before, and take it down after.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo"
sys.path.insert(0, str(DEMO))

import megatron_on_cpu  # noqa: E402 - found through the line above

megatron_on_cpu.install()  # before Megatron is imported, which the next lines do

import checkpointing  # noqa: E402
import digests  # noqa: E402
import gpt  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from text import Text  # noqa: E402

CONTENT = bytes(range(256)) * 64
SAMPLES = 2


class Tiny:
    """A tiny GPT that has been trained for a few iterations.

    Parameters
    ----------
    tensor_parallel, pipeline_parallel, expert_parallel : int
        The layout. Megatron's process groups of an earlier layout are replaced.
    swiglu : bool
        Gated linear units: parameters that a ShardedTensorFactory cuts in two.
    experts : int
        Experts of each layer's mixture (with tensor_parallel=1 only), or 0 for a dense model.
        Megatron restores no optimizer from expert_parallel=1 at another size, or the other way
        round: with 1, experts and the rest share one optimizer.
    precision : str
        "bf16" or "fp32".
    iterations : int
        How many to train; at least 1, or the optimizer has no state yet.
    """

    def __init__(
        self,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        expert_parallel: int = 1,
        swiglu: bool = False,
        experts: int = 0,
        precision: str = "bf16",
        iterations: int = 1,
    ):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        gpt.initialize_parallel(tensor_parallel, pipeline_parallel, expert_parallel)
        self.options = gpt.GPTOptions(
            layers=2,
            hidden=64,
            heads=4,
            sequence_length=32,
            precision=precision,
            swiglu=swiglu,
            experts=experts,
        )
        self.training = gpt.build_training(self.options)
        self.args = checkpointing.megatron_args(argparse.Namespace())
        self.iteration = 0
        self._text = Text(self.options.sequence_length, SAMPLES, seed=1, content=CONTENT)
        self.train(iterations)

    def train(self, iterations: int = 1) -> list[float]:
        """Train on, and return the losses."""
        losses = []
        for _ in range(iterations):
            self.iteration += 1
            rank = parallel_state.get_data_parallel_rank()
            batch = self._text.batch(self.iteration, rank)
            losses.append(gpt.train_step(self.training, self.options, batch))
        return losses

    def state(self) -> dict:
        """Build the state dict as `dist_checkpointing.save` takes it. Collective."""
        return checkpointing.whole_state(self.training, self.iteration, self.args)

    def request(self) -> dict:
        """Build the sharded state dict as `dist_checkpointing.load` takes it."""
        metadata = checkpointing.content_metadata()
        return checkpointing.sharded_state(self.training, metadata, is_loading=True)

    def save(self, directory: str | Path, **keywords) -> object:
        """Call `dist_checkpointing.save` on the whole state; the directory must exist."""
        keywords.setdefault(
            "preprocess_common_before_consistancy_check", checkpointing.comparable_common_state
        )
        return dist_checkpointing.save(
            self.state(),
            str(directory),
            content_metadata=checkpointing.content_metadata(),
            **keywords,
        )

    def load(self, directory: str | Path, **keywords) -> dict:
        """Load model, optimizer and schedule; returns what `dist_checkpointing.load` returned."""
        state = dist_checkpointing.load(self.request(), str(directory), **keywords)
        checkpointing.apply_state(self.training, state)
        self.iteration = state["iteration"]
        return state

    def spoil(self) -> None:
        """Change the model's and the optimizer's tensors, all of them and in place."""
        tensors = [*self.training.model.parameters(), *self.training.model.buffers()]
        for optimizer in getattr(
            self.training.optimizer, "chained_optimizers", [self.training.optimizer]
        ):
            inner = optimizer.optimizer
            for group in inner.param_groups:
                for parameter in group["params"]:
                    tensors.append(parameter)
                    tensors += [v for v in inner.state[parameter].values() if torch.is_tensor(v)]
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(7)  # not add_: in float32, main parameters are views of the model's

    def digests(self) -> dict[str, str] | None:
        """Digest the state, the same at every layout; see `scripts/demo/digests.py`. Collective."""
        return digests.state_digests(self.training)


def shards_of(state: dict) -> Iterator[ShardedTensor]:
    """Yield every sharded tensor of a state dict; what a factory would build is built."""
    return checkpointing.shards_of(state)
