"""The export in the layout of the speculators library (0.9), which vLLM loads too; the only use of that library here.

Its Python API is declared unstable: what depends on it is in this file. It names the decoder layer `layers.0`, and
three readers have three defaults for the norm flags, so each is stated.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle3.draft.config import DraftConfig
from eagle3.export import whole_directory
from eagle3.target import Target


def write_speculators(
    directory: Path, tensors: dict[str, torch.Tensor], config: DraftConfig, target: Target, steps: int, card: str
) -> None:
    """Write the export in that layout; an earlier one is replaced.

    `tensors` are those of the servers' export, `steps` is the number of drafts that readers propose by default.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = config.llama()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(layer, key, target.config.get(key))
    if len(config.aux_layers) != 3:
        # vLLM hands its draft the layer's keys, and counts three states where none says otherwise
        layer.num_aux_hidden_states = len(config.aux_layers)
    described = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.draft_vocab_size,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        target_hidden_size=None,  # the draft's own width
        eagle_aux_hidden_state_layer_ids=list(config.aux_layers),
        embed_requires_grad=False,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=target.name, architectures=target.architectures),
        ),
        dtype="bfloat16",
    )
    renamed = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
    with whole_directory(directory) as work:
        # not save_pretrained, which adds the library's own source as remote code
        (work / "config.json").write_text(described.to_json_string())
        save_file(renamed, work / "model.safetensors", {"format": "pt"})
        (work / "README.md").write_text(card)
