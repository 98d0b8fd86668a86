"""How large the tensors are that some code makes."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sizes(TorchDispatchMode):
    """Notes the elements of all that operators give back; of a view its own, not its storage's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found.extend(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        return out
