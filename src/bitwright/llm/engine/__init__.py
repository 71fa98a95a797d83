"""Sequences over one decoder: slots of its cache, ragged batches, sessions."""
