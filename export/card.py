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
    # A folder of this machine means nothing elsewhere.
    base_model = "" if description.is_local else f"base_model: {description.target_model}\n"
    target = "<the target's folder>" if description.is_local else description.target_model
    return f"""---
{base_model}tags: [speculative-decoding, {description.method}]
---
# {description.title}

Trained by Pacesetter; served by vLLM beside its target, whose output it does not change.

| | |
|---|---|
| parameters | {num_parameters:,} |
| draft vocabulary | {size:,} of {whole:,} tokens; holds {coverage:.2%} of the tokens in the training answers |
| target layers read | {list(description.aux_layers)}, where k is the state after k decoder layers |
| checkpoint | step {saved.step}, the best on the validation answers |
| acceptance length of its greedy drafts on the validation answers, offline | {saved.acceptance_length:.3f} |

Acceptance length: tokens per target pass, the target's own included. Made with {versions}.

## Serve

    vllm serve {target} --speculative-config '{json.dumps(serve)}'

"""
