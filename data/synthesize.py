"""Has the target write user prompts itself, given only its template's user header (Magpie, arXiv 2406.08464).

    python data/synthesize.py recipes/smollm2_chat_cpu.yaml

For recipes with data.prompts: null. Writes runs/<name>-data/prompts.jsonl; started again, it goes on where it stopped. Kept are
prompts that a person could have sent, in the language asked for, and none that is nearly the same as one before.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from data.chat import Chat, Message
from data.conversations import DataRecipe, SynthesisConfig, data_folder, synthesised_path
from data.dialogues import Dialogue
from data.generation import generate_into
from data.sources import Source, parse, rows
from data.target import resolve_target
from recipes.load import RecipeError, load_recipe, recipe_arguments, run_script


def user_header(chat: Chat) -> tuple[list[int], list[int]]:
    """What the template puts before a user's first word: after it, the target writes a prompt instead of an answer. And the special
    token behind the last word, if it has one: where it is no end-of-sequence token, the target would go on and answer itself."""
    marker = "0x5eed"
    text = chat.render([Message(role="user", content=marker)], None, prompt=True)
    before, found, behind = text.partition(marker)
    assert found, "the chat template does not show the user's text"
    header, after = (list(chat.tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, behind))
    return header, [token for token in after[:1] if token in chat.tokenizer.added_tokens_decoder]


def write(header: list[int]) -> Dialogue:
    """Asks the target for one prompt."""
    output = yield header
    return {"text": output.text.strip(), "finish_reason": output.finish_reason}


class Filter:
    """Keeps prompts that differ; counts the others by reason."""

    def __init__(self, config: SynthesisConfig) -> None:
        try:
            from datasketch import MinHash, MinHashLSH
            from py3langid import classify
        except ImportError as error:
            raise RecipeError(f"synthesis needs a package that is not here ({error}); pip install datasketch py3langid") from None
        self.config = config
        self.min_hash = partial(MinHash, num_perm=64, seed=1)
        self.seen = MinHashLSH(threshold=config.max_similarity, num_perm=64)
        self.language_of = classify
        self.reasons: Counter[str] = Counter()

    def keep(self, key: str, text: str, finish_reason: str) -> bool:
        """Whether to keep a prompt."""
        reason = self._why_not(key, text, finish_reason)
        self.reasons[reason or "kept"] += 1
        return reason is None

    def _why_not(self, key: str, text: str, finish_reason: str) -> str | None:
        config, words = self.config, text.split()
        if finish_reason != "stop":
            return "unfinished"
        if not config.min_words <= len(words) <= config.max_words:
            return "too short or too long"
        if not "".join(words).isprintable():
            return "unprintable"
        if config.language is not None and self.language_of(text)[0] != config.language:
            return "another language"
        sketch = self.min_hash()
        sketch.update_batch([gram.encode() for gram in _grams(text)])
        if self.seen.query(sketch):
            return "nearly the same as one before"
        self.seen.insert(key, sketch)
        return None


def _grams(text: str, n: int = 5) -> set[str]:
    """The n-grams of characters of a text in small letters, with single spaces."""
    plain = " ".join(text.lower().split())
    return {plain[i : i + n] for i in range(max(len(plain) - n + 1, 1))}


def distinct(texts: Iterable[str], n: int) -> float:
    """Distinct-n (Li et al., arXiv 1510.03055): different n-grams of words over all of them, in all texts together."""
    total, seen = 0, set()
    for text in texts:
        words = text.lower().split()
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        total += len(grams)
        seen.update(grams)
    return len(seen) / max(total, 1)


def main() -> None:
    arguments = recipe_arguments(__doc__).parse_intermixed_args()
    recipe = load_recipe(arguments.recipe, DataRecipe, arguments.overrides)
    data = recipe.data
    if data.prompts is not None:
        print(f"nothing to synthesise: data.prompts names {', '.join(source.path for source in data.prompts)}")
        print(f"next: python data/regenerate.py {arguments.recipe}")
        return
    folder = resolve_target(recipe.target)
    header, stop = user_header(Chat.load(folder, data.chat_template_kwargs))
    chosen = Filter(data.synthesis)
    raw, path = data_folder(recipe.name) / "synthesised.jsonl", synthesised_path(recipe.name)

    def dialogues() -> Iterator[tuple[str, Dialogue]]:
        return ((f"prompt-{i:07d}", write(header)) for i in range(data.synthesis.num_prompts))

    generate_into(raw, dialogues, data.synthesis.sampling, target=recipe.target, folder=folder, data=data, stop=stop)
    written = sorted((parse(line) for line in rows(Source(str(raw)))), key=lambda row: row["key"])
    kept = [row["text"] for row in written if chosen.keep(row["key"], row["text"], row["finish_reason"])]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in kept]
    path.write_text("".join(lines), encoding="utf-8")
    others = ", ".join(f"{count} {reason}" for reason, count in chosen.reasons.most_common() if reason != "kept")
    print(f"{path}: {len(kept)} of {len(written)} synthesised prompts kept" + (f" (left out: {others})" if others else ""))
    print(f"diversity: distinct-1 {distinct(kept, 1):.3f}, distinct-2 {distinct(kept, 2):.3f}, distinct-3 {distinct(kept, 3):.3f}")
    print(f"next: python data/regenerate.py {arguments.recipe}")


if __name__ == "__main__":
    run_script(main)
