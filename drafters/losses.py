"""Per-row losses between a drafter's logits q and the target's p over the same vocabulary. Pure; fp32 inside.

Each returns one value per row; the caller weighs, sums and counts. R rows, W vocabulary.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Loss = Literal["kl", "ce", "tv", "lk"]


def row_loss(loss: Loss, student_RW: Tensor, *, label_R: Tensor, p_RW: Tensor | None) -> Tensor:
    """Losses [R] of student logits [R, W]: ce against labels (int64, indices into W), the others against the teacher's
    probabilities [R, W], fp32.

    kl: KL(p || q), the soft-label loss of EAGLE-3 (arXiv 2503.01840) less the teacher's entropy, so that 0 is perfect.
    ce: -log q of the label.
    tv: total variation 1 - sum min(p, q), which is 1 - acceptance under speculative sampling (arXiv 2211.17192).
    lk: lam * kl + (1 - lam) * tv with lam = exp(-3 * acceptance), detached (arXiv 2602.23881).
    """
    log_q_RW = torch.log_softmax(student_RW.float(), dim=-1)
    if loss == "ce":
        return -log_q_RW.gather(-1, label_R[:, None]).squeeze(-1)
    assert p_RW is not None
    if loss == "kl":
        return kl_rows(p_RW, log_q_RW)
    acceptance_R = torch.minimum(p_RW, log_q_RW.exp()).sum(-1)
    if loss == "tv":
        return 1.0 - acceptance_R
    lam_R = torch.exp(-3.0 * acceptance_R.detach())
    return lam_R * kl_rows(p_RW, log_q_RW) + (1.0 - lam_R) * (1.0 - acceptance_R)


def kl_rows(p_RW: Tensor, log_q_RW: Tensor) -> Tensor:
    """KL(p || q) per row; a token with p = 0 adds nothing."""
    return torch.nn.functional.kl_div(log_q_RW, p_RW, reduction="none").sum(-1)


CHUNK = 2048
"""Rows whose logits exist at a time. 2048 rows of 150,000 words are 1.2 GB in fp32, and a loss holds several such."""


def in_chunks(judge: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> tuple[Tensor, ...]:
    """judge(*rows) for tensors of R rows each, in chunks of rows whose activations the backward computes again.

    judge is a function of each row alone, and gives tensors of a value per row.
    """
    if len(rows[0]) <= CHUNK:
        return judge(*rows)
    chunks = zip(*(tensor.split(CHUNK) for tensor in rows), strict=True)
    parts = [checkpoint(judge, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def dpace_weights(true_BPK: Tensor, exists_BPK: Tensor, *, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): weights [B, P, K] of a block's positions, by what each adds to the expected acceptance.

    true_BPK: probability the drafter gives the true token, 0 where it can't say it. exists_BPK: bool, position holds a label.
    With q~_i = (1 - alpha) q_i + alpha and P_m the product of q~ up to m, position j weighs the sum of P_m over m >= j.
    """
    reach_BPK = ((1 - alpha) * true_BPK + alpha).cumprod(-1) * exists_BPK
    return reach_BPK.flip(-1).cumsum(-1).flip(-1) * exists_BPK
