"""Tensors of a model folder, read through a map of the safetensors files."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.engine.model.loader import ModelFolder
from shared.errors import ModelFault


class WeightReader:
    """Reads tensors by name, in `dtype` on `device`. Raises ModelFault."""

    def __init__(self, folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        try:
            files: list[Any] = [safe_open(folder.path / name, framework="pt") for name in folder.weight_files]
        except (OSError, SafetensorError) as error:
            raise ModelFault(f"{folder.path}: cannot be read: {error}", remedy="Fetch the model's folder again") from error
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - a safetensors file is no dict

    def tensor(self, name: str) -> Tensor:
        """A copy: a tensor that stayed in the map would keep the whole file in memory, beside the packed weights."""
        return self._mapped(name).to(device=self._device, dtype=self._dtype, copy=True)

    def joined(self, *names: str) -> Tensor:
        """Tensors below one another: several products in one."""
        return torch.cat([self._mapped(name).to(device=self._device, dtype=self._dtype) for name in names])

    def _mapped(self, name: str) -> Tensor:
        stored: Tensor = self._file_of[name].get_tensor(name)
        return stored
