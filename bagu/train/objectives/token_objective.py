"""The common part of objectives over token stores: the cross-entropy of target tokens, and batches of the stores."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bagu.data.corpus import PARTS, Corpus, Part, TextCorpus
from bagu.data.loader import DataConfig, Loader, Transform, check_vocab, evaluation_batches
from bagu.data.store import TokenStore
from bagu.nn.model import Transformer
from bagu.train.cross_entropy import CrossEntropy, check_z_loss
from bagu.train.objective import NO_MODELS, Objective, SourceSize, TrainingData, WholeModel
from bagu.types import Batch


@dataclass(frozen=True, kw_only=True)
class TokenObjective(Objective[Batch]):
    """Minimises the cross-entropy of target tokens. `z_loss` is the weight of the squared logsumexp; 1e-4 is usual."""

    z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_z_loss(self.z_loss)

    @property
    def whole_model(self) -> WholeModel:
        return "never"

    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> CrossEntropy:
        return CrossEntropy(z_loss=self.z_loss)


def token_data(
    corpora: Mapping[str, Corpus],
    stores: Mapping[str, Mapping[Part, TokenStore]],
    data: DataConfig,
    vocab_size: int,
    transform: Transform | None = None,
) -> TrainingData[Batch]:
    """Batches of the stores of `corpora`, each changed by `transform`, for a model of `vocab_size`."""
    train, held = ({name: parts[part] for name, parts in stores.items()} for part in PARTS)
    for store in train.values():
        check_vocab(store, vocab_size)

    def held_out(limit: int | None) -> Iterator[Batch]:
        for name, store in held.items():
            for number, batch in enumerate(evaluation_batches(store, data, limit=limit)):
                yield batch if transform is None else transform(batch, "validation", name, number)

    loader = Loader(train, data)
    return TrainingData(
        loader=loader if transform is None else loader.mapped(transform),
        held_out=held_out,
        sources={name: _size(train[name], held[name], _note(corpora[name])) for name in stores},
        facts={
            name: {
                **corpus.facts,
                "train_documents": train[name].num_documents,
                "train_tokens": train[name].num_tokens,
                "validation_documents": held[name].num_documents,
                "validation_tokens": held[name].num_tokens,
            }
            for name, corpus in corpora.items()
        },
    )


def _note(corpus: Corpus) -> str:
    return corpus.source.note if isinstance(corpus, TextCorpus) else ""


def _size(train: TokenStore, held: TokenStore, note: str) -> SourceSize:
    targets = train.num_tokens if train.loss_mask is None else int(train.loss_mask.sum(dtype="int64"))
    return SourceSize(
        documents=train.num_documents,
        tokens=train.num_tokens,
        targets=targets,
        validation_tokens=held.num_tokens,
        note=note,
    )
