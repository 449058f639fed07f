"""The files and outputs of a run: records, run folder, lock, observers, progress lines, HTML, charts."""
