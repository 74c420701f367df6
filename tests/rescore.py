"""A second reader of an export, for tests: plain torch over config.json and model.safetensors, nothing of eagle3/.

It drafts as a server does, one start at a time and one key after the other, so that it is slow and easy to check. At
step k of start t the draft attends to the keys of true target states at positions 0..t and to its own of steps 1..k.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass
class Score:
    """Over some samples; lists have one number a step."""

    loss: list[float]  # mean KL(target || draft) over the draft vocabulary
    rows: list[int]
    walks: list[list[int]]  # for 1, 2, .. steps drafts: accepted drafts at each start of the walk

    def accepted(self) -> list[int]:
        return [sum(walk) for walk in self.walks]

    def starts(self) -> list[int]:
        return [len(walk) for walk in self.walks]

    def by_position(self) -> list[int]:
        """Starts of the last walk that accept draft 1, 2, ..."""
        return [sum(accepted > k for accepted in self.walks[-1]) for k in range(len(self.walks))]


def inverse_frequencies(config: dict) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of dimensions, and the factor on cos and sin (YaRN: arXiv:2309.00071)."""
    width = config["head_dim"]
    turns = torch.arange(0, width, 2) / width
    plain = config["rope_theta"] ** -turns
    scaling = config["rope_scaling"]
    if scaling is None:
        return plain, 1.0
    assert scaling["rope_type"] == "yarn"

    def dimension(rotations: float) -> float:
        """Pair that makes so many full turns within the original length."""
        length = scaling["original_max_position_embeddings"]
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config["rope_theta"]))

    low, high = math.floor(dimension(scaling["beta_fast"])), math.ceil(dimension(scaling["beta_slow"]))
    slow = ((torch.arange(width // 2) - max(low, 0)) / (min(high, width - 1) - max(low, 0))).clamp(0, 1)
    return plain * (1 - slow) + plain / scaling["factor"] * slow, 0.1 * math.log(scaling["factor"]) + 1


class Export:
    """The exported draft in float32."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.weights = {
            name.removesuffix(".weight"): t.float() for name, t in stored.items() if name.endswith("weight")
        }
        self.frequencies, self.factor = inverse_frequencies(self.config)
        size = self.config["draft_vocab_size"]
        self.target_ids = torch.arange(size) + stored.get("d2t", torch.zeros(size, dtype=torch.int64))  # [D]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.weights[name] @ x

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean() + self.config["rms_norm_eps"]).rsqrt()
        return self.weights[name] * x * scale

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """What the first step takes beside a token, [H], of the aux layers' states one after the other [A * H]."""
        if self.config["fc_norm"]:
            layers = states.split(self.config["hidden_size"])
            states = torch.cat([self.norm(f"fc_norm.{place}", layer) for place, layer in enumerate(layers)])
        return self.linear("fc", states)

    def rotated(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        """[heads, d]: dimension i turns with i + d/2."""
        angle = position * self.frequencies
        first, second = heads.chunk(2, dim=-1)
        cos, sin = angle.cos() * self.factor, angle.sin() * self.factor
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def projections(self, token: int, hidden: torch.Tensor, position: int) -> list[torch.Tensor]:
        """q, k and v, [heads, d] each, of a token and the hidden state [H] beside it."""
        embedded = self.norm("midlayer.input_layernorm", self.weights["embed_tokens"][token])
        both = torch.cat([embedded, self.norm("midlayer.hidden_norm", hidden)])  # [2H]
        q, k, v = (
            self.linear(f"midlayer.self_attn.{name}_proj", both).view(-1, self.config["head_dim"]) for name in "qkv"
        )
        return [self.rotated(q, position), self.rotated(k, position), v]

    def step(
        self, hidden: torch.Tensor, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer over its residual stream `hidden` [H]. Returns what the next step takes [H], and logits [D]."""
        group = query.shape[0] // keys[0].shape[0]
        mixed = []
        for head, q in enumerate(query):
            scores = torch.stack([key[head // group] @ q for key in keys]) / math.sqrt(q.numel())
            weights = scores.softmax(0)
            mixed.append(sum(w * value[head // group] for w, value in zip(weights, values, strict=True)))
        hidden = hidden + self.linear("midlayer.self_attn.o_proj", torch.cat(mixed))
        x = self.norm("midlayer.post_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self.linear("midlayer.mlp.gate_proj", x))
        hidden = hidden + self.linear("midlayer.mlp.down_proj", gate * self.linear("midlayer.mlp.up_proj", x))
        normed = self.norm("norm", hidden)
        return normed if self.config["norm_output"] else hidden, self.linear("lm_head", normed)


def turns(mask: list[bool]) -> list[tuple[int, int]]:
    """First position and end of each run of true."""
    edges = [i for i in range(len(mask) + 1) if (i > 0 and mask[i - 1]) != (i < len(mask) and mask[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


@torch.no_grad()
def rescore(
    export: Export,
    samples: list[dict[str, torch.Tensor]],
    norm: torch.Tensor,
    eps: float,
    head: torch.Tensor,
    steps: int,
) -> Score:
    """Loss and acceptance of `samples` (stage 02's tensors) with `steps` drafts; `norm` [H] and `head` [V, H] are the
    target's."""
    head = head[export.target_ids]  # [D, H]
    loss, rows, walks = [0.0] * steps, [0] * steps, [[] for _ in range(steps)]
    for sample in samples:
        ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].tolist()
        final = dict(zip([i for i, true in enumerate(mask) if true], sample["final_hidden"].float(), strict=True))
        fused = [export.fused(state.float()) for state in sample["aux_hidden"]]
        true = [export.projections(ids[t + 1], fused[t], t) for t in range(len(ids) - 1)]
        for first, end in turns(mask):
            right: dict[int, int] = {}  # leading right drafts of each start
            for t in range(first - 1, end - 2):
                keys, values = [k for _, k, _ in true[: t + 1]], [v for _, _, v in true[: t + 1]]
                hidden, query = fused[t], true[t][0]
                correct = []
                for k in range(min(steps, end - t - 2)):
                    if k:
                        query, key, value = export.projections(ids[t + 1 + k], hidden, t + k)
                        keys, values = [*keys, key], [*values, value]
                    hidden, logits = export.step(hidden, query, keys, values)
                    state = final[t + 1 + k]
                    teacher = head @ (norm * state * (state.square().mean() + eps).rsqrt())  # [D]
                    p, q = teacher.log_softmax(0), logits.log_softmax(0)
                    loss[k] += float((p.exp() * (p - q)).sum())
                    rows[k] += 1
                    correct.append(int(export.target_ids[logits.argmax()]) == ids[t + 2 + k])
                right[t] = [*correct, False].index(False)
            for drafts, walk in enumerate(walks, 1):
                t = first - 1  # the prompt's last token: the target itself gives the answer's first
                while t in right:
                    walk.append(min(right[t], drafts))
                    t += walk[-1] + 1
    return Score([a / max(n, 1) for a, n in zip(loss, rows, strict=True)], rows, walks)
