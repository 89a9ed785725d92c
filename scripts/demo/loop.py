"""The training loop: resume, train, save at intervals, report.

Guarantees:

- Iteration K trains on the batch of iteration K, whether the run began at 1 or was resumed.
- What `--json` names is up to date after every save, and before the process kills itself.

`megatron_on_cpu.install()` must have run before this module is imported.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import checkpointing
import digests
import gpt
import megatron.core
import numpy
import torch
from megatron.core import parallel_state
from text import VOCABULARY_SIZE, Text

HELD_OUT_SAMPLES = 16


class Loop:
    """One run of the program.

    Parameters
    ----------
    options : argparse.Namespace
        As `train_gpt.parse_options` returns them.
    backend_status : callable, optional
        Returns what the checkpoint backend says about itself, for the report.
    """

    def __init__(self, options: argparse.Namespace, backend_status: Callable | None = None):
        self._options = options
        self._backend_status = backend_status
        self._is_first = torch.distributed.get_rank() == 0
        random.seed(options.seed)
        numpy.random.seed(options.seed)
        gpt.initialize_parallel(
            options.tensor_parallel,
            options.pipeline_parallel,
            options.expert_parallel,
            options.seed,
        )
        self._gpt_options = gpt.GPTOptions(
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            sequence_length=options.sequence_length,
            vocabulary_size=VOCABULARY_SIZE,
            precision=options.precision,
            swiglu=options.swiglu,
            experts=options.experts,
        )
        self._training = gpt.build_training(self._gpt_options)
        self._text = Text(options.sequence_length, options.micro_batch_size, options.seed)
        self._args = checkpointing.megatron_args(options)
        self._iteration = 0
        self.facts = {
            "command": sys.argv,
            "backend": options.backend,
            "versions": {"megatron-core": megatron.core.__version__, "torch": torch.__version__},
            "layout": {
                "tensor_parallel": options.tensor_parallel,
                "pipeline_parallel": options.pipeline_parallel,
                "expert_parallel": options.expert_parallel,
                "data_parallel": parallel_state.get_data_parallel_world_size(),
            },
            "text_sha256": self._text.sha256,
            "resumed_from_iteration": 0,
            "load_seconds": None,
            "iterations": [],
            "saves": [],
            "digests": [],
            "held_out_losses": [],
        }

    def resume(self) -> None:
        """Load the checkpoint that the options ask for; begin from scratch where there is none."""
        options = self._options
        if options.load is None:
            return
        iteration = options.load_iteration
        if iteration is None:
            iteration = checkpointing.read_tracker(options.load)
        if iteration is None:
            self._say(f"no {checkpointing.TRACKER} in {options.load}: starting from scratch")
            return
        seconds = checkpointing.load(
            self._training, options.load, iteration, self._args, options.fully_parallel
        )
        self._iteration = iteration
        self.facts.update(load_seconds=seconds, resumed_from_iteration=iteration)
        self._say(f"loaded iteration {iteration} in {seconds:.3f} s")
        self._inspect_state("load")

    def train(self) -> None:
        """Train up to the last iteration, and save on the way."""
        options = self._options
        last = options.train_iters
        if options.exit_after_iteration is not None:
            last = min(last, options.exit_after_iteration)
        while self._iteration < last:
            self._train_one(self._iteration + 1)
            self._iteration += 1
            is_due = self._iteration % options.save_interval == 0
            if options.save is not None and (is_due or self._iteration == options.train_iters):
                self._save()

    def finish(self) -> None:
        """Report the state at the end, and what the backend says."""
        if self.facts["iterations"]:
            self._inspect_state("end")
        self._write_facts()

    def _train_one(self, iteration: int) -> None:
        started = time.perf_counter()
        batch = self._text.batch(iteration, parallel_state.get_data_parallel_rank())
        is_last = iteration == self._options.kill_at_iteration
        loss = gpt.train_step(
            self._training, self._gpt_options, batch, self._die if is_last else None
        )
        seconds = time.perf_counter() - started
        self.facts["iterations"].append({"iteration": iteration, "loss": loss, "seconds": seconds})
        self._say(f"iteration {iteration} loss {loss!r} {seconds:.3f} s")

    def _save(self) -> None:
        options = self._options
        facts = checkpointing.save(
            self._training, options.save, self._iteration, self._args, options.fully_parallel
        )
        entry = {**dataclasses.asdict(facts), "seconds": facts.seconds}
        if self._backend_status is not None:
            ours = self._backend_status()["last_save"]
            entry.update(save_seconds=ours["seconds"], files=ours["files"])
        self.facts["saves"].append(entry)
        self._say(
            f"saved iteration {facts.iteration} in {facts.seconds:.3f} s "
            f"({facts.state_dict_seconds:.3f} s for the state dict), "
            f"{facts.state_bytes / 1e6:.1f} MB of state, "
            f"{facts.directory_bytes / 1e6:.1f} MB of files"
        )
        self._inspect_state("save")
        self._write_facts()

    def _inspect_state(self, when: str) -> None:
        where = {"when": when, "iteration": self._iteration}
        if self._options.digest:
            found = digests.state_digests(self._training)
            if found is not None:
                self.facts["digests"].append({**where, **found})
                words = " ".join(f"{name}={digest[:16]}" for name, digest in found.items())
                self._say(f"digest {when} iteration={self._iteration} {words}")
        if self._options.eval_loss:
            batch = self._text.held_out_batch(HELD_OUT_SAMPLES)
            loss = gpt.held_out_loss(self._training, self._gpt_options, batch)
            self.facts["held_out_losses"].append({**where, "loss": loss})
            self._say(f"held-out loss {when} iteration={self._iteration} {loss:.6f}")

    def _die(self) -> None:
        """End this rank as a crash would: no handler runs, no buffer is flushed."""
        self._write_facts()
        self._say(f"killing every rank in iteration {self._iteration + 1}")
        # The first rank to die may take the others with it: let all of them get here.
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def _write_facts(self) -> None:
        if not self._is_first or self._options.json is None:
            return
        if self._backend_status is not None:
            self.facts["status"] = self._backend_status()
        Path(self._options.json).write_text(json.dumps(self.facts, indent=1, default=str) + "\n")

    def _say(self, message: str) -> None:
        if self._is_first:
            print(message, flush=True)
