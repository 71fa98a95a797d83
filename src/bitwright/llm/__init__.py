"""Language models: loading, tokenizers, sessions, generation and serving."""
