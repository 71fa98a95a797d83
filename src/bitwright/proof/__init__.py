"""Proofs in model files: golden inputs and outputs, digests of weights, and their verification."""
