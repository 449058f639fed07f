"""Models of one target over encoded inputs. Each has `predict`, and `arrays` and `from_arrays` for safetensors."""
