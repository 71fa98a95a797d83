"""The last stage before code: ordered kernel calls over buffers, and where the buffers lie."""
