"""Functions to minimize: a quadratic, Rosenbrock's function, and a small network on text. None has noise."""

import re

import torch
from torch import nn

from bagu import ops
from bagu.data import StdlibSource
from bagu.nn.init import draw
from bagu.nn.linear import Linear

LETTERS, WINDOWS = 27, 256  # a to z, and one for all other characters


class Problem(nn.Module):
    """Calling it returns the loss; the goal is `target`."""

    target: float


class Quadratic(Problem):
    """½ θᵀAθ in 64 dimensions, with log-spaced eigenvalues from 1 to 1/κ, along random directions."""

    A: torch.Tensor

    def __init__(self, condition: float, seed: int) -> None:
        super().__init__()
        size = 64
        eigenvalues = condition ** -torch.linspace(0, 1, size, dtype=torch.float64)
        axes = torch.linalg.qr(draw((size, size), "axes", seed).double()).Q
        self.register_buffer("A", ((axes * eigenvalues) @ axes.T).float())
        self.theta = nn.Parameter(draw((size,), "start", seed))
        self.target = 1e-4 * self().item()

    def forward(self) -> torch.Tensor:
        return 0.5 * self.theta @ (self.A @ self.theta)


class Rosenbrock(Problem):
    """(1 - x)² + 100 (y - x²)²: a curved valley, 2,500 times steeper across than along at its minimum (1, 1)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        usual_start = torch.tensor((-1.2, 1.0))
        self.theta = nn.Parameter(usual_start + 0.3 * draw((2,), "start", seed))
        self.target = 1e-3

    def forward(self) -> torch.Tensor:
        x, y = self.theta
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2


class NextLetter(Problem):
    """Predict the next of 27 letters from the last two: embedding, linear, GELU, linear; mean loss in nats."""

    windows: torch.Tensor

    def __init__(self, letters: torch.Tensor, seed: int) -> None:
        super().__init__()
        embedding, hidden = 3, 8
        self.embedding = nn.Parameter(torch.empty(LETTERS, embedding))
        self.up = Linear(2 * embedding, hidden, bias=True)
        self.down = Linear(hidden, LETTERS, bias=True)
        self.register_buffer("windows", letters.unfold(0, 3, 1)[:WINDOWS])
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(draw(p.shape, name, seed) * (1 if name == "embedding" else p.shape[-1] ** -0.5))
        self.target = 1.7

    def forward(self) -> torch.Tensor:
        seen = self.embedding[self.windows[:, :2]].flatten(1)
        return ops.cross_entropy(self.down(ops.gelu(self.up(seen))), self.windows[:, 2]).mean()


def corpus_letters() -> torch.Tensor:
    """The first letters of the built-in corpus, a = 1; a run of other characters is one 0."""
    text = ""
    for document in StdlibSource().documents():
        text += re.sub("[^a-z]+", " ", document.text.lower())
        if len(text) >= WINDOWS + 2:
            break
    return torch.tensor([0 if letter == " " else ord(letter) - ord("a") + 1 for letter in text[: WINDOWS + 2]])
