"""The low-level IR: an ordered schedule of kernel calls over buffers, and its memory plan."""
