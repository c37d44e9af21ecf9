"""A run as others find it on the Hugging Face hub: weights, tokenizer, model card, and code that needs no multilin."""
