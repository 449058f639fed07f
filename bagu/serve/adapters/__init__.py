"""LoRA adapters over one base model: several in one batch, loaded and unloaded while the engine runs."""
