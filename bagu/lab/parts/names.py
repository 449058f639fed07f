"""Two towers trained on glyphs, and the share of pictures whose name they find: for labs about images."""

from typing import cast

import torch

from bagu.data.pictures.glyphs import UNSEEN, in_style, masks
from bagu.data.pictures.paint import painted
from bagu.nn.model import Transformer
from bagu.recipes.vision.batches import PictureLoader
from bagu.recipes.vision.evaluate import image_vectors, ranks, text_vectors
from bagu.recipes.vision.run import Seeing, VisionRun, batches_of, loss_of, new_model, new_tokenizer
from bagu.train import fit


def trained(run: VisionRun, device: str) -> Seeing:
    tokenizer, model = new_tokenizer(run), new_model(run).to(device)
    loader = PictureLoader(batches_of(run, tokenizer, model), run.train.seed)
    if fit(run.train, cast(Transformer, model), loader, loss=loss_of(run)).interrupted:
        raise KeyboardInterrupt
    return Seeing(run=run, model=model.eval(), tokenizer=tokenizer)


def names_found(seeing: Seeing, limit: int | None = None) -> float:
    """The share of pictures in a font that was never trained on whose English name comes first among all (`limit`: of
    the first so many) names of that font."""
    among = in_style(UNSEEN[0])[:limit]
    pictures = painted(masks([c.char for c in among], UNSEEN[0]), 32, torch.Generator().manual_seed(7))
    scores = image_vectors(seeing, pictures) @ text_vectors(seeing, [c.en for c in among]).T
    return sum(rank < 1 for rank in ranks(scores, torch.arange(len(among)))) / len(among)
