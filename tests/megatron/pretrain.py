"""Megatron's own training loop, `megatron.training.pretrain`, on a tiny GPT and on the CPU.

Guarantees
----------
- Everything around the model is Megatron's: arguments, data loader, schedule, optimizer, saving,
  loading, exit. Only the samples, the loss and what CUDA would do are this file's.
- A sample is a function of its number alone; which number comes next is what the checkpoint says.
- ``--records FOLDER`` gets ``losses-RANK.txt``: iteration and loss of each micro batch, to the
  last bit; and ``facts-RANK.json``, written when the process ends: what megatron_uring says of
  itself, the processes that this one has started and that still run, and how often it forked.
- It enables nothing: that is what ``megatron-uring run`` is for.

Needs megatron-core 0.17 or newer, whose wheels have `megatron.training`.
"""

import atexit
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "demo"))

warnings.simplefilter("ignore")  # Megatron and torch warn about each other while they load
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists

import megatron_on_cpu  # noqa: E402 - found through the line above

megatron_on_cpu.install()  # before Megatron is imported; helper processes import this file again

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import argument_utils, get_args, pretrain  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler  # noqa: E402

CONTENT = b"A checkpoint exists only once its last step, the commit, is durable. " * 32
DEFAULTS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3
    --lr-decay-iters 4 --train-iters 4 --dataloader-type external
    --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 1234 --num-workers 0 --bf16
    --use-distributed-optimizer --attention-dropout 0.1 --hidden-dropout 0.1
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local
    --tokenizer-type NullTokenizer --vocab-size 255 --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion
    --no-persist-layer-norm --no-rope-fusion --mock-data
""".split()


forks = []


class Bytes(torch.utils.data.Dataset):
    """Next-byte prediction on a short text."""

    def __init__(self, sequence_length, samples):
        self._text = torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8)
        self._length, self._samples = sequence_length, samples

    def __len__(self):
        return self._samples

    def __getitem__(self, number):
        start = number * 7919 % (len(self._text) - self._length - 1)
        piece = self._text[start : start + self._length + 1].long()
        return {"tokens": piece[:-1], "labels": piece[1:]}


def batches(samples):
    """Batches for training, validation and test, where so many samples are asked for."""
    options, ours = get_args(), Bytes(get_args().seq_length, max(samples[0], 1))
    sampler = MegatronPretrainingSampler(
        total_samples=len(ours),
        consumed_samples=options.consumed_train_samples,
        micro_batch_size=options.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )
    # A generator of its own: without CUDA the default one is dropout's too, and a loader that is
    # made anew after a restart would draw from it.
    return (
        iter(torch.utils.data.DataLoader(ours, batch_sampler=sampler, generator=torch.Generator())),
        None,
        None,
    )


batches.is_distributed = True  # each rank makes its own


def forward_step(iterator, model):
    """Loss of one micro batch."""
    batch = next(iterator)
    length = batch["tokens"].shape[1]
    positions = torch.arange(length)[None].expand_as(batch["tokens"])
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return model(batch["tokens"], positions, mask, labels=batch["labels"]), partial(loss, model)


def loss(model, output):
    """Sum over the tokens, their number, and what is logged."""
    total, count = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
    options = get_args()
    path = Path(options.records) / f"losses-{options.rank}.txt"
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{options.curr_iteration + 1} {float(total).hex()}\n")
    report = torch.stack([total.detach(), count.float()])
    return total, count, {"lm loss": report}


def own_options(parser):
    """Add the option of this program to Megatron's."""
    parser.add_argument("--records", required=True)
    return parser


def write_facts(folder, rank):
    """What a test wants to know of this process when it is over."""
    facts = {"children": children(), "forks": len(forks), "status": None}
    if "megatron_uring.megatron.switch" in sys.modules:
        import megatron_uring

        facts["status"] = megatron_uring.status()
    path = Path(folder) / f"facts-{rank}.json"
    path.write_text(json.dumps(facts, default=str), encoding="utf-8")


def children():
    """Numbers of processes that this one has started and that still run."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
        return [int(number) for number in file.read().split()]


def main():
    """Train."""
    megatron_on_cpu.install_into_megatron_training()
    sys.argv[1:1] = DEFAULTS
    options = parse_and_validate_args(extra_args_provider=own_options)
    os.register_at_fork(after_in_parent=lambda: forks.append(1))
    atexit.register(write_facts, options.records, options.rank)
    model = argument_utils.gpt_config_from_args(options)
    config = argument_utils.pretrain_cfg_container_from_args(options, model)
    pretrain(config, batches, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
