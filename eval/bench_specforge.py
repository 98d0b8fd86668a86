"""Times training steps of the package specforge (0.2.0) on the tensors and the objective of eval/bench_step.py.

    python eval/bench_specforge.py inputs.pt

Run by eval/bench.py with the package on its path. Its launcher wants sglang and a GPU; this is the same small loop around its model
that bench_step.py has, its loss the reference beside its Triton kernel, since Triton has no CPU. Its rows are documents of one
length side by side, for it packs none.
"""

import argparse
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import recipes.cpu  # noqa: F401  # before torch

# isort: split
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from eval.bench_step import wait_for_turn
from recipes.provenance import peak_memory


def build(given: dict[str, Any]) -> Any:
    """Its model, with the drafter's weights that were given; the head and the embedding are the target's, frozen."""
    import specforge.algorithms.eagle3.model as eagle3
    from specforge.core import compact_teacher, loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    def all_labels(teach: Callable[..., Any]) -> Callable[..., Any]:
        # Its mask leaves out what the target finds most likely beyond the draft vocabulary; the labels that are given have none.
        def taught(*args: Any, **kwargs: Any) -> Any:
            *found, _ = teach(*args, **kwargs)
            return (*found, kwargs["loss_mask"] if "loss_mask" in kwargs else args[3])

        return taught

    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=loss._compute_loss)
    eagle3._compute_target_p = all_labels(eagle3._compute_target_p)
    compact_teacher.compute_target_from_hidden = all_labels(compact_teacher.compute_target_from_hidden)
    config, words = AutoConfig.from_pretrained(given["target"]), given["settings"]["words"]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act")
    same = {name: getattr(config, name) for name in (*names, "max_position_embeddings", "rms_norm_eps")}
    rope = {"rope_theta": config.rope_parameters["rope_theta"], "rope_scaling": None, "pad_token_id": None}
    settings: dict[str, Any] = {**same, **rope, "num_hidden_layers": 1, "draft_vocab_size": words}
    draft = LlamaForCausalLMEagle3(LlamaConfig(**settings))
    missing, unexpected = draft.load_state_dict(given["weights"], strict=False)
    left = [name for name in (*missing, *unexpected) if name not in ("embed_tokens.weight", "t2d", "d2t")]
    assert not left, f"these weights have no counterpart: {left}"
    draft.embed_tokens.weight.data.copy_(given["embedding"])
    draft.t2d.copy_(torch.arange(same["vocab_size"]) < words)
    for frozen in (draft.embed_tokens, draft.lm_head):
        frozen.requires_grad_(False)
    return eagle3.OnlineEagle3Model(draft, length=given["settings"]["steps"], attention_backend="sdpa").float().train()


def read(target: Any, documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's states of three layers, and, as its training beside the target has them, logits of all its words."""
    with torch.inference_mode():
        output = target(documents, output_hidden_states=True, use_cache=False)
        aux = torch.cat([output.hidden_states[layer] for layer in (2, 15, 27)], dim=-1)
    return aux.clone(), output.logits.roll(-1, 1)


def mean_kl(loss: float, num_steps: int, mask_BT: torch.Tensor, logits_BTW: torch.Tensor) -> float:
    """Its first loss as eval/bench_step.py has it: of cross-entropies with the teacher, over all tokens, the mean KL of labels."""
    log_p = torch.log_softmax(logits_BTW, dim=-1)
    entropy_BT = -(log_p.exp() * log_p).sum(-1)
    total, num_labels = loss * mask_BT.numel(), 0
    for _ in range(num_steps):
        total -= float((entropy_BT * mask_BT).sum())
        num_labels += int(mask_BT.sum())
        entropy_BT, mask_BT = (torch.nn.functional.pad(x[:, 1:], (0, 1)) for x in (entropy_BT, mask_BT))
    return total / num_labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", help="what eval/bench.py wrote")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--in-turn", action="store_true", help="as eval/bench_step.py has it")
    arguments = parser.parse_args()
    given = torch.load(arguments.inputs, weights_only=False)
    model, inputs, shape = build(given), given["inputs"], given["documents"].shape
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    call = {name: inputs[name].view(*shape, *inputs[name].shape[2:]) for name in ("input_ids", "hidden_states")}
    call |= {"loss_mask": inputs["loss_mask"].view(*shape, 1), "attention_mask": torch.ones(shape, dtype=torch.bool)}
    # Of features that are given, its offline training keeps the teacher to the draft vocabulary.
    last = given["after_norm"].view(*shape, -1)
    call |= {"target": None, "target_hidden_for_compact": last, "target_head_weight": given["head"]}
    target = given["settings"].get("online") and AutoModelForCausalLM.from_pretrained(given["target"], dtype=torch.float32)
    seconds, losses = [], []
    for _ in range(arguments.steps + 1):
        wait_for_turn(arguments.in_turn)
        start = time.perf_counter()
        if target:
            call["hidden_states"], call["target"] = read(target, given["documents"])
            call["target_hidden_for_compact"] = None
        loss = sum(model(**call)[0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
        if arguments.in_turn:
            print("taken", flush=True)
    words = given["settings"]["words"]
    logits_BTW = last @ given["head"][:words].T if call["target"] is None else call["target"][..., :words]
    losses[0] = mean_kl(losses[0], given["settings"]["steps"], call["loss_mask"][..., 0], logits_BTW)
    print(json.dumps([{"seconds": seconds[1:], "losses": losses, "peak_bytes": peak_memory(torch.device("cpu"))}]))


if __name__ == "__main__":
    main()
