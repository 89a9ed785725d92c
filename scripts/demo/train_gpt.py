r"""Trains a byte-level Megatron-Core GPT on real text, saves checkpoints, resumes from them.

    OMP_NUM_THREADS=1 mpirun -n 4 --oversubscribe --bind-to none \\
        python scripts/demo/train_gpt.py --tensor-parallel 2 --save checkpoints/demo

Guarantees:

- Runs under mpirun (Open MPI), srun and torchrun, over gloo where there is no CUDA.
- At one layout, a run that was killed and resumed logs exactly the losses of one that was not.
- `--digest` and `--eval-loss` print what must not change when a checkpoint is restored at another
  tensor-, pipeline- or data-parallel size.
- No run is longer than DEMO_TIMEOUT seconds (600 unless set): then every thread's stack is printed
  and the process ends.
"""

import argparse
import faulthandler
import os
import zlib

import megatron_on_cpu
import torch

# At module level: helper processes that Megatron's save spawns import this file again.
megatron_on_cpu.install()

DEFAULT_TIMEOUT_S = 600


def main() -> None:
    """Run the program."""
    options = parse_options()
    timeout_s = int(os.environ.get("DEMO_TIMEOUT", DEFAULT_TIMEOUT_S))
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    backend_status = None
    if options.backend == "megatron_uring":
        import megatron_uring

        megatron_uring.enable()
        backend_status = megatron_uring.status

    from loop import Loop

    connect()
    loop = Loop(options, backend_status)
    loop.resume()
    loop.train()
    loop.finish()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level Megatron-Core GPT, save and restore its checkpoints.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_model_options(parser.add_argument_group("model"))
    _add_checkpoint_options(parser.add_argument_group("checkpoints"))
    run = parser.add_argument_group("run")
    run.add_argument("--train-iters", type=int, default=20, metavar="N")
    run.add_argument("--exit-after-iteration", type=int, metavar="K", help="stop after this one")
    run.add_argument(
        "--kill-at-iteration",
        type=int,
        metavar="K",
        help="SIGKILL every rank between the backward pass and the optimizer step of iteration K",
    )
    run.add_argument("--seed", type=int, default=1234)
    run.add_argument(
        "--digest", action="store_true", help="digest the state after load and save, and at the end"
    )
    run.add_argument("--eval-loss", action="store_true", help="held-out loss, at the same times")
    run.add_argument("--json", metavar="FILE", help="rank 0 writes what it measured")
    return parser.parse_args(arguments)


def connect() -> None:
    """Start torch.distributed, with what the launcher says about ranks."""
    for name, value in launcher_variables(dict(os.environ)).items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    else:
        torch.distributed.init_process_group("gloo")


def launcher_variables(environment: dict[str, str]) -> dict[str, str]:
    """Translate Open MPI's or Slurm's variables into those that torchrun would have set.

    Parameters
    ----------
    environment : dict
        The process's environment variables.

    Returns
    -------
    dict
        RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Over several nodes under mpirun,
        MASTER_ADDR must be set by the user: this says 127.0.0.1.
    """
    if "RANK" in environment:
        return {}
    if "OMPI_COMM_WORLD_RANK" in environment:
        prefix, suffixes = "OMPI_COMM_WORLD_", ("RANK", "SIZE", "LOCAL_RANK")
        job = environment.get("PMIX_NAMESPACE", "") + environment.get("OMPI_MCA_ess_base_jobid", "")
        address = "127.0.0.1"
    elif "SLURM_STEP_ID" in environment:
        prefix, suffixes = "SLURM_", ("PROCID", "NTASKS", "LOCALID")
        job = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
        address = environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    else:
        raise SystemExit("start this program with mpirun, srun or torchrun")
    rank, world_size, local_rank = (environment[prefix + suffix] for suffix in suffixes)
    # Two jobs on a node need two ports, and the ranks have only the job's name to agree by.
    # Below 32768, where Linux hands out ports to outgoing connections.
    port = 20_000 + zlib.crc32(job.encode()) % 12_000
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _add_model_options(group) -> None:
    group.add_argument("--layers", type=int, default=4)
    group.add_argument("--hidden", type=int, default=512)
    group.add_argument("--heads", type=int, default=8)
    group.add_argument("--sequence-length", type=int, default=64)
    group.add_argument("--micro-batch-size", type=int, default=4, help="samples of a rank")
    group.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--experts", type=int, default=0, help="in each layer; needs TP 1")
    group.add_argument("--tensor-parallel", type=int, default=1)
    group.add_argument("--pipeline-parallel", type=int, default=1)
    group.add_argument("--expert-parallel", type=int, default=1)


def _add_checkpoint_options(group) -> None:
    group.add_argument(
        "--backend",
        choices=("megatron_uring", "torch_dist"),
        default="megatron_uring",
        help="who writes and reads: this package, or Megatron's own strategy",
    )
    group.add_argument("--save", metavar="ROOT", help="save into ROOT/iter_NNNNNNN")
    group.add_argument("--save-interval", type=int, default=10, metavar="N", help="iterations")
    group.add_argument("--load", metavar="ROOT", help="resume from the checkpoint that ROOT names")
    group.add_argument("--load-iteration", type=int, metavar="K", help="instead of the newest")
    group.add_argument(
        "--fully-parallel", action="store_true", help="wrap save and load as Megatron can"
    )


if __name__ == "__main__":
    main()
