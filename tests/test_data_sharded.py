"""A target spread over two processes: what it says, and how much of it each holds."""

import json
from pathlib import Path

from tests.conftest import ROOT, make_target, run_script

SCRIPT = """
import json, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
sys.path.insert(0, {root!r})
from data.batch import Document
from data.sharded import load_sharded
from data.teacher import OnlineTeacher

folder = Path(sys.argv[1])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
model = load_sharded(folder, torch.float32, torch.device("cpu"))
whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
# The second process has no document at first, then more of them than the first: each still takes part in the other's forwards.
tokens = torch.randint(3, 120, (20, 13), generator=torch.Generator().manual_seed(rank))
documents = [Document(str(i), row, torch.ones(13, dtype=torch.bool)) for i, row in enumerate(tokens)]
teacher, plain = OnlineTeacher(model, (0, 3, 8), together=True), OnlineTeacher(whole, (0, 3, 8))
equal = True
for few in ([9, 0], [2, 20]):
    mine = documents[: few[rank]]
    for found, expected in zip(teacher.features(mine), plain.features(mine), strict=True):
        equal &= all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(found, expected, strict=True))
logits = torch.allclose(model(tokens[:2]).logits, whole(tokens[:2]).logits, rtol=0, atol=1e-4)
local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.get_decoder().layers.parameters())
share = local / sum(p.numel() for p in whole.get_decoder().layers.parameters())
Path(f"rank-{{rank}}.json").write_text(json.dumps({{"equal": bool(equal), "logits": logits, "share": share}}))
dist.destroy_process_group()
"""


def test_two_processes_hold_a_target_together(tmp_path: Path) -> None:
    """Features and logits of the whole model, with half of its layers' weights at each, for an untied and a tied head."""
    for tied in (False, True):
        folder = tmp_path / f"tied-{tied}"
        folder.mkdir()
        (folder / "run.py").write_text(SCRIPT.format(root=str(ROOT)))
        target = make_target(folder / "target", tie_word_embeddings=tied)
        run_script("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "run.py", str(target), cwd=folder)
        for rank in (0, 1):
            found = json.loads((folder / f"rank-{rank}.json").read_text())
            assert found["equal"]
            assert found["logits"]
            assert 0.45 < found["share"] < 0.55
