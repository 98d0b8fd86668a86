"""The model card of an exported drafter: what it is for, what was measured, how to serve it."""

import json

from drafters.saved import Saved


def model_card(saved: Saved, *, num_drafts: int) -> str:
    """README.md of an export. Holds only numbers that were measured; eval/speedup.py adds what serving gave."""
    description = saved.description
    provenance = json.loads((saved.folder / "provenance.json").read_text())
    vocabulary = json.loads((saved.folder / "vocabulary.json").read_text())
    num_parameters = sum(weight.numel() for weight in saved.weights.values())
    serve = {"method": description.method, "model": "<this folder>", "num_speculative_tokens": num_drafts}
    size, whole, coverage = len(saved.kept_W), description.shape.vocab_size, vocabulary["coverage"]
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    return f"""---
base_model: {description.served_as}
tags: [speculative-decoding, {description.method}]
---
# {description.method} drafter for {description.target_model}

Trained by Pacesetter; served by vLLM beside its target, whose output it does not change.

| | |
|---|---|
| parameters | {num_parameters:,} |
| draft vocabulary | {size:,} of {whole:,} tokens; {coverage:.2%} of the training answers |
| aux layers | {list(description.aux_layers)} |
| checkpoint | step {saved.step} |
| acceptance length of its greedy drafts on held-out answers, offline | {saved.acceptance_length:.3f} |

Acceptance length: tokens per target pass, the target's own included. Made with {versions}.

## Serve

    vllm serve {description.served_as} --speculative-config '{json.dumps(serve)}'
"""
