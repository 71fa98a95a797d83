"""The search for the precision of each layer: bw.tune."""
