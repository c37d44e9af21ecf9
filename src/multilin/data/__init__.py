"""From text to batches: reads corpora, trains tokenizers, and packs documents once into memory-mapped files."""
