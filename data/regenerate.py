"""Has the target answer the recipe's prompts, so that the drafter learns what it will have to guess.

    python data/regenerate.py recipes/smollm2_cpu.yaml
    python data/regenerate.py recipes/llama70b.yaml --server http://node1:8000 --server http://node2:8000

Writes runs/<name>-data/answers.jsonl, a row as each conversation ends. Started again, it answers what is still missing. With
--server, running vLLM servers of the target are asked (vllm serve <target>); else it runs in this process.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data.chat import Chat, Encoded, Message
from data.conversations import DataConfig, DataRecipe, answers_path, read_prompts, repeated_share
from data.dialogues import Dialogue
from data.generation import generate_into
from data.rows import Conversation
from data.sources import Leaks, Source, parse, rows
from data.target import resolve_target
from recipes.load import count, load_recipe, recipe_arguments, run_script


def answer(conversation: Conversation, chat: Chat, *, max_length: int) -> Dialogue:
    """Asks the target after every user's turn, behind what it said before; the row holds the exact tokens of every turn.

    An answer that stands in the conversation is replaced by the target's own. Where tools were called, what came back fits only
    the calls that were made: then all is kept as it stands, and the last turn alone is answered. Ends early behind an answer that
    was cut short or has special tokens inside, such as a call, and where no prompt fits max_length any more.
    """
    messages, history = conversation.messages, list[Message]()
    called = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    asked = next(i for i, message in enumerate(messages) if message["role"] == "user")
    documents: list[Encoded] = []
    finish_reason = "stop"
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i > asked and not called:
            continue
        history.append(message)
        if i + 1 < len(messages) and (called or message["role"] != "user"):
            continue
        prompt = chat.prompt(history, conversation.tools)
        if len(prompt) + 2 > max_length:
            finish_reason = "stop" if documents else "length"
            break
        output = yield prompt
        span = (len(prompt), len(prompt) + len(output.tokens))
        if documents and prompt[: len(documents[-1].tokens)] == documents[-1].tokens:
            documents[-1] = Encoded(prompt + output.tokens, [*documents[-1].spans, span])
        else:
            documents.append(Encoded(prompt + output.tokens, [span]))
        history.append(Message(role="assistant", content=output.text))
        finish_reason = output.finish_reason
        # Special tokens are not in the text: a server's parser would make a call or a channel of them, not this message.
        if finish_reason == "length" or not chat.hidden.isdisjoint(set(output.tokens) - chat.eos):
            break
    row = {"messages": history, "documents": [document._asdict() for document in documents], "finish_reason": finish_reason}
    return row | ({"tools": conversation.tools} if conversation.tools else {})


def main() -> None:
    parser = recipe_arguments(__doc__)
    parser.add_argument("--server", action="append", default=[], help="a running vLLM server's address; may be given several times")
    parser.add_argument("--concurrency", type=count, default=64, help="conversations at a time on each server; default %(default)s")
    arguments = parser.parse_intermixed_args()
    recipe = load_recipe(arguments.recipe, DataRecipe, arguments.overrides)
    data, path = recipe.data, answers_path(recipe.name)
    folder = resolve_target(recipe.target)
    chat = Chat.load(folder, data.chat_template_kwargs)
    leaks = Leaks.of(data.evaluation)

    def dialogues() -> Iterator[tuple[str, Dialogue]]:
        for key, conversation in read_prompts(data, recipe.name, leaks):
            yield key, answer(conversation, chat, max_length=data.max_length)

    generate_into(
        path,
        dialogues,
        data.answers,
        target=recipe.target,
        folder=folder,
        data=data,
        servers=arguments.server,
        concurrency=arguments.concurrency,
    )
    report(path, data)
    print(f"next: accelerate launch train/eagle3.py {arguments.recipe}")


def report(path: Path, data: DataConfig) -> None:
    """Prints what the file of answers holds."""
    reasons: Counter[str] = Counter()
    num_tokens = 0

    def answers() -> Iterator[list[int]]:
        nonlocal num_tokens
        for line in rows(Source(str(path))):
            row = parse(line)
            reasons[row["finish_reason"]] += 1
            for document in row["documents"]:
                for start, end in document["spans"]:
                    num_tokens += end - start
                    yield document["tokens"][start:end]

    repeated = repeated_share(answers())
    cut, kept = reasons["length"], "kept" if data.keep_truncated else "not trained on"
    print(
        f"{path}: {reasons.total()} conversations, {num_tokens} tokens answered, {repeated:.1%} repeated 8-grams, "
        f"{cut} cut at data.answers.max_tokens or data.max_length ({kept})"
    )


if __name__ == "__main__":
    run_script(main)
