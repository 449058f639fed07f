"""Loads MODEL for an engine process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bagu.config.options import DEVICE, MODEL, MODEL_DTYPE, TOKENIZER
from bagu.errors import BaguError


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Loads (model, tokenizer, chat encoder) in the engine process. It is pickled, so its fields are plain values.
    The first four are options of `bagu serve`."""

    model: Annotated[str, MODEL]
    tokenizer: Annotated[str | None, TOKENIZER] = None
    dtype: Annotated[str, MODEL_DTYPE] = "auto"
    device: Annotated[str | None, DEVICE] = None
    on_host: bool = False  # load to the host's memory: an engine with tp > 1 puts the parts on the devices
    allow_reward: bool = False  # a reward model is accepted: a server scores with it, others generate

    def __call__(self) -> tuple[Any, Any, Any]:
        from bagu.data.chat import ChatEncoder
        from bagu.data.tokenizer import BpeTokenizer
        from bagu.machine.device import named_device, named_dtype
        from bagu.machine.fast_dtype import compute_dtype
        from bagu.recipes.find import find_model
        from bagu.recipes.models import check_predicts_tokens, load_model, tokenizer_folder

        device = named_device(self.device)
        dtype = compute_dtype(device) if self.dtype == "auto" else named_dtype(self.dtype)
        found = find_model(self.model)
        if (found / "vision.json").is_file():
            from bagu.nn.vision.vlm import VLM
            from bagu.recipes.vision.run import load_vision

            seeing = load_vision(found)
            if not isinstance(seeing.model, VLM):
                hint = "serve the result of `bagu train --recipe vlm`"
                raise BaguError(f"{self.model} is a {seeing.run.kind} model, which generates no text", hint=hint)
            return seeing.model.to(device, dtype), seeing.tokenizer, ChatEncoder(seeing.tokenizer)
        if not self.allow_reward:
            check_predicts_tokens(found, self.model)
        model = load_model(found, dtype=dtype, device="cpu" if self.on_host else device)
        place = Path(self.tokenizer) if self.tokenizer else tokenizer_folder(found)
        if place is None:
            raise BaguError(f"there is no tokenizer.json in {found}", hint="pass its folder with --tokenizer")
        tokenizer = BpeTokenizer.load(place)
        return model, tokenizer, ChatEncoder(tokenizer) if tokenizer.chat_template is not None else None
