"""The models that a scan runs, with random weights in evaluation mode, or a TorchScript file.

`particlenet` is the network of arXiv 1902.08570, table 2 (100 particles of a jet, 16 nearest neighbours, edge
convolutions of 64, 128 and 256 channels), which document 002 of the users scans. All inputs are floats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from probes.core.errors import UsageError
from probes.hardware.torch_build import first_line
from probes.measure.architectures import Block, Linear
from probes.throughput.direct.results import ModelFacts

PARTICLES, FEATURES, CLASSES, NEIGHBOURS = 100, 7, 2, 16
CHANNELS = (64, 128, 256)
HEAD_WIDTH = 256
FAR = 1e4  # from every particle, and still finite in half precision
MLP_WIDTH, MLP_LAYERS = 2048, 8
ENCODER_WIDTH, ENCODER_LAYERS, ENCODER_HEADS, ENCODER_TOKENS = 768, 12, 12, 128  # as BERT-base
PRODUCT_WIDTH = 8192


@dataclass(frozen=True)
class Spec:
    """A model: the shapes of its inputs without the batch, and how to make it on torch's default device."""

    name: str
    inputs: tuple[tuple[int, ...], ...]
    build: Callable[[], nn.Module]


class EdgeConvolution(nn.Module):  # type: ignore[misc]
    """Every point looks at its nearest neighbours: three 1 x 1 convolutions over edges, then their mean."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        widths = (2 * before, after, after, after)
        self.edges = nn.Sequential(
            *(
                layer
                for wide, narrow in pairwise(widths)
                for layer in (nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU())
            )
        )
        self.short = nn.Sequential(nn.Conv1d(before, after, 1, bias=False), nn.BatchNorm1d(after))

    def forward(self, points: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Points (batch, 2, particles), features (batch, before, particles); (batch, after, particles)."""
        batch, width, count = features.shape
        index = nearest(points, NEIGHBOURS).reshape(batch, 1, count * NEIGHBOURS)
        there = features.gather(2, index.expand(batch, width, count * NEIGHBOURS))
        there = there.reshape(batch, width, count, NEIGHBOURS)
        here = features.unsqueeze(-1).expand(batch, width, count, NEIGHBOURS)
        edges = self.edges(torch.cat((here, there - here), 1))
        return functional.relu(edges.mean(-1) + self.short(features))


def nearest(points: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of each point's nearest others, (batch, particles, count), without itself."""
    squares = points.pow(2).sum(1)
    distances = squares.unsqueeze(1) + squares.unsqueeze(2) - 2 * points.transpose(1, 2) @ points
    return distances.topk(count + 1, largest=False)[1][:, :, 1:]


class ParticleNet(nn.Module):  # type: ignore[misc]
    """Edge convolutions on a jet's particles, whose neighbours are found again among the features."""

    def __init__(self) -> None:
        super().__init__()
        widths = (FEATURES, *CHANNELS)
        self.normal = nn.BatchNorm1d(FEATURES)
        self.convolutions = nn.ModuleList(
            EdgeConvolution(before, after) for before, after in zip(widths, CHANNELS, strict=False)
        )
        self.head = nn.Sequential(
            nn.Linear(CHANNELS[-1], HEAD_WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HEAD_WIDTH, CLASSES)
        )

    def forward(self, points: torch.Tensor, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Probabilities (batch, classes). A particle whose mask is 0 is absent."""
        absent = mask == 0
        points, found = points.masked_fill(absent, FAR), self.normal(features).masked_fill(absent, 0.0)
        for turn, convolution in enumerate(self.convolutions):
            at = points if turn == 0 else found.masked_fill(absent, FAR)
            found = convolution(at, found).masked_fill(absent, 0.0)
        count = (mask != 0).to(found.dtype).sum(2).clamp(min=1)
        return functional.softmax(self.head(found.sum(2) / count), 1)


class Encoder(nn.Module):  # type: ignore[misc]
    """Transformer blocks of BERT-base's size on activations, without its table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(ENCODER_WIDTH, ENCODER_HEADS) for _ in range(ENCODER_LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same."""
        found: torch.Tensor = self.blocks(x)
        return found


def _mlp() -> nn.Module:
    return nn.Sequential(*(Linear(MLP_WIDTH) for _ in range(MLP_LAYERS)))


def _product() -> nn.Module:
    return nn.Linear(PRODUCT_WIDTH, PRODUCT_WIDTH, bias=False)


SPECS = {
    spec.name: spec
    for spec in (
        Spec("particlenet", ((2, PARTICLES), (FEATURES, PARTICLES), (1, PARTICLES)), ParticleNet),
        Spec("mlp", ((MLP_WIDTH,),), _mlp),
        Spec("encoder", ((ENCODER_TOKENS, ENCODER_WIDTH),), Encoder),
        Spec("product", ((PRODUCT_WIDTH,),), _product),
    )
}


def spec_of(model: str, shapes: tuple[tuple[int, ...], ...]) -> Spec:
    """A model by its name, or a TorchScript file whose inputs have these shapes. Raises UsageError."""
    if model in SPECS:
        return SPECS[model]

    def build() -> nn.Module:
        try:
            return torch.jit.load(model, map_location="cpu")
        except (RuntimeError, OSError, ValueError) as error:
            raise UsageError(
                f"{model} can't be read as TorchScript: {first_line(error)}", "save it with torch.jit.save"
            ) from error

    return Spec(Path(model).name, shapes, build)


def build_model(spec: Spec, *, seed: int, dtype: torch.dtype, device: str) -> nn.Module:
    """The model in evaluation mode, weights drawn from the seed on the CPU: the same on every device."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        module = spec.build()
    return module.eval().to(device=device, dtype=dtype)


def model_facts(spec: Spec, module: nn.Module) -> ModelFacts:
    """What a report says about a model."""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    shapes = tuple("x".join(map(str, shape)) for shape in spec.inputs)
    return ModelFacts(spec.name, shapes, parameters, 4 * parameters)
