"""Number for number against speculators 0.9.0 (Eagle3DraftModel, eager attention, eager loss), float32 on CPU."""

import pytest
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import eager
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig

from eagle3.draft.config import DraftConfig
from eagle3.draft.loss import Teacher
from eagle3.draft.model import DraftModel
from eagle3.training.supervision import make_batch

HIDDEN, VOCAB, DRAFT_VOCAB, STEPS = 64, 256, 96, 4
EPS = 1e-6


def our_config(rope: dict, **norms: bool) -> DraftConfig:
    return DraftConfig(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=EPS,
        rope=rope,
        max_position_embeddings=4096,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        aux_layers=(1, 2, 3),
        **norms,
    )


def reference_model(config: DraftConfig) -> Eagle3DraftModel:
    layer = config.llama()
    layer._attn_implementation = "eager"
    described = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = Eagle3DraftModel(described)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.lm_head.weight.requires_grad_(True)
    return model


def samples() -> list[dict[str, torch.Tensor]]:
    """Two documents: a prompt and two assistant turns, a prompt and three; the last turn ends the document."""
    made = []
    for length, turns in ((90, [(20, 41), (60, 90)]), (131, [(35, 50), (55, 57), (80, 131)])):
        mask = torch.zeros(length, dtype=torch.bool)
        for start, end in turns:
            mask[start:end] = True
        made.append(
            {
                "input_ids": torch.randint(0, VOCAB, (length,), dtype=torch.int32),
                "loss_mask": mask,
                "aux_hidden": torch.randn(length, 3 * HIDDEN),
                "final_hidden": torch.randn(length, HIDDEN),  # all positions; ours are picked below
            }
        )
    return made


def reference_loss(model: Eagle3DraftModel, documents: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """speculators' own shift of each document, then its packed forward."""
    parts = [
        shift_batch(
            {
                "input_ids": d["input_ids"].long(),
                "hidden_states": d["aux_hidden"],
                "verifier_last_hidden_states": d["final_hidden"],
                "loss_mask": d["loss_mask"],
                "lengths": torch.tensor([len(d["input_ids"])]),
                "position_ids": torch.arange(len(d["input_ids"])),
            }
        )
        for d in documents
    ]
    packed = {key: torch.cat([part[key] for part in parts])[None] for key in parts[0] if key != "lengths"}
    numbers = torch.cat([torch.full_like(part["input_ids"], n) for n, part in enumerate(parts)])[None]
    _, loss, _ = model(
        packed["hidden_states"],
        packed["input_ids"],
        numbers,
        loss_mask=packed["loss_mask"],
        position_ids=packed["position_ids"],
        verifier_last_hidden_states=packed["verifier_last_hidden_states"],
        ttt_steps=STEPS,
        loss_config={"kl_div": (eager.kl_div_loss, 1.0)},
    )
    return loss


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 50000.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}


@pytest.mark.parametrize("fc_norm", [False, True], ids=["fc", "fc_norm"])
@pytest.mark.parametrize("norm_output", [False, True], ids=["residual", "norm_output"])
@pytest.mark.parametrize("rope", ROPES)
def test_loss_and_gradients_equal_speculators(rope: str, norm_output: bool, fc_norm: bool) -> None:
    """T37: the head takes the normed state, the next step the raw one, or the normed one with norm_output."""
    torch.manual_seed(1)
    config = our_config(ROPES[rope], fc_norm=fc_norm, norm_output=norm_output)
    reference = reference_model(config)
    ours = DraftModel(config)
    layer = reference.layers[0]
    renamed = {"fc": reference.fc, "norm": reference.norm, "lm_head": reference.lm_head}
    pairs = {f"{name}.weight": module.weight for name, module in renamed.items()}
    pairs |= {f"midlayer.{name}": parameter for name, parameter in layer.named_parameters()}
    if fc_norm:
        pairs |= {f"fc_norm.{name}": parameter for name, parameter in reference.fc_norm.named_parameters()}
    ours.load_state_dict({name: parameter.detach() for name, parameter in pairs.items()}, strict=True)
    ours.embed_tokens.copy_(reference.embed_tokens.weight)

    documents = samples()
    wanted = reference_loss(reference, documents)
    wanted.backward()

    picked = [d | {"final_hidden": d["final_hidden"][d["loss_mask"]]} for d in documents]
    batch = make_batch(picked, STEPS, "shifted-mask")
    normed = torch.nn.functional.rms_norm(batch.final_hidden, (HIDDEN,), reference.verifier_norm.weight, EPS)
    output = ours(batch, Teacher(normed @ reference.verifier_lm_head.weight.T))
    loss = (output.loss / batch.valid.sum(1)).sum()
    loss.backward()

    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for name, parameter in ours.named_parameters():
        difference = (parameter.grad - pairs[name].grad).norm() / pairs[name].grad.norm()
        assert difference < 1e-4, f"{name}: gradients differ by {difference:.1e}"
