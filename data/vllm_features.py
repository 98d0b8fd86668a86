"""Features from vLLM's extract_hidden_states: the target on as many GPUs as vLLM spreads it over, at vLLM's speed.

vLLM gets a document's token ids and hands back the states that its layers left behind each; the last norm and the head, which it
keeps to itself, come from the checkpoint.
"""

import os
import platform
import re
import shutil
import tempfile
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig, PreTrainedModel

from data.batch import Document
from data.generation import serving_environment
from data.target import TargetConfig
from data.target_head import TargetHead
from data.target_model import read_model
from data.teacher import Features, judged_argmax
from recipes.load import RecipeError
from recipes.provenance import environment


def load_outer(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The target without its decoder layers: embedding, last norm, head."""
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    text.num_hidden_layers = 0
    for holder in (config, text):
        holder.__dict__.pop("quantization_config", None)  # of the layers, which vLLM runs
    if getattr(text, "layer_types", None):
        text.layer_types = []
    model = read_model(folder, {"config": config, "dtype": dtype, "device_map": {"": device}})
    model.requires_grad_(False).eval()
    return model


def drop_scratch(folder: Path) -> None:
    """Removes what processes of this machine that were killed left of their states in ``folder``."""
    for left in folder.glob(".scratch-*"):
        mine = re.fullmatch(rf"\.scratch-{re.escape(platform.node())}-(\d+)-\w+", left.name)
        if mine and not psutil.pid_exists(int(mine[1])):
            shutil.rmtree(left, ignore_errors=True)


class VllmTeacher:
    """Features of documents of at most max_length tokens, from vLLM in this process. scratch: a folder, in which vLLM leaves states
    until they are read; what processes of this machine that were killed left there is removed."""

    def __init__(
        self,
        folder: Path,
        target: TargetConfig,
        aux_layers: tuple[int, ...],
        *,
        max_length: int,
        tensor_parallel_size: int,
        scratch: Path,
    ) -> None:
        drop_scratch(scratch)
        has_gpu = torch.cuda.is_available()
        if not has_gpu and "vllm_cpu_fixes" not in environment()["vllm_plugins"]:
            raise RecipeError("vLLM's CPU build hands over no states; install tests/vllm_cpu/plugin, or take --engine transformers")
        # The token that vLLM has to answer with may stand behind the last place of the target's context: it is never run.
        os.environ.update({**serving_environment(), "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
        try:
            from vllm import LLM
        except ImportError as error:
            raise RecipeError(f"vLLM is needed for --engine vllm ({error}); install it as README.md says") from None
        self.model = load_outer(folder, getattr(torch, target.dtype), "cuda" if has_gpu else "cpu")
        self.head = TargetHead.of(self.model)
        self.last = int(AutoConfig.from_pretrained(folder).get_text_config().num_hidden_layers)
        ids = sorted({*aux_layers, self.last})  # vLLM hands them over in this order
        self.columns, self.last_column = [ids.index(layer) for layer in aux_layers], ids.index(self.last)
        self.scratch = tempfile.TemporaryDirectory(dir=scratch, prefix=f".scratch-{platform.node()}-{os.getpid()}-")
        try:
            self.engine = LLM(
                str(folder),
                dtype=target.dtype,
                max_model_len=max_length + 1,
                skip_tokenizer_init=True,
                tensor_parallel_size=tensor_parallel_size,
                enforce_eager=not has_gpu,
                gpu_memory_utilization=0.8,  # embedding, norm and head are there, too
                # What is taken from a cache is not computed, and so not handed over.
                enable_prefix_caching=False,
                speculative_config={
                    "method": "extract_hidden_states",
                    "num_speculative_tokens": 1,
                    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
                },
                kv_transfer_config={
                    "kv_connector": "ExampleHiddenStatesConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"shared_storage_path": self.scratch.name},
                },
            )
        except RuntimeError as error:
            if "EAGLE3 interface" not in str(error):
                raise
            raise RecipeError(f"vLLM hands over no states of {folder}'s architecture; take --engine transformers") from None

    def features(self, documents: list[Document]) -> list[Features]:
        """Their features, in their order; RecipeError where vLLM read other tokens."""
        from vllm import SamplingParams
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            cleanup_hidden_states,
            load_hidden_states,
        )
        from vllm.inputs import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=document.tokens_T.tolist()) for document in documents]
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        outputs = self.engine.generate(prompts, params, use_tqdm=False)
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            for _ in range(2):  # in one process, states are handed over in the steps behind the last one
                self.engine.llm_engine.step()
        found = []
        for document, output in zip(documents, outputs, strict=True):
            path = (output.kv_transfer_params or {})["hidden_states_path"]
            read = load_hidden_states(path)
            cleanup_hidden_states(path)
            if read["token_ids"].tolist() != document.tokens_T.tolist():
                raise RecipeError(f"vLLM read other tokens than those of document {document.id}")
            found.append(self._features(document, read["hidden_states"].to(self.model.device)))
        return found

    @torch.no_grad()
    def _features(self, document: Document, states_TAD: torch.Tensor) -> Features:
        last_TD = self.model.get_decoder().norm(states_TAD[:, self.last_column])
        return Features(states_TAD[:, self.columns].clone(), last_TD, judged_argmax(self.head, document, last_TD))
