"""Files of samples are byte for byte what torch.save makes of them."""

import io

import numpy as np
import pytest
import torch

from eagle3.prepare import sample_file as module
from eagle3.prepare.sample_file import sample_file


@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 257, 600, 0x4D4D, 0x7A7B, 65535, 65536, 70000])
def test_every_length_is_written_as_torch_saves_it(tokens):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, 2**31 - 1, (tokens,), generator=generator, dtype=torch.int32)
    mask = torch.rand(tokens, generator=generator) < 0.5
    content = sample_file(ids.numpy(), mask.numpy())
    saved = io.BytesIO()
    torch.save({"input_ids": ids, "loss_mask": mask}, saved)
    assert bytes(content) == saved.getvalue()
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert torch.equal(loaded["input_ids"], ids) and torch.equal(loaded["loss_mask"], mask)


def test_a_torch_that_describes_tensors_otherwise_is_found_out(monkeypatch):
    module._description.cache_clear()
    monkeypatch.setattr(module, "OCCURRENCES", 5)
    with pytest.raises(RuntimeError, match="describes tensors in another way"):
        sample_file(np.ones(300, dtype=np.int32), np.ones(300, dtype=np.bool_))
