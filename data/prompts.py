"""Turns data sets of any accepted shape into one file of prompts, with a category each.

    python data/prompts.py evaluation.jsonl mt_bench/question.jsonl gsm8k/test.jsonl openai/gsm8k

A row's category is its own "category", else the name of its file's folder or of its data set. A prompt given twice counts once. The
file can be a recipe's data.prompts, or its data.evaluation, which keeps these prompts out of training.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.rows import BadRow, to_conversation
from data.sources import Refusals, Source, parse, rows
from recipes.load import RecipeError, run_script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    parser.add_argument("sources", nargs="+", help="files, folders, or ids on the Hugging Face Hub")
    parser.add_argument("--split", default="train", help="of ids on the Hub; default %(default)s")
    parser.add_argument("--max-bad-share", type=float, default=0.01, help="of rows that cannot be used; default %(default)s")
    arguments = parser.parse_intermixed_args()
    if arguments.out.exists():
        raise RecipeError(f"{arguments.out} is there already; delete it, or give another name")
    refused = arguments.out.with_name(f"{arguments.out.name}.refused")
    refusals = Refusals(listed_in=refused)
    categories: Counter[str] = Counter()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    aside = arguments.out.with_name(f".{arguments.out.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        for row in prompts(arguments.sources, arguments.split, refusals):
            categories[row["category"]] += 1
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    for line in refusals.lines():
        print(f"left out: {line}")
    if refusals.bad > arguments.max_bad_share * refusals.total:
        share = f"--max-bad-share {arguments.max_bad_share}"
        raise RecipeError(
            f"{refusals.bad} of {refusals.total} rows cannot be used, more than {share} (all in {refused}); mend them"
        )
    if not categories:
        raise RecipeError(f"{', '.join(arguments.sources)}: no prompts")
    aside.rename(arguments.out)
    for category, number in categories.most_common():
        print(f"{number:>7} {category}")
    print(f"{arguments.out}: {categories.total()} prompts")


def prompts(sources: list[str], split: str, refusals: Refusals) -> Iterator[dict[str, Any]]:
    """The different prompts of all sources: messages, tools where there are some, category."""
    seen = set()
    for path in sources:
        name = Path(path).resolve().parent.name if Path(path).is_file() else Path(path).name
        for row in rows(Source(path, split=split)):
            refusals.total += 1
            try:
                content = parse(row)
                asked = to_conversation(content).asked()
            except BadRow as error:
                refusals.add(row.where, error.reason, str(error))
                continue
            if not asked.messages:
                refusals.add(row.where, "plain text asks nothing", "no prompt")
            elif asked.id in seen:
                refusals.add(row.where, "asked before, word for word", "given twice", harmless=True)
            else:
                seen.add(asked.id)
                category = content.get("category")
                tools = {"tools": asked.tools} if asked.tools else {}
                yield {"messages": asked.messages, **tools, "category": category if isinstance(category, str) else name}


if __name__ == "__main__":
    run_script(main)
