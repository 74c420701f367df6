"""The draft's loss: KL divergence from the target's distribution, renormalised over the draft vocabulary."""

import torch
import torch.nn.functional as F


class Teacher:
    """The target's next-token distribution at the supervised positions of a batch, over the draft vocabulary."""

    def __init__(self, logits: torch.Tensor) -> None:
        """logits: [S, D], of final_norm and lm_head rows of the draft ids."""
        log_p = F.log_softmax(logits.float(), dim=-1)
        self.p = log_p.exp()  # [S, D]
        self.negative_entropy = (self.p * log_p).sum(-1)  # [S]

    def kl(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """KL(target || draft) of each row, [R]: draft logits [R, D], index int64 [R] into the S positions."""
        log_q = F.log_softmax(logits.float(), dim=-1)
        return self.negative_entropy[index] - (self.p[index] * log_q).sum(-1)
