"""Predicts, in PyTorch and without vLLM, how many drafted tokens a server would accept.

    python eval/acceptance.py runs/smollm2_cpu-eagle3

Replays serving on the target's greedy answers to the held-out prompts. eval/speedup.py compares the prediction with what
vLLM counts.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedModel

from data.batch import Document
from data.chat import Chat
from data.conversations import DataConfig
from data.documents import open_documents
from data.target import TargetConfig, target_fingerprint
from data.target_model import load_target
from data.teacher import OnlineTeacher
from drafters.acceptance import Acceptance, acceptance
from drafters.drafter import Drafter, FrozenTarget
from drafters.saved import Saved, read_saved, rebuild
from recipes.load import RecipeError, build, count, run_script
from recipes.progress import progress_bar


def load_trained(saved: Saved) -> tuple[OnlineTeacher, Drafter]:
    """The target of a run and its trained drafter, on the GPU if there is one."""
    description = saved.description
    if not description.target.is_dir():
        raise RecipeError(f"the target is no longer at {description.target}; start training again, which fetches it")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(description.target, TargetConfig(description.target_model, dtype=description.target_dtype), device)
    return OnlineTeacher(model, description.aux_layers), rebuild(saved, FrozenTarget.of(model)).to(device)


def offline_acceptance(
    saved: Saved, answers: Sequence[tuple[list[int], list[int]]], num_drafts: Sequence[int]
) -> dict[int, Acceptance]:
    """Acceptance for each number of drafts per target pass, on (prompt, greedy answer) token ids.

    A server's last drafts reach beyond the answer's end, and it counts those that the target would have gone on with; so
    every answer is first continued by as many greedy tokens. No draft starts there.
    """
    teacher, drafter = load_trained(saved)
    longest = max(num_drafts)
    totals = {k: Acceptance(0, (0,) * k) for k in num_drafts}
    for i, (prompt, answer) in enumerate(progress_bar(answers, desc="offline acceptance", unit="answer")):
        beyond = greedy_continuation(teacher.model, prompt + answer, longest)
        tokens_T = torch.tensor(prompt + answer + beyond)
        document = Document(str(i), tokens_T, torch.arange(len(tokens_T)) >= len(prompt))
        batch = teacher.batch([[document]])
        for k in totals:
            # Anew for each k: a block's drafts see how many are asked for.
            proposals = drafter.propose(batch, num_drafts=k)
            inside = proposals.where(proposals.newest.index_M < len(prompt) + len(answer) - 1)
            totals[k] += acceptance(batch, inside, num_drafts=k)
    return totals


@torch.no_grad()
def greedy_continuation(model: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """The ``count`` tokens the target goes on with, end-of-sequence tokens or not."""
    found: list[int] = []
    past = None
    while len(found) < count:
        step = torch.tensor([found[-1:] or tokens], device=model.device)
        output = model(step, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = output.past_key_values
        found.append(int(output.logits[0, -1].argmax()))
    return found


def held_out_answers(run: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) token ids of a run's test conversations: the last answer of each, and all that stands before it."""
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    data = build(DataConfig, recipe["data"], "data")
    target = read_saved(run).description.target
    chat = Chat.load(target, data.chat_template_kwargs)
    found = open_documents(data, recipe["name"], chat=chat, target=target_fingerprint(target)).split("test")
    pairs = []
    for document in found:
        (others,) = (~document.loss_mask_T).nonzero(as_tuple=True)
        if not len(others):  # plain text: nobody asked
            continue
        end = int(document.loss_mask_T.nonzero().max()) + 1
        start = int(others[others < end].max()) + 1
        tokens = document.tokens_T.tolist()
        pairs.append((tokens[:start], tokens[start:end]))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, for example runs/smollm2_cpu-eagle3")
    parser.add_argument(
        "--num-drafts", type=count, nargs="+", default=[1, 2, 3, 4, 5], help="drafts per target pass; default %(default)s"
    )
    arguments = parser.parse_args()
    saved = read_saved(arguments.run)
    answers = held_out_answers(arguments.run)
    print(f"step {saved.step}, {len(answers)} held-out answers, {sum(len(answer) for _, answer in answers)} tokens")
    for k, measured in offline_acceptance(saved, answers, arguments.num_drafts).items():
        shares = " ".join(f"{share:.3f}" for share in measured.per_position)
        print(f"k = {k}: acceptance length {measured.length:.3f}, accepted per position {shares}")


if __name__ == "__main__":
    run_script(main)
