"""What a run leaves behind: record, folder, lock, observers, progress lines, HTML, charts."""
