"""Times training steps of the package speculators (0.9.0) on the tensors and the objective of eval/bench_step.py.

    python eval/bench_speculators.py inputs.pt

Run by eval/bench.py in an environment of its own, for it wants other versions than vLLM does. Its trainer needs a GPU; this is the
same small loop around its model that bench_step.py has. It imports nothing of this project.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

IGNORED = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "lm_head.weight", "t2d", "d2t"}


def build(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Its model and what its forward is called with."""
    from speculators.losses import resolve_loss_config

    settings, target = given["settings"], given["target"]
    config, words = AutoConfig.from_pretrained(target), settings["words"]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act")
    same = {name: getattr(config, name) for name in (*names, "max_position_embeddings", "rms_norm_eps")}
    same |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "head_dim": 64, "rope_parameters": config.rope_parameters}
    kept = torch.arange(same["vocab_size"]) < words
    maps = (kept, torch.zeros(words, dtype=torch.long))
    wanted = {
        "verifier_name_or_path": target,
        "draft_vocab_size": words,
        "target_layer_ids": [2, 15, 27],
        "draft_attn_impl": "sdpa",
    }
    if settings["method"] == "eagle3":
        from speculators.models.eagle3.core import Eagle3DraftModel as Model

        steps = settings["steps"]
        model = Model.from_training_args(LlamaConfig(**same), *maps, norm_before_residual=True, ttt_steps=steps, **wanted)
        return model, {"ttt_steps": steps, "ttt_step_loss_decay": 1.0, "loss_config": resolve_loss_config("kl_div", "eager")}
    import speculators.models.dflash.core as core

    if settings["method"] == "dflash":
        from speculators.models.dflash.core import DFlashDraftModel as Model
    else:
        from speculators.models.dspark.core import DSparkDraftModel as Model
    anchors = given["anchors"]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    qwen = Qwen3Config(**same, layer_types=["full_attention"])
    model = Model.from_training_args(qwen, *maps, block_size=8, mask_token_id=0, **wanted)
    loss = '{"ce": 0.1, "tv": 1.8}' if settings["method"] == "dspark" else "ce"
    call = Model.get_trainer_kwargs(loss_fn=loss, loss_implementation="eager", max_anchors=len(anchors))[0]
    return model, call


def read(target: Any, documents: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the target's forward over documents [N, T] gives its model: states of three layers, and what goes into the last norm."""
    before_norm: list[torch.Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.inference_mode():
        states = target.model(documents, output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    aux = torch.cat([states[layer] for layer in (2, 15, 27)], dim=-1)
    last = before_norm[0].flatten(0, 1)[None]
    return {"hidden_states": aux.flatten(0, 1)[None].clone(), "verifier_last_hidden_states": last.roll(-1, 1).clone()}


def most_memory() -> int:
    """Bytes that this process held at most. (resource's ru_maxrss would count what its parent held when it was started.)"""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", help="what eval/bench.py wrote")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--in-turn", action="store_true", help="as eval/bench_step.py has it")
    arguments = parser.parse_args()
    given = torch.load(arguments.inputs, weights_only=False)
    model, call = build(given)
    model = model.float().train()
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in given["weights"].items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    left = [name for name in (*missing, *unexpected) if name not in IGNORED]
    assert not left, f"these weights have no counterpart: {left}"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    inputs = given["inputs"]
    target = given["settings"].get("online") and AutoModelForCausalLM.from_pretrained(given["target"], dtype=torch.float32)
    seconds, losses = [], []
    for _ in range(arguments.steps + 1):
        if arguments.in_turn and not sys.stdin.readline():
            sys.exit(1)
        start = time.perf_counter()
        if target:
            inputs |= read(target, given["documents"])
        _, loss, _ = model(**inputs, **call)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
        if arguments.in_turn:
            print("taken", flush=True)
    peak_bytes = most_memory()
    print(json.dumps([{"seconds": seconds[1:], "losses": losses, "peak_bytes": peak_bytes}]))


if __name__ == "__main__":
    main()
