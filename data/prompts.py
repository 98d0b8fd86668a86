"""Turns data sets of any accepted shape into one file of prompts, with a category each.

    python data/prompts.py evaluation.jsonl mt_bench/question.jsonl gsm8k/test.jsonl openai/gsm8k

A row's category is its own "category", else the name of its file's folder or of its data set. A prompt given twice counts once. The
file can be a recipe's data.prompts, or its data.evaluation, which keeps these prompts out of training.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from data.rows import BadRow, to_conversation
from data.sources import Refusals, Source, parse, rows
from recipes.load import RecipeError, run_script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    parser.add_argument("sources", nargs="+", help="files, folders, or ids on the Hugging Face Hub")
    parser.add_argument("--split", default="train", help="of ids on the Hub; default %(default)s")
    arguments = parser.parse_args()
    if arguments.out.exists():
        raise RecipeError(f"{arguments.out} is there already; delete it, or give another name")
    refusals, seen = Refusals(), set()
    categories: Counter[str] = Counter()
    with arguments.out.open("w", encoding="utf-8") as file:
        for path in arguments.sources:
            name = Path(path).resolve().parent.name if Path(path).is_file() else Path(path).name
            for row in rows(Source(path, split=arguments.split)):
                refusals.total += 1
                try:
                    content = parse(row)
                    conversation = to_conversation(content)
                except BadRow as error:
                    refusals.add(row.where, error.reason, str(error))
                    continue
                messages = list(conversation.messages)
                while messages and messages[-1]["role"] == "assistant":
                    messages.pop()
                asked = conversation._replace(messages=messages)
                if not messages or asked.id in seen:
                    continue
                seen.add(asked.id)
                category = content.get("category") if isinstance(content.get("category"), str) else name
                categories[category] += 1
                tools = {"tools": asked.tools} if asked.tools else {}
                file.write(json.dumps({"messages": messages, **tools, "category": category}, ensure_ascii=False) + "\n")
    for line in refusals.lines():
        print(f"left out: {line}")
    for category, count in categories.most_common():
        print(f"{count:>7} {category}")
    print(f"{arguments.out}: {len(seen)} prompts")


if __name__ == "__main__":
    run_script(main)
