"""The bytes of a sample's .pt, as torch.save makes them, in a tenth of its time.

Most of what torch.save does for a small file is pickling the description of its tensors, and that of a sample differs
from the next one's in nothing but its number of tokens.
"""

import io
import zipfile
from functools import cache

import numpy as np
import torch

PLACE = 0x7A7B  # a number of tokens that stands for another; two bytes in a pickle, as those of RANGE
RANGE = range(256, 65536)
HEAD = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
OCCURRENCES = 4  # each tensor has it as its storage's size and as its shape


def sample_file(ids: np.ndarray, mask: np.ndarray) -> memoryview:
    """input_ids, int32 [T], and loss_mask, bool [T], as a file."""
    tensors = {"input_ids": torch.from_numpy(ids), "loss_mask": torch.from_numpy(mask)}
    if len(ids) not in RANGE:
        return _saved(tensors)
    buffer = io.BytesIO()
    description = _description().replace(_number(PLACE), _number(len(ids)))
    writer = torch._C.PyTorchFileWriter(buffer)
    for name, content in {"data.pkl": description, **HEAD}.items():
        writer.write_record(name, content, len(content))
    for place, tensor in enumerate(tensors.values()):
        writer.write_record(f"data/{place}", tensor.untyped_storage(), tensor.nbytes)
    writer.write_end_of_file()
    return buffer.getbuffer()


def _saved(tensors: dict[str, torch.Tensor]) -> memoryview:
    buffer = io.BytesIO()  # torch writes to a file in many small pieces
    torch.save(tensors, buffer)
    return buffer.getbuffer()


@cache
def _description() -> bytes:
    """data.pkl of a sample of PLACE tokens."""
    tensors = {"input_ids": torch.zeros(PLACE, dtype=torch.int32), "loss_mask": torch.zeros(PLACE, dtype=torch.bool)}
    description = zipfile.ZipFile(io.BytesIO(_saved(tensors))).read("archive/data.pkl")
    if description.count(_number(PLACE)) != OCCURRENCES:
        raise RuntimeError(f"torch {torch.__version__} describes tensors in another way than this module knows")
    return description


def _number(tokens: int) -> bytes:
    """A number of tokens in a pickle (opcode BININT2)."""
    return b"M" + tokens.to_bytes(2, "little")
