"""Search for the precision of each layer: bw.tune, and the attribution of errors."""
