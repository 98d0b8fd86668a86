"""Per-row losses between a drafter's logits q and the target's p over the same vocabulary. Pure; fp32 inside.

Each returns one value per row; the caller weighs, sums and counts. R rows, W vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor

Loss = Literal["kl", "ce", "tv", "lk"]


def row_loss(loss: Loss, student_RW: Tensor, teacher_RW: Tensor) -> Tensor:
    """Losses [R] of student logits [R, W] against teacher logits [R, W]; no gradient reaches the teacher.

    kl: KL(p || q), the soft-label loss of EAGLE-3 (arXiv 2503.01840) less the teacher's entropy, so that 0 is perfect.
    ce: -log q of the teacher's most likely token.
    tv: total variation 1 - sum min(p, q), which is 1 - acceptance under speculative sampling (arXiv 2211.17192).
    lk: lam * kl + (1 - lam) * tv with lam = exp(-3 * acceptance), detached (arXiv 2602.23881).
    """
    log_q_RW = torch.log_softmax(student_RW.float(), dim=-1)
    p_RW = torch.softmax(teacher_RW.detach().float(), dim=-1)
    if loss == "ce":
        return -log_q_RW.gather(-1, p_RW.argmax(-1, keepdim=True)).squeeze(-1)
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
