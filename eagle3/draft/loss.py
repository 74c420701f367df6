"""The draft's loss: KL divergence from the target's distribution, renormalised over the draft vocabulary."""

import torch
import torch.nn.functional as F


class Teacher:
    """The target's next-token distribution at the supervised positions of a batch, over the draft vocabulary."""

    def __init__(self, logits: torch.Tensor, normaliser: torch.Tensor | None = None) -> None:
        """logits: [S, D], of final_norm and lm_head rows of the draft ids.

        normaliser: float [S], log of the sum of exp(logit) over all V target ids; only `overlap` needs it.
        """
        logits = logits.float()
        log_p = F.log_softmax(logits, dim=-1)
        self.p = log_p.exp()  # [S, D]
        self.negative_entropy = (self.p * log_p).sum(-1)  # [S]
        # share of the target's probability that lies inside the draft vocabulary, [S]
        self.inside = None if normaliser is None else (logits.logsumexp(-1) - normaliser).exp()

    def kl(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """KL(target || draft) of each row, [R]: draft logits [R, D], index int64 [R] into the S positions."""
        log_q = F.log_softmax(logits.float(), dim=-1)
        return self.negative_entropy[index] - (self.p[index] * log_q).sum(-1)

    def overlap(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """sum of min(p, q) over the vocabulary, [R]: the chance that a sampled draft is accepted at temperature 1.

        p is the target's distribution over all its ids, q the draft's: logits [R, D]; index int64 [R].
        """
        p = self.p[index] * self.inside[index, None]  # [R, D]
        return torch.minimum(p, F.softmax(logits.float(), dim=-1)).sum(-1)
