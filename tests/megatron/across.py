"""Program for two ranks: saves with its own Megatron, or loads what another version has saved."""

from __future__ import annotations

import json

from checking import folder, helpers, main, rank, same, start
from megatron.core import dist_checkpointing as dc
from semantics import plain

import megatron_uring

FORMAT = "distrib_optim_sharding_type"


def check_save() -> None:
    dc.save(plain(), str(folder("plain")), content_metadata={"sharding": "none"})
    tiny = helpers.Tiny(tensor_parallel=2, swiglu=True, iterations=2)
    path = folder("tiny")
    tiny.save(path)
    digests = tiny.digests()
    if rank() == 0:
        (path / "digests.json").write_text(json.dumps(digests))


def check_load() -> None:
    path = str(folder("plain"))
    found = dc.load(plain(0.0), path)
    same(found["a"], plain()["a"].data)
    same(found["nested"]["b"], plain()["nested"]["b"].data)
    assert found["object"] == {"rank": rank(), "x": [1.5]} and found["nested"]["list"] == [1, "two"]
    assert found["step"] == 7 and found["args"] == plain()["args"]
    assert dc.load_common_state_dict(path)["step"] == 7
    assert dc.load_content_metadata(path) == {"sharding": "none"}


def check_load_training() -> None:
    tiny = helpers.Tiny(swiglu=True)  # at another layout
    path = folder("tiny")
    own = helpers.checkpointing.content_metadata()[FORMAT]
    tiny.spoil()
    if dc.load_content_metadata(str(path))[FORMAT] == own:
        tiny.load(path)
        assert tiny.iteration == 2
        kinds = None
    else:  # Megatron has no format of the optimizer's state that 0.14 and 0.16 both know
        state = dc.load({"model": tiny.request()["model"]}, str(path))
        tiny.training.model.load_state_dict(state["model"])
        kinds = ["model"]
    digests = tiny.digests()
    if rank() == 0:
        saved = json.loads((path / "digests.json").read_text())
        assert saved["model"] and all(digests[kind] == saved[kind] for kind in kinds or saved)


def begin() -> None:
    start()
    megatron_uring.enable()


if __name__ == "__main__":
    main(globals(), begin)
