"""The embedded model: a small text-to-image world with its renderer, captions, tokenizer, network and detector."""
