"""Runs the target over a recipe's documents once and keeps their features on disk, for training without the target beside it.

    python data/capture.py recipes/qwen3_8b.yaml --out /data/features
    python data/capture.py recipes/qwen3_8b.yaml --out /data/features --part 0/8     # the first of eight processes side by side
    accelerate launch train/eagle3.py recipes/qwen3_8b.yaml train.features=/data/features

Started again, it goes on with what is missing. A store is large (the size is said before the first byte); where documents are read
only a few times, the target beside the drafter costs less.
"""

import argparse
import shutil
from pathlib import Path

import recipes.cpu  # noqa: F401  # before torch

# isort: split
import torch

from data.batch import Document
from data.chat import Chat
from data.conversations import DataRecipe, data_folder
from data.documents import DocumentSet, open_documents
from data.store import Place, StoreWriter, bytes_per_token, check_made_by, key_of, places, save_frozen
from data.target import resolve_target, target_fingerprint
from data.target_model import load_target, target_model_config
from data.teacher import GROUP, OnlineTeacher, check_aux_layers
from data.vllm_features import VllmTeacher
from recipes.load import RecipeError, load_recipe, recipe_arguments, run_script
from recipes.progress import progress_bar

GIB = 2**30
VLLM_TOKENS = 1 << 14
"""Tokens that vLLM gets at a time; their states wait on the store's disk, then in memory."""


def part(text: str) -> tuple[int, int]:
    """ "2/8" as (2, 8): the third of eight."""
    which, _, of = text.partition("/")
    if not (which.isdecimal() and of.isdecimal() and int(which) < int(of)):
        raise argparse.ArgumentTypeError(f"{text} is none; give 0/8 for the first of eight")
    return int(which), int(of)


def groups(found: DocumentSet, *, size: int, tokens: int) -> list[list[Document]]:
    """The documents that training and validation read, in groups that are run together: neighbours in length, whoever asks; at most
    ``size`` documents, and ``tokens`` tokens where they are more than one."""
    documents = [document for split in ("train", "validation") for document in found.split(split)]
    documents.sort(key=lambda document: (len(document.tokens_T), document.id))
    made: list[list[Document]] = []
    for document in documents:
        if made and len(made[-1]) < size and num_tokens(made[-1:]) + len(document.tokens_T) <= tokens:
            made[-1].append(document)
        else:
            made.append([document])
    return made


def is_held(group: list[Document], held: dict[str, Place]) -> bool:
    """Whether a store has all of a group."""
    return all(key_of(document) in held for document in group)


def num_tokens(of: list[list[Document]]) -> int:
    """Tokens of all documents in groups."""
    return sum(len(document.tokens_T) for group in of for document in group)


def check_size(tokens: int, each: int, folder: Path, limit_gib: float | None) -> None:
    """Says how large the store gets; RecipeError where that is more than allowed, or than the disk has."""
    free, size = shutil.disk_usage(folder).free / GIB, tokens * each / GIB
    print(f"{tokens} tokens to do in all, {each / 1024:.1f} KiB each: {size:.2f} GiB, of {free:.1f} GiB free on {folder}")
    limit = min(free, limit_gib) if limit_gib is not None else 0.9 * free
    if size > limit:
        raise RecipeError(
            f"the store would take {size:.2f} GiB more, over the limit of {limit:.2f}; give --out on a larger disk, or fewer "
            "--aux-layers, or train with the target beside the drafter (no train.features; see train.feature_cache_gib)"
        )


def main() -> None:
    parser = recipe_arguments(__doc__)
    parser.add_argument("--out", type=Path, help="the store's folder; default runs/<name>-data/features")
    parser.add_argument("--aux-layers", type=int, nargs="+", help="states to keep; default 2, L/2, L-3 of L layers, as EAGLE-3's")
    parser.add_argument("--part", type=part, default=(0, 1), help="which of how many processes this is; default 0/1")
    parser.add_argument(
        "--engine",
        choices=["transformers", "vllm"],
        default="transformers",
        help="what runs the target; vllm spreads it over data.tensor_parallel_size GPUs, of which each --part then needs its own "
        "(CUDA_VISIBLE_DEVICES); default %(default)s",
    )
    parser.add_argument("--limit-gib", type=float, help="the most to write; default nine tenths of what is free")
    arguments = parser.parse_intermixed_args()
    recipe = load_recipe(arguments.recipe, DataRecipe, arguments.overrides)
    target, out, (which, of) = recipe.target, arguments.out or data_folder(recipe.name) / "features", arguments.part
    folder = resolve_target(target)
    text = target_model_config(folder).get_text_config()
    layers, width = int(text.num_hidden_layers), int(text.hidden_size)
    aux_layers = tuple(arguments.aux_layers or (2, layers // 2, layers - 3))
    check_aux_layers(aux_layers, layers)
    fingerprint = target_fingerprint(folder)
    chat = Chat.load(folder, recipe.data.chat_template_kwargs)
    found = open_documents(recipe.data, recipe.name, chat=chat, target=fingerprint)
    with_vllm = arguments.engine == "vllm"
    wanted = groups(found, size=VLLM_TOKENS if with_vllm else GROUP, tokens=VLLM_TOKENS if with_vllm else 1 << 62)
    out.mkdir(parents=True, exist_ok=True)
    made_by = {"target": fingerprint, "dtype": target.dtype, "aux_layers": list(aux_layers)}
    if (out / "store.json").is_file():
        check_made_by(out, made_by)
    held = places(out)
    lacking = [(i, group) for i, group in enumerate(wanted) if not is_held(group, held)]
    # Of all parts, for they share the disk.
    check_size(
        num_tokens([group for _, group in lacking]), bytes_per_token(len(aux_layers), width, target.dtype), out, arguments.limit_gib
    )
    left = [group for i, group in lacking if i % of == which]
    if left:
        teacher: OnlineTeacher | VllmTeacher
        if with_vllm:
            longest = max(len(document.tokens_T) for group in left for document in group)
            parallel = recipe.data.tensor_parallel_size
            teacher = VllmTeacher(folder, target, aux_layers, max_length=longest, tensor_parallel_size=parallel, scratch=out)
        else:
            count = torch.cuda.device_count()
            device = torch.device(f"cuda:{which % count}" if count else "cpu")
            teacher = OnlineTeacher(load_target(folder, target, device), aux_layers)
        writer = StoreWriter(out, f"{which}-of-{of}", {**made_by, "logits": teacher.head.transform()})
        save_frozen(out, f"{which}-of-{of}", teacher.model)
        with progress_bar(total=num_tokens(left), desc="target features", unit="token") as bar:
            for group in left:
                writer.add(group, teacher.features(group))
                bar.update(num_tokens([group]))
        writer.close()
    print(f"next: accelerate launch train/eagle3.py {arguments.recipe} train.features={out}")


if __name__ == "__main__":
    run_script(main)
