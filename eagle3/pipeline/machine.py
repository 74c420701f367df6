"""The machine that a run is planned for: GPUs, host memory and disk, as they are or as the user says they will be."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from eagle3.terminal import UserError

# Dense bf16 products of 8192 x 8192 that a GPU reaches, by a part of its name: 790 measured on an H200 here, the others
# from that and their makers' figures
MATMUL = {"H200": 790e12, "H100": 700e12, "H20": 130e12, "B200": 1500e12, "A100": 260e12, "4090": 150e12, "3090": 65e12}
MATMUL_ELSE = 150e12
MATMUL_CPU = 2e11  # of a core, float32: what training reached here on two


@dataclass(frozen=True)
class Machine:
    gpus: int  # that the run may use
    gpu_bytes: int  # of the smallest
    gpu_name: str
    memory: int  # bytes that the host can still give
    cores: int
    disk: int | None  # bytes free where the run writes; None: ask the file system
    said: bool  # by --machine

    @property
    def matmul(self) -> float:
        """Floating-point operations a second of one GPU, or of the host."""
        if not self.gpus:
            return MATMUL_CPU * self.cores
        return next((rate for name, rate in MATMUL.items() if name in self.gpu_name), MATMUL_ELSE)

    def free(self, folder: Path) -> int:
        """Bytes free for `folder`, which may not exist yet."""
        return self.disk if self.disk is not None else shutil.disk_usage(existing(folder)).free

    def described(self) -> str:
        gpus = (
            f"{self.gpus} GPU{'s' if self.gpus > 1 else ''} of {self.gpu_bytes / 1e9:.0f} GB" if self.gpus else "no GPU"
        )
        named = f" ({self.gpu_name})" if self.gpu_name else ""
        return f"{gpus}{named}, {self.memory / 1e9:.0f} GB of host memory" + (
            ", as --machine says" if self.said else ""
        )


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def this_machine() -> Machine:
    """What CUDA and the kernel say."""
    import torch

    from eagle3.capture import preflight

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(number) for number in range(count)]
    smallest = min((one.total_memory for one in properties), default=0)
    name = getattr(properties[0], "name", "") if properties else ""
    return Machine(count, smallest, name, preflight.available_memory(), os.cpu_count() or 1, None, False)


def said_machine(text: str) -> Machine:
    """--machine gpus=8x96,memory=1000,disk=900[,name=H200]: GB. Raises UserError for anything else."""
    fields = dict(part.partition("=")[::2] for part in text.split(",") if part)
    gpus = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", fields.pop("gpus", "0x0"))
    name = fields.pop("name", "")
    sizes = {key: fields.pop(key, "") for key in ("memory", "disk")}
    if gpus is None or fields or not all(re.fullmatch(r"\d+(\.\d+)?", size) for size in sizes.values()):
        raise UserError(f"--machine {text}: expected gpus=8x96,memory=1000,disk=900 in GB, with name=H200 if you like")
    memory, disk = (round(float(size) * 1e9) for size in sizes.values())
    return Machine(int(gpus[1]), round(float(gpus[2]) * 1e9), name, memory, os.cpu_count() or 1, disk, True)
