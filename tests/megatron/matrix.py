"""The resharding matrix: what is saved, at which layout it is loaded, and what must come of it.

Guarantees
----------
- Imports no Megatron: tests and programs read the same table.
- A cell's name says all of it: model, optimizer's format, layouts of save and load, and the rest.
- `refusal` is the one place that knows what Megatron does not support with ``torch_dist``, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FULLY, DP_ONLY = "fully_reshardable", "dp_reshardable"
MODEL_SPACE = "fully_sharded_model_space"
NOT_DISTRIBUTED, MODEL_ONLY = "not_distributed", "model_only"

FORMATS = {
    FULLY: "distributed optimizer, fully_reshardable",
    DP_ONLY: "distributed optimizer, dp_reshardable",
    MODEL_SPACE: "distributed optimizer, fully_sharded_model_space",
    NOT_DISTRIBUTED: "optimizer not distributed",
    MODEL_ONLY: "model without optimizer",
}
MODELS = {
    "dense": "dense",
    "padded": "dense, vocabulary padded for TP",
    "swiglu": "SwiGLU",
    "experts": "MoE, experts one by one",
    "grouped": "MoE, grouped experts",
}


class Layout(NamedTuple):
    """How a model is spread over ranks; the size of the world follows from it.

    `expert_tensor` is the experts' own tensor parallelism, 0 for that of the rest; `virtual` the
    number of chunks of each pipeline stage.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    virtual: int = 1
    expert_tensor: int = 0

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def model_parallel(self) -> tuple[int, ...]:
        """All but how often the data are split."""
        return self._replace(data=1)

    @property
    def name(self) -> str:
        parts = zip(("tp", "pp", "dp", "ep", "vpp", "etp"), self, strict=True)
        return "".join(f"{part}{n}" for part, n in parts if n > 1 or (part, n) == ("etp", 1)) or "1"

    @property
    def text(self) -> str:
        parts = zip(("TP", "PP", "DP", "EP", "VPP", "ETP"), self, strict=True)
        shown = [f"{part} {n}" for part, n in parts if n > 1 or (part, n) == ("ETP", 1)]
        return " x ".join(shown) or "one rank"


class Source(NamedTuple):
    """One checkpoint, saved by torch_dist and by us."""

    model: str
    format: str
    layout: Layout
    precision: str = "bf16"
    wrapped: bool = False

    @property
    def name(self) -> str:
        more = [self.precision] * (self.precision != "bf16") + ["wrapped"] * self.wrapped
        return "-".join([self.model, self.format, *more, self.layout.name])


@dataclass(frozen=True)
class Cell:
    """One load: of `source`, at `layout`, into `model`.

    Attributes
    ----------
    often
        Whether the cell is tried with every version of Megatron, not with one alone.
    """

    source: Source
    layout: Layout
    model: str
    often: bool = False

    @property
    def name(self) -> str:
        other = f"-{self.model}" if self.model != self.source.model else ""
        return f"{self.source.name}-to{other}-{self.layout.name}"

    @property
    def feature(self) -> str:
        """What the cell shows, in words."""
        source = self.source
        into = f", into {MODELS[self.model]}" if self.model != source.model else ""
        wrapped = ", FullyParallel wrappers" if source.wrapped else ""
        return (
            f"reshard: {MODELS[source.model]}, {source.precision}, {FORMATS[source.format]}"
            f"{wrapped}: {source.layout.text} to {self.layout.text}{into}"
        )


class Refusal(NamedTuple):
    """What Megatron does not support.

    Attributes
    ----------
    stage
        Where it says so: "state" (the sharded state dict of the save), "request" (that of the
        load), "load" (``dist_checkpointing.load``) or "apply" (what was loaded, given to model and
        optimizer).
    error
        Name of the class of error: at "load" ours, else Megatron's.
    reason
        Why, in plain words.
    words
        What the error must say.
    """

    stage: str
    error: str
    reason: str
    words: str


def refusal(cell: Cell, version: tuple[int, int]) -> Refusal | None:
    """What torch_dist does not support of `cell` in this version of Megatron; None if it does."""
    source, layout = cell.source, cell.layout
    if not _knows(source.format, version):
        return NO_MODEL_SPACE if source.format == MODEL_SPACE else UNKNOWN_FORMAT
    if source.format == DP_ONLY and source.layout.model_parallel != layout.model_parallel:
        return OTHER_MODEL_PARALLEL
    if source.model in ("experts", "grouped") and source.format == FULLY:
        if source.layout.expert == 1 < layout.expert:
            return ONE_OPTIMIZER
        if source.layout.expert > 1 == layout.expert:
            return TWO_OPTIMIZERS
    return None


UNKNOWN_FORMAT = Refusal(
    "state", "NotImplementedError", "has that format from 0.15 on", "Unknown sharding_type"
)
NO_MODEL_SPACE = Refusal(
    "state",
    "CheckpointingException",
    "from 0.16 on a ShardedTensor cannot be a range of a flattened shard, as that format has it",
    "flattened_range is not supported",
)
OTHER_MODEL_PARALLEL = Refusal(
    "load",
    "StateMismatchError",
    "dp_reshardable saves the buffers of each rank's own model part: only DP may change",
    "saved as dp_reshardable can change its data parallelism alone",
)
ONE_OPTIMIZER = Refusal(
    "apply",
    "RuntimeError",
    "with EP 1 experts and the rest share one optimizer, otherwise there are two",
    "Expected 2 entries in state dict",
)
TWO_OPTIMIZERS = Refusal("apply", "KeyError", ONE_OPTIMIZER.reason, "optimizer")


def left_unset(cell: Cell) -> tuple[str, ...]:
    """Parts of names of the tensors of which torch_dist leaves elements as memory happens to be:
    in ranges of flattened shards it does not make zero what the checkpoint lacks.
    """
    grows = cell.source.layout.tensor < cell.layout.tensor
    if cell.source.format == MODEL_SPACE and cell.model == "padded" and grows:
        return ("word_embeddings", "output_layer")
    return ()


def _knows(format: str, version: tuple[int, int]) -> bool:
    if format == MODEL_SPACE:
        return version < (0, 16)
    return format not in (FULLY, DP_ONLY) or version >= (0, 15)


def cells_of(version: tuple[int, int]) -> list[Cell]:
    """What to try with one version of Megatron: of a format that it does not know, the first cell
    only, to see it refused; grouped experts where they do not need Transformer Engine, and a GPU.
    """
    unknown = {f: [c for c in CELLS if c.source.format == f][1:] for f in FORMATS}
    return [
        cell
        for cell in CELLS
        if (_knows(cell.source.format, version) or cell not in unknown[cell.source.format])
        and (version < (0, 17) or "grouped" not in (cell.source.model, cell.model))
    ]


def numbers(version: str) -> tuple[int, int]:
    """The two numbers of a version that decide."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


# -------------------------------------------------------------------------------------------------
# the cells


ONE = Layout()
TP2, TP4 = Layout(tensor=2), Layout(tensor=4)
PP2, PP4 = Layout(pipeline=2), Layout(pipeline=4)
DP2, DP4 = Layout(data=2), Layout(data=4)
VPP = Layout(pipeline=2, virtual=2)
TP2_PP2 = Layout(tensor=2, pipeline=2)
TP2_DP2, PP2_DP2 = Layout(tensor=2, data=2), Layout(pipeline=2, data=2)
TP2_PP2_DP2 = Layout(tensor=2, pipeline=2, data=2)
TP2_DP4, TP4_DP2 = Layout(tensor=2, data=4), Layout(tensor=4, data=2)
VPP_DP2 = Layout(pipeline=2, data=2, virtual=2)
EP2, EP4 = Layout(data=2, expert=2), Layout(data=4, expert=4)
EP2_DP4 = Layout(data=4, expert=2)
TP2_EP2 = Layout(tensor=2, data=2, expert=2)
TP2_EP4_ETP1 = Layout(tensor=2, data=2, expert=4, expert_tensor=1)
PP2_EP2 = Layout(pipeline=2, data=2, expert=2)


def _cells(
    model: str,
    format: str,
    *pairs: tuple[Layout, Layout],
    often: bool = False,
    into: str = "",
    **options: object,
) -> list[Cell]:
    return [
        Cell(Source(model, format, source, **options), target, into or model, often)  # type: ignore[arg-type]
        for source, target in pairs
    ]


CELLS = [
    *_cells("dense", FULLY, (TP2, ONE), (ONE, TP2), (PP2, VPP), (VPP, ONE), often=True),
    *_cells("dense", FULLY, (PP2, ONE), (ONE, PP2), (VPP, PP2), (ONE, VPP)),
    *_cells("dense", FULLY, (PP4, PP2), (TP2_PP2, TP4), (TP4, TP2_PP2), (TP4, ONE)),
    *_cells("dense", FULLY, (ONE, DP2), (DP2, DP4), (DP4, ONE), (VPP_DP2, TP2)),
    *_cells("dense", FULLY, (TP2_DP4, TP4_DP2), (TP2_PP2_DP2, TP2), (TP2, TP2_PP2_DP2)),
    *_cells("dense", FULLY, (TP2_PP2_DP2, ONE), (ONE, TP4_DP2)),
    *_cells("dense", FULLY, (TP2, ONE), (PP2_DP2, TP2), precision="fp32"),
    *_cells("dense", FULLY, (TP2_DP2, PP2_DP2), (DP2, TP2_DP2), wrapped=True, often=True),
    *_cells("padded", FULLY, (TP2, ONE), (ONE, TP2), often=True),
    *_cells("padded", NOT_DISTRIBUTED, (TP2, ONE), (ONE, TP2)),
    *_cells("padded", MODEL_SPACE, (TP2, ONE), (ONE, TP2)),
    *_cells("swiglu", FULLY, (TP2, ONE), (ONE, TP2), often=True),
    *_cells("swiglu", FULLY, (TP4, TP2), (TP2_PP2, TP4)),
    *_cells("swiglu", FULLY, (TP2_DP2, DP4), wrapped=True),
    *_cells("experts", FULLY, (EP2, EP4), (EP2_DP4, EP2), (EP2, TP2_EP2), often=True),
    *_cells("experts", FULLY, (EP4, EP2), (TP2_EP2, EP2), (PP2_EP2, EP4)),
    *_cells("experts", FULLY, (TP2_EP2, TP2_EP4_ETP1), (TP2_EP4_ETP1, EP2)),
    *_cells("experts", FULLY, (EP2, EP4), wrapped=True),
    *_cells("experts", FULLY, (ONE, EP2), (EP2, ONE)),
    *_cells("experts", MODEL_ONLY, (ONE, EP2), (EP2, ONE), often=True),
    *_cells("grouped", FULLY, (EP2, EP4), (TP2_EP2, EP2), often=True),
    *_cells("grouped", FULLY, (EP4, EP2), (EP2, TP2_EP2)),
    *_cells("grouped", MODEL_ONLY, (ONE, EP2), (EP2, ONE)),
    *_cells("grouped", MODEL_ONLY, (EP2, EP2), (EP2, TP2_EP2), into="experts"),
    *_cells("experts", MODEL_ONLY, (EP2, EP4), into="grouped"),
    *_cells("dense", DP_ONLY, (DP2, DP4), (DP2, ONE), (TP2, TP2_DP2), often=True),
    *_cells("dense", DP_ONLY, (ONE, DP2), (DP4, ONE), (PP2, PP2_DP2), (VPP, VPP_DP2)),
    *_cells("dense", DP_ONLY, (TP2_DP2, TP2_DP4), (TP2_DP4, TP2)),
    *_cells("dense", DP_ONLY, (TP2, ONE), (ONE, PP2), (PP2, VPP), often=True),
    *_cells("dense", DP_ONLY, (ONE, TP2), (PP2, ONE), (TP2, TP4)),
    *_cells("dense", DP_ONLY, (DP2, DP4), precision="fp32"),
    *_cells("dense", DP_ONLY, (DP2, DP4), wrapped=True),
    *_cells("swiglu", DP_ONLY, (TP2, TP2_DP2)),
    *_cells("experts", DP_ONLY, (EP2, EP2_DP4)),
    *_cells("dense", MODEL_SPACE, (TP2_DP2, ONE), (PP2, TP2), (VPP, ONE), (ONE, VPP), often=True),
    *_cells("dense", MODEL_SPACE, (ONE, TP2), (TP2, DP2), (DP2, TP2_DP2), (PP2, VPP), often=True),
    *_cells("dense", MODEL_SPACE, (TP2_DP4, TP4_DP2), (TP2_PP2_DP2, TP2), (TP4, PP4)),
    *_cells("dense", MODEL_SPACE, (TP2_DP2, PP2), precision="fp32"),
    *_cells("dense", MODEL_SPACE, (TP2_DP2, DP4), wrapped=True),
    *_cells("swiglu", MODEL_SPACE, (TP2, DP2), (ONE, TP2), (TP2, TP4), often=True),
    *_cells("experts", MODEL_SPACE, (EP2, EP4), (EP4, EP2), (EP2, TP2_EP2), often=True),
    *_cells("grouped", MODEL_SPACE, (EP2, EP4), (EP4, EP2), (EP2, TP2_EP2), often=True),
    *_cells("dense", NOT_DISTRIBUTED, (TP2, ONE), (ONE, TP2_DP2), often=True),
    *_cells("dense", NOT_DISTRIBUTED, (TP4, TP2), (DP2, DP4), (PP2, ONE), (ONE, PP2), (VPP, PP2)),
    *_cells("dense", NOT_DISTRIBUTED, (TP2_DP2, TP4), precision="fp32"),
    *_cells("dense", NOT_DISTRIBUTED, (DP2, TP2_DP2), wrapped=True),
    *_cells("swiglu", NOT_DISTRIBUTED, (TP2, ONE), (TP2, TP4)),
    *_cells("experts", NOT_DISTRIBUTED, (EP2, EP4)),
]
BY_NAME = {cell.name: cell for cell in CELLS}
SOURCES = {cell.source.name: cell.source for cell in CELLS}
assert len(BY_NAME) == len(CELLS)
