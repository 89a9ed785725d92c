"""The check on a real GPU: what only a device and its driver can show.

Guarantees
----------
- Each row says what was found, or that it was not run and why; nothing is claimed of what was not.
- A check that fails ends no other one.
"""
