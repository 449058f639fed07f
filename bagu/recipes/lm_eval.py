"""A model for lm-evaluation-harness (`pip install 'bagu[lm-eval]'`): its tasks, scored on bagu's engine.

    lm_eval --model bagu --model_args path=runs/chat --tasks hellaswag                     # lm-eval after 0.4.13
    python -m bagu.recipes.lm_eval --model bagu --model_args path=runs/chat --tasks …      # any version

Later versions of the harness find the model by the entry point `lm_eval.models` of this package; up to 0.4.13 the
second command registers it and then runs the harness's own command line. Other arguments of the model: `tokenizer`,
`dtype` and `invariant`, as for `bagu eval`; the harness's own option `--device` chooses the device.

Prompt and continuation are tokenized as in `bagu eval` (eval/choice.py), so a shared task gets equal log-likelihoods.
Two rules are the harness's: a context that is too long is cut from the left with a warning, where `bagu eval` refuses
it; and the names of control tokens in a text become these tokens, since a rendered chat is passed as text.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lm_eval.api.model import LM
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from bagu.errors import BaguError
from bagu.eval.choice import continuation
from bagu.recipes.eval_models import EngineModel, model_of
from bagu.recipes.verbs import EvalOptions
from bagu.serve.request import Sampling

BATCH = 1024  # requests per call of the engine: results are cached and progress is shown after each
MAX_NEW_TOKENS = 256  # where a task sets no limit; the value of the harness's other models
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")  # settings of a task, as the engine names them

T = TypeVar("T")


class _MarkupModel(EngineModel):
    """Reads the names of control tokens in a text as these tokens, and adds the beginning of text only once."""

    def encode(self, text: str) -> list[int]:
        begin, ids = self.tokenizer.encode_prompt(""), self.tokenizer.encode_markup(text)  # type: ignore[attr-defined]
        return ids if ids[: len(begin)] == begin else begin + ids


class BaguLM(LM):
    """`batch_size` and `max_batch_size` are accepted because the harness passes them; the engine forms its batches."""

    def __init__(
        self,
        path: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        invariant: bool = False,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if path.startswith(("http://", "https://")):
            raise BaguError(f"path={path} is a server", hint="use the harness's --model local-completions for it")
        if device == "cuda:0" and not torch.cuda.is_available():  # the harness's default, whatever the machine has
            device = None
        asked = EvalOptions(
            model=path, tasks=(), tokenizer=tokenizer, dtype=dtype, device=device, invariant=bool(invariant)
        )
        found, self._identity = model_of(asked)
        assert isinstance(found, EngineModel)
        self.model = _MarkupModel(found.engine, found.tokenizer, found.chat, found.name)
        self._prefix = self.model.encode("") or [found.tokenizer.eos_id]  # precedes a text without a context

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether greedy decoding would generate it)."""

        def score(pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
            return self._scored([self._pair(context, text) for context, text in pairs])

        return self._batches("loglikelihood", requests, score, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, its first token included; long texts in the harness's windows."""
        size = self.model.max_len - 1  # the last token of a window is only predicted

        def score(texts: Sequence[tuple[str]]) -> list[float]:
            pairs, owners = [], []
            for number, (text,) in enumerate(texts):
                pieces = get_rolling_token_windows(self._tokens(text), self._prefix[-1], size, context_len=1)
                for context, predicted in map(make_disjoint_window, pieces):
                    pairs.append((context + predicted, len(context)))
                    owners.append(number)
            totals = [0.0] * len(texts)
            for owner, (value, _) in zip(owners, self._scored(pairs), strict=True):
                totals[owner] += value
            return totals

        return self._batches("loglikelihood_rolling", requests, score, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        def generate(pairs: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
            prompts, settings = zip(*(self._generation(context, given) for context, given in pairs), strict=True)
            return [found.text or "" for found in self.model.engine.generate(prompts, settings)]

        return self._batches("generate_until", requests, generate, disable_tqdm)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise BaguError("a task with gen_prefix continues an assistant's message, and bagu does not support this")
        if self.model.chat is None:
            raise BaguError(f"{self.model.name} has no chat template", hint="leave out --apply_chat_template")
        return self.model.chat.template.render(chat_history, add_generation_prompt=True)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "" if self.model.chat is None else self.model.chat.template.source

    @property
    def tokenizer_name(self) -> str:
        return str(self._identity["tokenizer"])

    def get_model_info(self) -> dict[str, Any]:
        """For the harness's results file."""
        return {f"model_{name}": value for name, value in self._identity.items()}

    def _batches(self, kind: str, requests: list[Any], answer: Callable[[Any], list[T]], quiet: bool) -> list[T]:
        """The answers to all requests; the harness's cache gets them batch by batch."""
        found: list[T] = []
        with tqdm(total=len(requests), desc=f"Running {kind} requests", disable=quiet) as progress:
            for at in range(0, len(requests), BATCH):
                asked = [request.args for request in requests[at : at + BATCH]]
                for args, value in zip(asked, answer(asked), strict=True):
                    self.cache_hook.add_partial(kind, args, value)
                    found.append(value)
                progress.update(len(asked))
        return found

    def _pair(self, context: str, text: str) -> tuple[list[int], int]:
        """The tokens of context and continuation, and where the continuation begins."""
        if context:
            ids, start = continuation(self.model, context, text)
        else:
            ids, start = self._prefix + self._tokens(text), len(self._prefix)
        kept, _ = maybe_truncate(ids, max_gen_toks=0, max_model_len=self.model.max_len)
        return kept, max(start - (len(ids) - len(kept)), 1)

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a text without the beginning of text."""
        return self.model.encode(text)[len(self.model.encode("")) :]

    def _scored(self, pairs: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        sequences, starts = [ids for ids, _ in pairs], [start for _, start in pairs]
        scores = zip(self.model.engine.score_tokens(sequences, starts, top=1), sequences, starts, strict=True)
        return [
            (sum(t.logprob for t in tokens), all(t.top[0][0] == id for t, id in zip(tokens, ids[start:], strict=True)))
            for tokens, ids, start in scores
        ]

    def _generation(self, context: str, given: dict[str, Any]) -> tuple[list[int], Sampling]:
        """The prompt and the sampling of a request. The harness's `do_sample: false` is temperature 0."""
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_NEW_TOKENS))
        ids, room = maybe_truncate(
            self.model.encode(context) or self._prefix,
            max_gen_toks=wanted.pop("max_gen_toks"),
            max_model_len=self.model.max_len,
            shrink_gen_toks=True,
        )
        stop = tuple(text for text in wanted.pop("until") if text)
        sampled, temperature = wanted.pop("do_sample"), wanted.pop("temperature", 0.0)
        known = {name: wanted.pop(name) for name in SAMPLING if name in wanted}
        if wanted:
            names = ", ".join((*SAMPLING, "temperature", "do_sample", "until", "max_gen_toks"))
            raise BaguError(f"unknown generation settings: {', '.join(wanted)}", hint=f"known: {names}")
        return ids, Sampling(max_tokens=room, temperature=temperature if sampled else 0.0, stop=stop, **known)


def main() -> None:
    """The harness's command line, with this model registered."""
    import lm_eval.models  # noqa: F401 - registers its own models, which it does only while the registry is empty
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "bagu" not in model_registry:
        model_registry.register("bagu", target="bagu.recipes.lm_eval:BaguLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
