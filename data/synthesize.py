"""Has the target write user prompts itself, given only its template's user header (Magpie, arXiv 2406.08464).

    python data/synthesize.py recipes/smollm2_chat_cpu.yaml

For recipes with data.prompts: null. Writes runs/<name>-data/prompts.jsonl; started again, it goes on where it stopped.
"""

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.chat import Message, load_tokenizer, render
from data.conversations import DataConfig, data_folder, messages_id, prompts_path, read_jsonl
from data.generation import Generated, generate_into
from data.target import TargetConfig, resolve_target
from recipes.load import load_recipe, recipe_arguments, run_script


@dataclass(frozen=True)
class Recipe:
    """What this script reads of a recipe."""

    name: str
    target: TargetConfig
    data: DataConfig


def user_header(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the template puts before a user's first word: after it, the target writes a prompt instead of an answer."""
    marker = "0x5eed"
    text = render(tokenizer, [Message(role="user", content=marker)], add_generation_prompt=True)
    before, found, _ = text.partition(marker)
    assert found, "the chat template does not show the user's text"
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])


def keep(text: str, finish_reason: str) -> bool:
    """Whether a synthesised prompt is one that a person could have sent: finished, with a few words, of printable text."""
    return finish_reason == "stop" and len(text.split()) >= 3 and text.replace("\n", " ").isprintable()


def main() -> None:
    arguments = recipe_arguments(__doc__).parse_args()
    recipe = load_recipe(arguments.recipe, Recipe, arguments.overrides)
    data = recipe.data
    if data.prompts is not None:
        print(f"nothing to synthesise: data.prompts is {data.prompts}")
        print(f"next: python data/regenerate.py {arguments.recipe}")
        return
    folder = resolve_target(recipe.target)
    header = user_header(load_tokenizer(folder))
    raw, path = data_folder(recipe.name) / "synthesised.jsonl", prompts_path(data, recipe.name)

    def to_row(output: Generated) -> dict[str, Any]:
        return {"text": output.text.strip()}

    generate_into(
        raw,
        {f"prompt-{i:07d}": header for i in range(data.synthesis.num_prompts)},
        data.synthesis.sampling,
        target=recipe.target,
        folder=folder,
        data=data,
        to_row=to_row,
    )
    rows = sorted((row for _, row in read_jsonl(raw)), key=lambda row: row["key"])
    kept: dict[str, list[Message]] = {}
    for row in rows:
        messages = [Message(role="user", content=row["text"])]
        if keep(row["text"], row["finish_reason"]):
            kept.setdefault(messages_id(messages), messages)
    path.write_text("".join(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in kept.values()))
    print(f"{path}: {len(kept)} of {len(rows)} synthesised prompts kept (finished, printable, three words or more, no duplicates)")
    print(f"next: python data/regenerate.py {arguments.recipe}")


if __name__ == "__main__":
    run_script(main)
