"""Who talks to whom: one interface over MPI, torch.distributed (gloo) and a single process.

Guarantees
----------
- Nothing below this folder talks to another rank, and nothing outside it knows how.
- Importing it imports neither torch nor mpi4py.

`communicator` is the interface, `choice` what decides between `mpi` and `gloo`, `launch` what is
known of the launcher, `store` the gloo side's status messages, `parts` what both sides share.
"""

from megatron_uring.comm.communicator import (
    Communicator,
    SingleCommunicator,
    beside,
    connect,
    current,
)
from megatron_uring.comm.launch import local_ranks

__all__ = ["Communicator", "SingleCommunicator", "beside", "connect", "current", "local_ranks"]
