"""The programs of this folder are started by tests/test_comm.py; none of them is a test module."""

collect_ignore_glob = ["*"]
