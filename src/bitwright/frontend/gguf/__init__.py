"""GGUF files: metadata and tensors, as llama.cpp stores them."""
