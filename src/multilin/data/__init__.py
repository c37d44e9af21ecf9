"""From text to batches: corpora are read, tokenizers trained, documents packed once and memory-mapped."""
