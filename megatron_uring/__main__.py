"""``python -m megatron_uring``: the command line of `cli`."""

from megatron_uring.cli import main

if __name__ == "__main__":
    main(prog_name="megatron-uring")
