"""Projections of a layer, and how its weights come to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Linear, VectorTensor
from dflash_adapters.loading import Weights
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.layouts import DeviceMatrix
from dflash_runtime.compute.gpu.layers.matrix import Uploader
from dflash_runtime.compute.gpu.layers.rows import Input, Norm, Rows
from dflash_runtime.compute.gpu.ops.chunks import ChunkKernels
from dflash_runtime.compute.gpu.ops.kernels import LayerKernels
from dflash_runtime.compute.gpu.ops.ops import GpuOps


class DeviceLoader:
    """Brings a file's dense tensors to a device. Implements loading.Loader.

    Owns: matrices, which are loaded once.
    """

    def __init__(self, device: KernelDevice, chunks: ChunkKernels) -> None:
        """`chunks` are told of each matrix, which they may have to multiply."""
        self.uploader = Uploader(device)
        self._device, self._chunks = device, chunks
        self._matrices: dict[tuple[Path, str], DeviceMatrix] = {}

    def load_vector(self, file: GgufFile, tensor_name: str) -> DeviceArray:
        """A tensor as float32."""
        return self._device.upload(np.array(file.floats(tensor_name), np.float32))

    def load_matrix(self, file: GgufFile, tensor_name: str) -> DeviceMatrix:
        """Raises: UnsupportedModel if there are no kernels for its type; DeviceOutOfMemory."""
        key = file.path, tensor_name
        if key not in self._matrices:  # a head may be the embedding table
            self._matrices[key] = matrix = self.uploader.matrix(file, tensor_name)
            self._chunks.expect(matrix.tensor_type, matrix.columns)
        return self._matrices[key]


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """``y = scale * (W x) + bias``, a described Linear with its weights. Shapes: bias [rows]."""

    matrix: DeviceMatrix
    bias: DeviceArray | None
    scale: float | None
    ops: GpuOps

    @property
    def is_plain(self) -> bool:
        """Whether it is a product with the matrix, and no more."""
        return self.bias is None and self.scale is None

    def finish(self, product: Rows) -> None:
        """What follows the product with the matrix, in place."""
        array = product.array
        if self.scale is not None:
            self.ops.elementwise.scale_rows(array, self.scale, array)
        if self.bias is not None:
            self.ops.elementwise.add_bias(array, self.bias, array)

    def add_to(self, residual: Rows, x: Input, kernels: LayerKernels) -> None:
        """Add the projection of `x` to the residual."""
        if self.scale is None:
            kernels.add_product(x, self.matrix, residual)
            self.finish(residual)  # a bias, if any
            return
        (product,) = project(kernels, x, (self,))
        self.ops.elementwise.add_rows(residual.array, product.array, residual.array)


def project(kernels: LayerKernels, x: Input, projections: Sequence[Projection]) -> list[Rows]:
    """Several projections of the same rows, multiplied together."""
    products = kernels.project(x, [each.matrix for each in projections])
    for projection, product in zip(projections, products, strict=True):
        if not projection.is_plain:
            projection.finish(product)
    return products


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of a description on a device, and the launches of its layers."""

    ops: GpuOps
    weights: Weights[DeviceArray]
    eps: float

    def projection(self, linear: Linear) -> Projection:
        """A described projection with its weights."""
        matrix = self.weights.matrices[linear.weight]
        assert isinstance(matrix, DeviceMatrix)
        bias = None if linear.bias is None else self.weights.vectors[linear.bias]
        scale = None if linear.scale is None else self.weights.scales[linear.scale]
        return Projection(matrix, bias, scale, self.ops)

    def norm(self, weight: VectorTensor) -> Norm:
        """A described norm with its weight."""
        return Norm(self.weights.vectors[weight], self.eps)
