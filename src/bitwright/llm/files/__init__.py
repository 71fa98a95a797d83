"""Writes language models: .bw and .gguf files."""
