"""Models that read the standard library as bytes, for labs that compare architectures: small tokens make the positions
and the attention matter most."""

from itertools import islice
from typing import NamedTuple

from bagu.data import BpeTokenizer, DataConfig, Loader, StdlibSource, TokenStore, hold_out, in_memory, tokenize
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.train import OptimizerConfig, ScheduleConfig, TrainConfig, fit

VOCAB = 262  # 256 bytes and six control tokens


class LibraryBytes(NamedTuple):
    train: TokenStore
    held: TokenStore  # other modules


def read_bytes(*, every: int) -> LibraryBytes:
    """Every n-th module of the standard library, without the tables of `encodings`."""
    modules = (d for d in StdlibSource().documents() if not d.id.startswith("encodings/"))
    split = hold_out(islice(modules, 0, None, every), fraction=0.15)
    tokenizer = BpeTokenizer.train((), vocab_size=VOCAB)
    return LibraryBytes(*(in_memory(tokenize(part, tokenizer), token_bytes=tokenizer.token_bytes) for part in split))


def rows_of(context: int, rows: int, seed: int) -> DataConfig:
    """Packing "whole" shuffles rows; a stream would show a few hundred steps only a few modules."""
    return DataConfig(context=context, rows=rows, seed=seed, packing="whole")


def train_on_bytes(
    config: ModelConfig, tokens: TokenStore, data: DataConfig, *, steps: int, seed: int, device: str
) -> Transformer:
    """A new model after `steps` steps. Models of one seed and one `data` see the same batches."""
    model = init_weights(Transformer(config, device=device), seed)
    train = TrainConfig(
        steps=steps,
        seed=seed,
        optimizer=OptimizerConfig(kind="muon", lr=0.02),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=steps // 20, decay_share=0.5),
    )
    if fit(train, model, Loader({"text": tokens}, data)).interrupted:  # Ctrl-C ends the lab, not only this training
        raise KeyboardInterrupt
    return model
