"""Held-out loss and samples of a model that is divided over ranks: every rank runs its part, and none has the whole.

A forward goes through the stages of a pipeline one after the other. A rank of tp has a part of the vocabulary, a rank
of cp some of the tokens, and the last stage of a pipeline the hidden states: each rank adds what it has to zeros, and
the sum over the ranks is the result. All ranks call with the same texts and get the same bits.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagu import ops
from bagu.nn.sample import pick, uniform
from bagu.parallel.collectives import all_reduce
from bagu.parallel.mesh import Group
from bagu.parallel.vocab_loss import vocab_range
from bagu.train.memory.divided import DividedModel
from bagu.types import IGNORE, Batch

PARTS: tuple[Group, ...] = ("cp", "pp")  # ranks of which each has the hidden states of some tokens, or of none


@torch.no_grad()
def divided_nll_sum(divided: DividedModel, batch: Batch) -> torch.Tensor:
    """Summed negative log-likelihood of the targets of a batch, in nats; `nll_sum` of a whole model."""
    batch, hidden, head = _forward(divided, batch)
    total = torch.zeros((), dtype=torch.float64, device=divided.mesh.device)
    if hidden is not None and head is not None:
        target_logit, lse = divided.token_values(hidden, head, batch.targets)
        total += (lse - target_logit).double().sum()  # both are 0 for an ignored token
    for group in PARTS:
        all_reduce(divided.mesh, total, group)
    return total


@torch.no_grad()
def divided_generate(
    divided: DividedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float | None = None,
    seed: int = 0,
    eos_id: int | None = None,
) -> list[list[int]]:
    """`nn.sample.generate` without a cache: a token runs the texts so far again, which is little for samples."""
    texts, alive = [list(p) for p in prompts], list(range(len(prompts)))
    for t in range(max_new_tokens):
        logits = _last_logits(divided, [texts[i] for i in alive])
        u = torch.tensor([uniform(seed, i, t) for i in alive], device=logits.device)
        drawn = pick(logits, u, temperature=temperature, top_p=top_p).tolist()
        for i, token in zip(alive, drawn, strict=True):
            texts[i] += [] if token == eos_id else [token]
        alive = [i for i, token in zip(alive, drawn, strict=True) if token != eos_id]
        if not alive:
            break
    return [text[len(p) :] for text, p in zip(texts, prompts, strict=True)]


def _last_logits(divided: DividedModel, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[texts, V]: the logits after the last token of each text, on every rank."""
    mesh, vocab = divided.mesh, divided.whole.config.vocab_size
    batch, hidden, head = _forward(divided, _packed(texts, mesh.size("tp") * mesh.size("cp")))
    dtype = torch.promote_types(next(divided.local.parameters()).dtype, torch.float32)
    logits = torch.zeros(len(texts), vocab, dtype=dtype, device=mesh.device)
    if hidden is not None and head is not None:
        ends = (batch.targets != IGNORE).nonzero().flatten()
        start, stop = vocab_range(vocab, mesh.coordinate("tp"), mesh.size("tp"))
        if len(ends):
            logits[batch.targets[ends], start:stop] = ops.matmul(hidden[ends], head).to(dtype)
    for group in ("tp", *PARTS):
        all_reduce(mesh, logits, group)
    return logits


def _packed(texts: Sequence[Sequence[int]], multiple: int) -> Batch:
    """The texts and a document of padding, so that `multiple` divides the tokens. The target of the last token of text
    i is i, and others have none."""
    lengths = [len(text) for text in texts]
    padding = -sum(lengths) % multiple
    ends = torch.tensor([0, *lengths, padding]).cumsum(0)
    targets = torch.full((int(ends[-1]),), IGNORE)
    targets[ends[1:-1] - 1] = torch.arange(len(texts))
    return Batch(
        ids=torch.tensor([token for text in texts for token in text] + [0] * padding),
        targets=targets,
        positions=torch.cat([torch.arange(n) for n in (*lengths, padding)]),
        cu_seqlens=ends.to(torch.int32),
        max_len=max(*lengths, padding),
        num_targets=len(texts),
        target_bytes=0,
        num_padding=padding,
    )


def _forward(divided: DividedModel, batch: Batch) -> tuple[Batch, torch.Tensor | None, torch.Tensor | None]:
    """This rank's tokens of a batch, their hidden states and its rows of the head; None if other stages have them."""
    if divided.mesh.size("cp") > 1:
        (batch,) = divided.split([batch])
    batch = batch.to(divided.mesh.device, non_blocking=True)
    if divided.has_stages:
        return batch, *_through_stages(divided, batch)
    model = divided.parallel.model
    hidden = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len).hidden
    return batch, hidden, model.head_weight


def _through_stages(divided: DividedModel, batch: Batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    mesh, stages, owners = divided.mesh, divided.parallel.stages, divided.parallel.owners
    group, me = mesh.group("pp"), mesh.coordinate("pp")
    x, before = batch.ids[None], owners[0]
    for number, owner in enumerate(owners):
        if me == before != owner:
            dist.send(x.contiguous(), group=group, group_dst=owner)
        if (stage := stages.get(number)) is not None:
            if before != owner:
                rows, dtype = batch.num_tokens // mesh.size("tp"), next(stage.blocks.parameters()).dtype
                x = torch.empty(rows, stage.config.hidden_size, dtype=dtype, device=mesh.device)
                dist.recv(x, group=group, group_src=before)
            x = stage(x, positions=batch.positions[None], cu_seqlens=batch.cu_seqlens[None], max_len=batch.max_len)
            stage.aux_losses.clear()
            stage.expert_loads.clear()
        before = owner
    last = stages.get(len(owners) - 1)
    return (None, None) if last is None else (x, last.head_weight)
