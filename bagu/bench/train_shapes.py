"""The shapes of `bagu bench train`: a model, and the documents of one step."""

from dataclasses import dataclass, replace

from bagu.nn import ModelConfig, preset


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the lengths in tokens of the documents of one step."""

    why: str
    model: ModelConfig
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def words(self) -> str:
        """The documents of a step: "16 × 2048 tokens" if they are equal, else their number and range."""
        low, high = min(self.lengths), max(self.lengths)
        count = len(self.lengths)
        return (
            f"{count} × {low} tokens"
            if low == high
            else f"{self.tokens} tokens in {count} documents of {low} to {high}"
        )


SHAPES = {
    "cpu_6m": Shape(why="5.9M parameters, trains on a laptop in minutes", model=preset("cpu_6m"), lengths=(256,) * 16),
    "llama_1b": Shape(why="TinyLlama's shape: 1.1B parameters", model=preset("llama_1b"), lengths=(2048,) * 16),
    "llama_1b_long": Shape(
        why="TinyLlama's shape with long packed documents, where attention matters",
        model=replace(preset("llama_1b"), max_len=16_384),
        lengths=(16_384, 4096, 5120, 7168),
    ),
    "llama_8b_4": Shape(
        why="four of the 32 layers of Llama 3's 8B shape, and an eighth of its vocabulary: 1.0B parameters",
        model=replace(preset("llama_8b"), vocab_size=16_032, num_layers=4, max_len=2048),
        lengths=(2048,) * 8,
    ),
    "gpt_d20": Shape(why="nanochat's depth 20: 480M parameters", model=preset("gpt_d20"), lengths=(2048,) * 32),
}
