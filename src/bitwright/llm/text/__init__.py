"""Text in and out of language models: tokenizers, streaming decoding, chat templates."""
