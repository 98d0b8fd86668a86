"""Has the target answer the recipe's prompts, so that the drafter learns what it will have to guess.

    python data/regenerate.py recipes/smollm2_cpu.yaml

Writes runs/<name>-data/answers.jsonl, a row as each answer ends. Started again, it answers what is still missing.
"""

from dataclasses import dataclass
from typing import Any

from data.chat import Message, load_tokenizer, prompt_tokens
from data.conversations import DataConfig, answers_path, prompts_path, read_jsonl, read_prompts, repeated_share
from data.generation import Generated, generate_into
from data.target import TargetConfig, resolve_target
from recipes.load import load_recipe, recipe_arguments, run_script


@dataclass(frozen=True)
class Recipe:
    """What this script reads of a recipe."""

    name: str
    target: TargetConfig
    data: DataConfig


def main() -> None:
    arguments = recipe_arguments(__doc__).parse_args()
    recipe = load_recipe(arguments.recipe, Recipe, arguments.overrides)
    data, path = recipe.data, answers_path(recipe.name)
    folder = resolve_target(recipe.target)
    tokenizer = load_tokenizer(folder)
    prompts = read_prompts(prompts_path(data, recipe.name))
    requests = {key: prompt_tokens(tokenizer, messages) for key, messages in prompts.items()}
    # A prompt that fills the document leaves nothing to draft.
    fitting = {key: tokens for key, tokens in requests.items() if len(tokens) + 2 <= data.max_length}

    def to_row(output: Generated) -> dict[str, Any]:
        answer = Message(role="assistant", content=output.text)
        start = len(fitting[output.key])
        return {"messages": [*prompts[output.key], answer], "tokens": fitting[output.key] + output.tokens, "answer_start": start}

    generate_into(
        path,
        fitting,
        data.answers,
        target=recipe.target,
        folder=folder,
        data=data,
        to_row=to_row,
    )
    rows = [row for _, row in read_jsonl(path) if row.get("key") in fitting]
    answers = [row["tokens"][row["answer_start"] :] for row in rows]
    cut = sum(row["finish_reason"] == "length" for row in rows)
    print(
        f"{path}: {len(rows)} answers, {sum(map(len, answers))} tokens, {cut} cut at data.answers.max_tokens or data.max_length "
        f"({'kept' if data.keep_truncated else 'not trained on'}), {repeated_share(answers):.1%} repeated 8-grams"
        + (f", {len(requests) - len(fitting)} prompts longer than data.max_length left out" if len(requests) > len(fitting) else "")
    )
    print(f"next: accelerate launch train/eagle3.py {arguments.recipe}")


if __name__ == "__main__":
    run_script(main)
