"""Made tests/golden/v1.tar.gz and v1.json, once, with release 0.1.0.

DO NOT RUN IT AGAIN for version 1: the archive stands for what is on users' disks. A later format
version gets a script and an archive of its own beside these.

    torchrun --nproc-per-node 2 make_golden.py <empty directory>
"""

import json
import os
import sys
import tarfile
from pathlib import Path

import torch

import megatron_uring
from megatron_uring import Config, Shard, comm

HERE = Path(__file__).parent
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
OBJECT = {"rng": b"\x00\x01", "list": [1, 2.5, None, "ключ"], (1, 2): "tuple key"}
COMMON = b"common state of version 1"


def pattern(dtype, count):
    """`count` elements whose bytes are 1, 2, 3, ... (0 and 1 in turn for bool)."""
    size = torch.empty(0, dtype=dtype).element_size() * count
    data = [i % 2 if dtype == torch.bool else (i * 7 + 1) % 256 for i in range(size)]
    return torch.tensor(data, dtype=torch.uint8).view(dtype)


def main():
    if any((HERE / name).exists() for name in ("v1.tar.gz", "v1.json")):
        sys.exit("version 1 has its golden checkpoint; it is never made again")
    torch.distributed.init_process_group("gloo")
    rank, directory = torch.distributed.get_rank(), Path(sys.argv[1]) / "v1"
    whole = torch.arange(4 * 6, dtype=torch.int32).reshape(4, 6)
    state = {
        "dtypes": {name: pattern(getattr(torch, name), 5) for name in DTYPES},
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "awkward/~key": {7: [torch.tensor([1, 2]), (torch.tensor(3),)]},
        "sharded": Shard(whole[2 * rank : 2 * rank + 2], (4, 6), (2 * rank, 0)),
        "object": (OBJECT,),
    }
    megatron_uring.save(
        state,
        directory,
        config=Config(engine="posix", aggregation="shared", slab_bytes=1 << 20, slab_count=2),
        common=COMMON if rank == 0 else None,
        communicator=comm.connect(60.0, "gloo"),
    )
    if rank == 0:
        expected = {}
        for key, tensor in megatron_uring.providers.flatten({**state, "sharded": whole}):
            if torch.is_tensor(tensor):
                plain = tensor.contiguous().reshape(-1)
                data = plain.view(torch.uint8).numpy().tobytes().hex() if plain.numel() else ""
                expected[key] = [str(tensor.dtype)[6:], list(tensor.shape), data]
        (HERE / "v1.json").write_text(json.dumps(expected, indent=0, ensure_ascii=True) + "\n")
        with tarfile.open(HERE / "v1.tar.gz", "w:gz") as archive:
            for name in sorted(os.listdir(directory)):
                archive.add(directory / name, f"v1/{name}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
