"""Quantization of language models, layer by layer, into the block formats of GGUF."""
