"""Key-value caches of several sequences: writes and attention."""
